"""The order in which a training run begins and syncs.

``AsyncGRPOTrainer`` registers, before any callback of the user: initial sync, then worker start, then the
sync after every ``weight_sync_steps`` steps. transformers restores a checkpoint's weights before
``on_train_begin``, so the initial sync publishes the restored ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class _AtTrainBegin(TrainerCallback):
    """Calls ``function`` when training begins; it must be idempotent per training run, since transformers
    may begin one run more than once.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._function()


class _InitialWeightSyncCallback(_AtTrainBegin):
    """Connects to the engines and gives them the current weights, before any rollout is asked for."""


class _StartRolloutWorkerCallback(_AtTrainBegin):
    """Starts the rollout worker."""


class StepIntervalCallback(TrainerCallback):
    """Calls ``function`` after every ``every_steps`` optimizer steps, counted from where the run began.

    Not after the last step of a run: no rollout would use what it does.
    """

    def __init__(self, function: Callable[[], None], every_steps: int) -> None:
        if every_steps < 1:
            raise ValueError(f"every_steps={every_steps}: expected an integer of at least 1")
        self._function = function
        self._every_steps = every_steps
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._first_step = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        steps = state.global_step - self._first_step
        if steps % self._every_steps == 0 and not control.should_training_stop:
            self._function()


class _StepAppliedCallback(TrainerCallback):
    """Tells the trainer that the parameters changed, before anything else sees the step's end."""

    def __init__(self, applied: Callable[[], None], epochs_done: Callable[[], float]) -> None:
        self._applied = applied
        self._epochs_done = epochs_done

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._applied()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # transformers sees the whole run as one epoch; what is shown counts passes over the prompts.
        state.epoch = self._epochs_done()
