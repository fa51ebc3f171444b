"""Asynchronous GRPO on ``transformers.Trainer``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from grpo_lab.algorithms.corrections import USES_BEHAVIOUR_LOGPROBS
from grpo_lab.errors import ConfigError, GrpoLabError, UserError
from grpo_lab.events import (
    CheckpointSaved,
    GroupConsumed,
    LogprobGapMeasured,
    MicroBatchBegan,
    OptimizerStepApplied,
)
from grpo_lab.ports import Recorder
from grpo_lab.recorders import FileRecorder, NullRecorder, run_clock
from grpo_lab.trainer.batching import StepPlan, TrainSample, score_sequences, train_samples
from grpo_lab.trainer.callbacks import (
    StepIntervalCallback,
    _InitialWeightSyncCallback,
    _StartRolloutWorkerCallback,
    _StepAppliedCallback,
)
from grpo_lab.trainer.checkpoint import (
    CheckpointState,
    load_state,
    newest_complete,
    save_state,
    unmark,
    weights_hash,
)
from grpo_lab.trainer.config import AsyncGRPOConfig
from grpo_lab.trainer.dataset import RewardFunctions, check_dataset
from grpo_lab.trainer.gradient import StepTotals, accumulate_gradient
from grpo_lab.trainer.loading import load_model, load_tokenizer
from grpo_lab.trainer.logging import MetricMeans, plan_metrics, print_completions
from grpo_lab.trainer.protocols import (
    RolloutWorkerProtocol,
    WeightSync,
    WeightTransferProtocol,
    WorkerFactory,
    WorkerStart,
)
from grpo_lab.trainer.term import Lineage, TrainingTerm
from grpo_lab.trainer.weight_transfer import CountingSync, FiveMethodSync

_CORRECTION_METRICS = ("ratio_sum", "truncated", "clipped")


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
        check_dataset(train_dataset)
        injected_worker = rollout_worker is not None or make_worker is not None
        if processing_class is None and (isinstance(model, str | Path) or not injected_worker):
            processing_class = load_tokenizer(model)
        model = load_model(model, args)
        self.rewards = RewardFunctions(
            reward_funcs, processing_class, args.reward_weights, args.reward_timeout
        )
        self._injected_worker = rollout_worker
        self._weight_transfer = weight_transfer
        self._make_worker = make_worker
        self._make_weight_sync = make_weight_sync
        self._lineage = Lineage(term=0)
        self._term: TrainingTerm | None = None
        self._step = _StepInProgress()
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
            data_collator=lambda plans: plans,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=[*own, *(callbacks or [])],
            optimizers=optimizers,
        )
        self.recorder = recorder or _default_recorder(args)

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

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Runs one term. ``resume_from_checkpoint``: a folder, or True for the newest complete one.

        Raises:
            UserError: the checkpoint is not complete.
            SyncError, WorkerError: training could not go on; what was running has been stopped.
        """
        if self._injected_worker is not None and self._make_worker is not None:
            raise ConfigError("make_worker", self._make_worker, "None when rollout_worker is given")
        lineage = self._next_lineage(resume_from_checkpoint)
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
            output = super().train(resume_from_checkpoint=lineage.checkpoint or None, **kwargs)
        except BaseException as failure:  # also an interrupt: what runs must be stopped
            error = failure
        self._lineage, error = self._term.close(error)
        if error is not None:
            raise error
        return output

    def _next_lineage(self, resume: str | bool | None) -> Lineage:
        if not resume:
            last = self._lineage
            return Lineage(last.term + 1, last.version, last.optimizer_step, last.cursor)
        path = newest_complete(Path(self.args.output_dir)) if resume is True else Path(resume)
        cut = load_state(path)
        term = max(cut.term, self._lineage.term) + 1
        version = max(cut.version, self._lineage.version)  # versions are never used twice
        return Lineage(term, version, cut.optimizer_step, cut.cursor, str(path))

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
            self._step = _StepInProgress(fingerprint=self._fingerprint())

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
            return _announcing(self._injected_worker)
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
        return _StepPlans(self._next_plan)

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
        """Rank 0 decides what the step consumes; every rank gets the same plan, or the same failure."""
        answer: list[Any] = [None]
        failure: BaseException | None = None
        if self.is_world_process_zero():
            try:
                groups, wait_s = self.term.next_groups()
                answer = [
                    StepPlan(
                        self.term.term,
                        self.term.optimizer_step,
                        self.term.version,
                        groups,
                        self.term.weights_are_version,
                        wait_s,
                    )
                ]
            except BaseException as error:  # also an interrupt: the other ranks wait for an answer
                failure, answer = error, [repr(error)]
        broadcast_object_list(answer, from_process=0)
        if failure is not None:
            raise failure
        if isinstance(answer[0], str):
            raise GrpoLabError(f"rank 0 could not form the next optimizer step: {answer[0]}")
        return answer[0]

    def training_step(
        self, model: nn.Module, inputs: StepPlan, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The gradient of the whole step that ``inputs`` plans; returns its loss."""
        began = time.monotonic()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        samples = train_samples(
            inputs,
            loss_type=self.args.loss_type,
            scale_rewards=self.args.scale_rewards,
            advantage_epsilon=self.args.advantage_epsilon,
            max_completion_length=self.args.max_completion_length,
        )
        if self.is_world_process_zero():
            for group in inputs.groups:
                self._emit_consumed(inputs, group)

        def micro_batch_began(number: int, micro_batch: Sequence[TrainSample], tokens: int) -> None:
            self.recorder.emit(
                MicroBatchBegan(
                    term=inputs.term,
                    optimizer_step=inputs.optimizer_step,
                    version=inputs.version,
                    rank=self.args.process_index,
                    micro_batch=number,
                    groups=tuple(dict.fromkeys(item.group_id for item in micro_batch)),
                    samples=len(micro_batch),
                    tokens=tokens,
                )
            )

        totals = accumulate_gradient(model, self.accelerator, self.args, inputs, samples, micro_batch_began)
        totals = totals.reduced(self.accelerator, _CORRECTION_METRICS)
        if not math.isfinite(totals.loss):
            raise GrpoLabError(
                f"the loss of optimizer step {inputs.optimizer_step} is {totals.loss}; the parameters were "
                "left as they are. Lower learning_rate or max_grad_norm"
            )
        self._step = _StepInProgress(inputs, totals, began, self._step.fingerprint)
        return torch.tensor(totals.loss, device=self.args.device)

    def _emit_consumed(self, plan: StepPlan, group: Any) -> None:
        corrected = self.args.correction in USES_BEHAVIOUR_LOGPROBS
        versions = {span.version for sample in group.samples for span in sample.spans}
        versions |= {version for one in group.samples for version in (one.version_first, one.version_last)}
        self.recorder.emit(
            GroupConsumed(
                term=plan.term,
                group=group.group_id,
                number=group.number,
                prompt_index=group.prompt_index,
                samples=tuple(sample.sample_id for sample in group.samples),
                versions_first=tuple(sample.version_first for sample in group.samples),
                versions_last=tuple(sample.version_last for sample in group.samples),
                version=plan.version,
                optimizer_step=plan.optimizer_step,
                optimizer_step_first=self.term.step_of_version(group.version_first),
                correction=self.args.correction,
                correction_versions=tuple(sorted(versions)) if corrected else (),
            )
        )

    def _step_applied(self) -> None:
        """Right after ``optimizer.step()``: what the step consumed is done."""
        step, plan = self._step, self._step.plan
        if plan is None:
            raise GrpoLabError("an optimizer step was applied that no plan stands behind")
        fingerprint = self._fingerprint()
        changed = not torch.equal(fingerprint, step.fingerprint)
        metrics = plan_metrics(plan, self.rewards.names) | _correction_metrics(step.totals)
        metrics["tokens"] = float(step.totals.tokens)
        self._means.add(metrics)
        self.term.step_applied(plan.groups)
        if self.is_world_process_zero():
            self._emit_step(step, plan, metrics, changed)
        self._step = _StepInProgress(plan, step.totals, step.began, fingerprint)

    def _emit_step(
        self, step: _StepInProgress, plan: StepPlan, metrics: dict[str, float], changed: bool
    ) -> None:
        totals = step.totals
        if totals.gap_tokens:
            self.recorder.emit(
                LogprobGapMeasured(
                    version=plan.version,
                    gap_max=totals.gap_max,
                    gap_mean=totals.gap_sum / totals.gap_tokens,
                    tokens=totals.gap_tokens,
                )
            )
        self.recorder.emit(
            OptimizerStepApplied(
                term=plan.term,
                optimizer_step=plan.optimizer_step,
                version=plan.version,
                loss=totals.loss,
                reward_mean=metrics.get("reward"),
                grad_norm=self._grad_norm,
                tokens=totals.tokens,
                duration_s=time.monotonic() - step.began,
                wait_s=plan.wait_s,
                changed=changed,
                metrics=metrics,
            )
        )

    def _fingerprint(self) -> torch.Tensor:
        """A norm per parameter: equal before and after a step when the step changed nothing."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        return torch.stack([norm.float() for norm in torch._foreach_norm(parameters)])

    def _epochs_done(self) -> float:
        return self.term.optimizer_step * self.args.groups_per_step / len(self.train_dataset)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        value = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._grad_norm = None if value is None else float(value)
        return value

    def floating_point_ops(self, inputs: Any) -> int:
        """About 6 operations a parameter and token: forward and backward."""
        return 6 * sum(parameter.numel() for parameter in self.model.parameters()) * self._step.totals.tokens

    # ---- logs and checkpoints --------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = logs | self._means.take()
            if self.args.log_completions and self._step.plan is not None and self.is_world_process_zero():
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
        cursor = term.cursor
        save_state(
            directory, CheckpointState(term.term, term.version, term.optimizer_step, cursor, saved_hash)
        )
        self.recorder.emit(
            CheckpointSaved(
                checkpoint=str(directory),
                term=term.term,
                version=term.version,
                optimizer_step=term.optimizer_step,
                prompt_low_water=cursor.low_water,
                prompts_done=cursor.done,
                weights_hash=saved_hash,
            )
        )


class _StepInProgress:
    """What is known of the step between its plan and the change of the parameters."""

    def __init__(
        self,
        plan: StepPlan | None = None,
        totals: StepTotals | None = None,
        began: float = 0.0,
        fingerprint: torch.Tensor | None = None,
    ) -> None:
        self.plan = plan
        self.totals = totals or StepTotals()
        self.began = began
        self.fingerprint = torch.empty(0) if fingerprint is None else fingerprint


class _StepPlans:
    """One plan per optimizer step, made when it is asked for: nothing is prefetched."""

    def __init__(self, next_plan: Callable[[], StepPlan]) -> None:
        self._next_plan = next_plan

    def __iter__(self) -> Iterator[StepPlan]:
        while True:
            yield self._next_plan()


def _correction_metrics(totals: StepTotals) -> dict[str, float]:
    tokens = max(totals.tokens, 1)
    names = {
        "ratio_sum": "sampling/importance_sampling_ratio/mean",
        "truncated": "sampling/truncated_ratio",
        "clipped": "clip_ratio/region_mean",
    }
    return {names[name]: value / tokens for name, value in totals.correction.items() if name in names}


def _announcing(worker: RolloutWorkerProtocol) -> WorkerFactory:
    """An injected worker is told its first version the way it is told every other."""

    def make(start: WorkerStart) -> RolloutWorkerProtocol:
        worker.update_model_version(start.version)
        return worker

    return make


def _default_recorder(args: AsyncGRPOConfig) -> Recorder:
    actor = "trainer" if args.process_index == 0 else f"trainer-r{args.process_index}"
    if args.events_dir is None:
        return NullRecorder(actor)
    return FileRecorder(actor, Path(args.events_dir), run_clock())
