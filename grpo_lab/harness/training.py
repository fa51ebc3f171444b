"""The trainer's side of a run: data, model, trainer, evaluation. One call a rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_lab.events import Evaluated
from grpo_lab.harness.recipe import Recipe
from grpo_lab.harness.refusals import longest_completion
from grpo_lab.harness.rewards import reward_functions
from grpo_lab.harness.run_dir import RunDir
from grpo_lab.ports import Recorder
from grpo_lab.tasks import get_task, task_names
from grpo_lab.tasks.evaluation import evaluate_greedy
from grpo_lab.tasks.sources import load_dataset_source
from grpo_lab.trainer import AsyncGRPOConfig, AsyncGRPOTrainer

StepSeen = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class Learned:
    """Greedy accuracy on the held-out split; None where there is nothing to evaluate with."""

    before: float | None
    after: float | None


def load_training_data(recipe: Recipe) -> Dataset:
    """The training prompts. Raises ``DataError`` or ``ConfigError`` before anything is started."""
    return load_dataset_source(recipe.task, split="train", count=recipe.train_prompts, seed=recipe.seed)


def trainer_config(recipe: Recipe, run: RunDir, urls: Sequence[str], first_term: int = 1) -> AsyncGRPOConfig:
    """The trainer's settings for a recipe. Raises ``ConfigError``."""
    return AsyncGRPOConfig(
        output_dir=str(run.path / "checkpoints"),
        per_device_train_batch_size=recipe.prompts_per_step * recipe.num_generations // recipe.trainer_ranks,
        num_generations=recipe.num_generations,
        max_steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.ramp_steps,
        lr_scheduler_type="constant_with_warmup",
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_completion_length=longest_completion(recipe),
        temperature=recipe.temperature,
        loss_type=recipe.loss_type,
        correction=recipe.correction,
        token_budget=recipe.token_budget,
        max_staleness=recipe.max_staleness,
        max_staleness_steps=recipe.max_staleness_steps,
        staleness_policy=recipe.staleness_policy,
        window=recipe.window,
        weight_sync_steps=recipe.weight_sync_steps,
        max_inflight_tasks=recipe.max_inflight,
        queue_maxsize=recipe.queue_capacity,
        pause_mode=recipe.pause_mode,
        sync_scope=recipe.sync_scope,
        clear_cache=recipe.clear_cache,
        weight_transport=recipe.transport,
        bucket_bytes=recipe.bucket_bytes,
        sync_attempts=recipe.sync_attempts,
        min_engines=recipe.min_engines,
        final_sync=recipe.final_sync,
        first_term=first_term,
        vllm_server_base_url=list(urls),
        request_timeout=recipe.request_timeout,
        heartbeat_stale_after_s=recipe.heartbeat_stale_after_s,
        events_dir=str(run.events),
        log_completions=recipe.log_completions,
        num_completions_to_print=8,
        logging_steps=1,
        save_strategy="steps" if recipe.save_steps else "no",
        save_steps=recipe.save_steps or 500,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=recipe.seed,
    )


def train(
    recipe: Recipe,
    run: RunDir,
    model: Path,
    urls: Sequence[str],
    recorder: Recorder,
    step_seen: StepSeen,
    first_term: int = 1,
) -> Learned:
    """Evaluates, trains, evaluates and saves the model to ``checkpoint/``. Raises what training raised."""
    # It would break into ours.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dataset = load_training_data(recipe)
    trainer = AsyncGRPOTrainer(
        str(model),
        list(reward_functions(recipe, dataset.column_names)),
        trainer_config(recipe, run, urls, first_term),
        dataset,
        recorder=recorder,
    )
    return learn(trainer, recipe, run, step_seen)


def learn(trainer: AsyncGRPOTrainer, recipe: Recipe, run: RunDir, step_seen: StepSeen) -> Learned:
    """The same with a trainer that is there already, of either world."""
    torch.set_num_threads(recipe.trainer_threads)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_ShowSteps(step_seen, lambda: trainer.version))
    before = evaluate(trainer, recipe)
    trainer.train(resume_from_checkpoint=recipe.resume_from or None)
    after = evaluate(trainer, recipe)
    trainer.save_model(str(run.checkpoint))
    return Learned(before, after)


def evaluate(trainer: AsyncGRPOTrainer, recipe: Recipe) -> float | None:
    """Greedy accuracy on the held-out prompts, also into the trace; None where there are none."""
    if recipe.task not in task_names() or not recipe.heldout_prompts or not trainer.is_world_process_zero():
        return None
    task = get_task(recipe.task)
    rows = task.generate("heldout", recipe.heldout_prompts, recipe.seed)
    tokenizer: Any = trainer.processing_class
    accuracy = evaluate_greedy(trainer.model, tokenizer, rows, task)
    trainer.recorder.emit(
        Evaluated(
            split="heldout",
            accuracy=accuracy,
            optimizer_step=trainer.state.global_step,
            version=trainer.version,
            prompts=len(rows),
        )
    )
    return accuracy


class EvaluateEvery(TrainerCallback):
    """Puts the held-out accuracy into the trace now and then. Virtual time stands still meanwhile."""

    def __init__(self, trainer: AsyncGRPOTrainer, recipe: Recipe, every_steps: int) -> None:
        self._trainer, self._recipe, self._every_steps = trainer, recipe, every_steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The accuracy after the last step is evaluated anyway.
        if state.global_step % self._every_steps == 0 and state.global_step < state.max_steps:
            evaluate(self._trainer, self._recipe)


class _ShowSteps(TrainerCallback):
    """Passes what transformers logs on to the progress display."""

    def __init__(self, step_seen: StepSeen, version: Callable[[], int]) -> None:
        self._step_seen = step_seen
        self._version = version
        self._logged_s = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return  # the summary at the end of training
        now_s = time.monotonic()
        took_s, self._logged_s = now_s - self._logged_s, now_s
        shown = {"version": float(self._version())}
        for key, name, scale in (
            ("reward", "reward", 1.0),
            ("staleness/mean", "staleness", 1.0),
            ("weight_sync_time_s", "sync_ms", 1000.0),
            ("tokens", "tokens_per_s", 1.0 / took_s),
        ):
            if key in logs:
                shown[name] = float(logs[key]) * scale
        self._step_seen(state.global_step, shown)
