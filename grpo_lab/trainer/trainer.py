"""Asynchronous GRPO on ``transformers.Trainer``."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from grpo_lab.algorithms.objectives import CORRECTION_METRICS
from grpo_lab.errors import ConfigError, GrpoLabError, UserError
from grpo_lab.ports import Recorder
from grpo_lab.recorders import FileRecorder, NullRecorder, run_clock
from grpo_lab.trainer.agreement import decided_by_rank_zero
from grpo_lab.trainer.batching import StepPlan, score_sequences, train_samples
from grpo_lab.trainer.callbacks import (
    StepIntervalCallback,
    _InitialWeightSyncCallback,
    _StartRolloutWorkerCallback,
    _StepAppliedCallback,
)
from grpo_lab.trainer.checkpoint import (
    CheckpointState,
    begin_term,
    load_state,
    newest_complete,
    save_state,
    saved_event,
    unmark,
    weights_hash,
)
from grpo_lab.trainer.config import AsyncGRPOConfig
from grpo_lab.trainer.dataset import RewardFunctions, check_dataset
from grpo_lab.trainer.gradient import accumulate_gradient
from grpo_lab.trainer.loading import check_vocabulary, load_model, load_tokenizer
from grpo_lab.trainer.logging import MetricMeans, print_completions
from grpo_lab.trainer.protocols import (
    RolloutWorkerProtocol,
    WeightSync,
    WeightTransferProtocol,
    WorkerFactory,
    WorkerStart,
)
from grpo_lab.trainer.step import StepEvents, StepInProgress, StepPlans, parameter_norms
from grpo_lab.trainer.term import Lineage, TrainingTerm, announcing
from grpo_lab.trainer.weight_transfer import CountingSync, FiveMethodSync


class AsyncGRPOTrainer(Trainer):
    """Trains a causal language model by GRPO on rollouts that are generated meanwhile.

    Every ``train()`` is a *term*: connect to the engines, sync the current (maybe restored) weights, start
    the rollout worker, then one optimizer step after another, with a weight sync after every
    ``weight_sync_steps`` of them. At the end, on every path: stop the worker, sync once more if asked,
    close the transfer. When a step begins, rank 0 decides all its groups under the current version and
    hands the plan to all ranks; nothing is decided ahead.

    Args:
        model: a model, or the path of one (``model_init_kwargs`` go to ``from_pretrained``).
        reward_funcs: one or several functions ``f(prompts, completions, completion_ids, **columns)``, sync
            or async, returning a number or None for each completion.
        args: the settings.
        train_dataset: has a ``prompt`` column (text or chat messages); the others go to ``reward_funcs``.
        processing_class: the tokenizer; by default the one beside the model.
        callbacks: run after the trainer's own.
        rollout_worker: replaces the built-in worker. Then no weights are transferred unless
            ``weight_transfer`` is given too; versions are still counted.
        weight_transfer: replaces the built-in transfer.
        recorder: writes the trainer's part of the trace; by default into ``args.events_dir``.
        make_weight_sync, make_worker: make a fresh one for each term, for other worlds than the real one.

    Raises:
        ConfigError, DataError, ModelError: at construction.
    """

    args: AsyncGRPOConfig
    model: Any
    optimizer: Any
    train_dataset: Any

    def __init__(
        self,
        model: str | Path | nn.Module,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        args: AsyncGRPOConfig,
        train_dataset: Any,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        rollout_worker: RolloutWorkerProtocol | None = None,
        weight_transfer: WeightTransferProtocol | None = None,
        *,
        recorder: Recorder | None = None,
        make_weight_sync: Callable[[], WeightSync] | None = None,
        make_worker: WorkerFactory | None = None,
    ) -> None:
        if not isinstance(args, AsyncGRPOConfig):
            raise ConfigError("args", type(args).__name__, "an AsyncGRPOConfig")
        if rollout_worker is not None and make_worker is not None:
            raise ConfigError("make_worker", make_worker, "None when rollout_worker is given")
        check_dataset(train_dataset)
        injected_worker = rollout_worker is not None or make_worker is not None
        if processing_class is None and (isinstance(model, str | Path) or not injected_worker):
            processing_class = load_tokenizer(model)
        model = load_model(model, args)
        check_vocabulary(model, processing_class)
        self.rewards = RewardFunctions(
            reward_funcs, processing_class, args.reward_weights, args.reward_timeout
        )
        self._injected_worker = rollout_worker
        self._weight_transfer = weight_transfer
        self._make_worker = make_worker
        self._make_weight_sync = make_weight_sync
        self._lineage = Lineage(term=0)
        self._term: TrainingTerm | None = None
        self._step: StepInProgress | None = None
        self._norms = torch.empty(0)
        self._means = MetricMeans()
        self._grad_norm: float | None = None
        own = [
            _InitialWeightSyncCallback(self._begin_term),
            _StartRolloutWorkerCallback(self._start_worker),
            StepIntervalCallback(self._sync_weights, args.weight_sync_steps),
            _StepAppliedCallback(self._step_applied, self._epochs_done),
        ]
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=[*own, *(callbacks or [])],
            optimizers=optimizers,
        )
        self.recorder = _default_recorder(args) if recorder is None else recorder
        self._events = StepEvents(self.recorder, args.process_index, args.surrogate)

    @property
    def term(self) -> TrainingTerm:
        """The training run in progress, or the last one."""
        if self._term is None:
            raise GrpoLabError("train() has not been called yet")
        return self._term

    @property
    def version(self) -> int:
        """The last committed weight version; 0 before the first sync."""
        return self._lineage.version if self._term is None else self._term.version

    # ---- a term ----------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Runs one term. ``resume_from_checkpoint``: a folder, or True for the newest complete one.

        Raises:
            UserError: the checkpoint is not complete.
            SyncError, WorkerError: training could not go on; what was running has been stopped.
        """
        lineage = decided_by_rank_zero(
            lambda: self._lineage_after(resume_from_checkpoint), self.is_world_process_zero()
        )
        self._term = TrainingTerm(
            lineage,
            self.args,
            self.recorder,
            self._new_weight_sync(),
            self._worker_factory() if self.is_world_process_zero() else None,
            self.named_tensors,
        )
        output, error = None, None
        try:
            output = super().train(lineage.checkpoint or None, trial, ignore_keys_for_eval)
        except BaseException as failure:  # also an interrupt: what runs must be stopped
            error = failure
        self._lineage, error = self._term.close(error)
        if error is not None:
            raise error
        return output

    def _lineage_after(self, resume: str | bool | None) -> Lineage:
        """The last run of this trainer, or the checkpoint to resume from, in a new term."""
        output_dir = Path(self.args.output_dir or ".")
        last = self._lineage
        if resume:
            path = newest_complete(output_dir) if resume is True else Path(resume)
            cut = load_state(path)
            term = begin_term(output_dir, max(cut.term + 1, last.term + 1, self.args.first_term))
            return Lineage(term, cut.version, cut.optimizer_step, cut.cursor, str(path))
        term = begin_term(output_dir, max(last.term + 1, self.args.first_term))
        return Lineage(term, last.version, last.optimizer_step, last.cursor)

    def _begin_term(self) -> None:
        """Connects and syncs; transformers has restored the checkpoint's weights by now."""
        restored = ""
        if self.term.lineage.checkpoint:
            restored = weights_hash(self.model)
            saved = load_state(Path(self.term.lineage.checkpoint)).weights_hash
            if restored != saved:
                raise UserError(
                    f"the weights in {self.term.lineage.checkpoint} have hash {restored}, but {saved} was "
                    "saved: the checkpoint is damaged. Resume from an older one"
                )
        outcome = self.term.begin(restored)
        if outcome is not None:
            self._means.add({"weight_sync_time_s": outcome.total_s})
            self._norms = parameter_norms(self.model)

    def _start_worker(self) -> None:
        self.term.start_worker()

    def _sync_weights(self) -> None:
        self._means.add({"weight_sync_time_s": self.term.sync().total_s})

    def _new_weight_sync(self) -> WeightSync:
        if self._make_weight_sync is not None:
            return self._make_weight_sync()
        if self._weight_transfer is not None:
            return FiveMethodSync(self._weight_transfer)
        if self._injected_worker is not None or self._make_worker is not None:
            return CountingSync()
        from grpo_lab.trainer import assembly  # noqa: PLC0415 - the real world, only where it is used

        return assembly.build_weight_sync(
            self.args,
            self.recorder,
            named_tensors=self.named_tensors,
            score=self.score,
            vocabulary=self.model.config.vocab_size,
        )

    def _worker_factory(self) -> WorkerFactory:
        if self._make_worker is not None:
            return self._make_worker
        if self._injected_worker is not None:
            return announcing(self._injected_worker)
        return self._start_worker_process

    def _start_worker_process(self, start: WorkerStart) -> RolloutWorkerProtocol:
        from grpo_lab.trainer import assembly  # noqa: PLC0415

        return assembly.make_worker_process(
            start,
            self.args,
            self.train_dataset,
            self.rewards.functions,
            self.processing_class,
            self.recorder,
        )

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every parameter in a fixed order; tied ones under each of their names.

        Sharded tensors are gathered one at a time, so every rank must go through all of them.
        """
        for name, parameter in self.accelerator.unwrap_model(self.model).named_parameters(
            remove_duplicate=False
        ):
            tensor = parameter.detach()
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The model's own logprobs at temperature 1 of every token but the first of each sequence."""
        return score_sequences(self.model, sequences, self.args.device)

    # ---- an optimizer step -----------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        return StepPlans(self._next_plan)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        return [next(epoch_iterator)], None

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, int, int, int, int]:
        """The whole run is one epoch to transformers; prompts are counted by the cursor."""
        prompts = len(self.train_dataset)
        max_steps = args.max_steps
        if max_steps < 0:
            max_steps = max(1, math.ceil(args.num_train_epochs * prompts / args.groups_per_step))
        samples = args.samples_per_step
        return 1, max_steps, prompts, max_steps * samples, samples, max_steps, max_steps

    def _next_plan(self) -> StepPlan:
        return decided_by_rank_zero(self._plan, self.is_world_process_zero())

    def _plan(self) -> StepPlan:
        """What the step that begins now consumes."""
        term = self.term
        groups, wait_s = term.next_groups()
        return StepPlan(
            term.term,
            term.optimizer_step,
            term.version,
            groups,
            term.weights_are_version,
            wait_s,
            cause=self.recorder.last_id,
        )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The gradient of the whole step that ``inputs``, a ``StepPlan``, describes; returns its loss."""
        plan: StepPlan = inputs
        self.recorder.observe(plan.cause)
        step = self._step = StepInProgress(plan, time.monotonic())
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        samples = train_samples(
            plan,
            loss_type=self.args.loss_type,
            scale_rewards=self.args.scale_rewards,  # type: ignore[arg-type]
            advantage_epsilon=self.args.advantage_epsilon,
            max_completion_length=self.args.max_completion_length,
        )
        if self.is_world_process_zero():
            self._events.consumed(plan, self.term.step_of_version)
        began = functools.partial(self._events.micro_batch_began, plan)
        totals = accumulate_gradient(model, self.accelerator, self.args, plan, samples, began)
        step.totals = totals.reduced(self.accelerator, CORRECTION_METRICS)
        if not math.isfinite(step.totals.loss):
            raise GrpoLabError(
                f"the loss of optimizer step {plan.optimizer_step} is {step.totals.loss}; the parameters "
                "were left as they are. Lower learning_rate or max_grad_norm"
            )
        return torch.tensor(step.totals.loss, device=self.args.device)

    def _step_applied(self) -> None:
        """Right after ``optimizer.step()``: what the step consumed is done."""
        step = self._step
        if step is None:
            raise GrpoLabError("an optimizer step was applied that no plan stands behind")
        norms = parameter_norms(self.model)
        changed = not torch.equal(norms, self._norms)
        self._norms = norms
        metrics = step.metrics(self.rewards.names)
        self._means.add(metrics)
        self.term.step_applied(step.plan.groups)
        if self.is_world_process_zero():
            self._events.applied(step, metrics, self._grad_norm, changed)

    def _epochs_done(self) -> float:
        return self.term.optimizer_step * self.args.groups_per_step / len(self.train_dataset)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        value = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        self._grad_norm = None if value is None else float(value)
        return value

    def floating_point_ops(self, inputs: Any) -> int:
        """About 6 operations a parameter and token: forward and backward."""
        tokens = 0 if self._step is None else self._step.totals.tokens
        return 6 * tokens * int(sum(parameter.numel() for parameter in self.model.parameters()))

    # ---- logs and checkpoints --------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = logs | self._means.take()
            if self.args.log_completions and self._step is not None and self.is_world_process_zero():
                limit = self.args.num_completions_to_print
                print_completions(self._step.plan, self.term.optimizer_step, limit)
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The files of transformers, then the mark that makes them a consistent cut, then old ones go."""
        run_dir = self._get_output_dir(trial)
        directory = Path(run_dir) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            unmark(directory)
        keep, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = keep
        self.accelerator.wait_for_everyone()
        saved_hash = weights_hash(self.model)
        if self.args.should_save:
            if not self.args.save_only_model:
                self._mark_checkpoint(directory, saved_hash)
            rotate_checkpoints(run_dir, save_total_limit=keep, use_mtime=True)

    def _mark_checkpoint(self, directory: Path, saved_hash: str) -> None:
        term = self.term
        state = CheckpointState(term.term, term.version, term.optimizer_step, term.cursor, saved_hash)
        save_state(directory, state)
        self.recorder.emit(saved_event(directory, state))


def _default_recorder(args: AsyncGRPOConfig) -> Recorder:
    actor = "trainer" if args.process_index == 0 else f"trainer-r{args.process_index}"
    if args.events_dir is None:
        return NullRecorder(actor)
    return FileRecorder(actor, Path(args.events_dir), run_clock())
