"""An optimizer step from its plan to the change of the parameters, and the events that tell of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from grpo_lab.events import GroupConsumed, LogprobGapMeasured, MicroBatchBegan, OptimizerStepApplied
from grpo_lab.ports import Recorder
from grpo_lab.trainer.batching import StepPlan, TrainSample
from grpo_lab.trainer.gradient import StepTotals
from grpo_lab.trainer.logging import correction_metrics, plan_metrics
from grpo_lab.types import RolloutGroup


def group_consumed(
    group: RolloutGroup,
    *,
    term: int,
    version: int,
    optimizer_step: int,
    optimizer_step_first: int,
    correction: str = "none",
    correction_versions: tuple[int, ...] = (),
) -> GroupConsumed:
    """The event that the gradient of ``optimizer_step`` begins to use ``group``."""
    return GroupConsumed(
        term=term,
        group=group.group_id,
        number=group.number,
        prompt_index=group.prompt_index,
        samples=tuple(sample.sample_id for sample in group.samples),
        versions_first=tuple(sample.version_first for sample in group.samples),
        versions_last=tuple(sample.version_last for sample in group.samples),
        version=version,
        optimizer_step=optimizer_step,
        optimizer_step_first=optimizer_step_first,
        correction=correction,
        correction_versions=correction_versions,
    )


@dataclass(slots=True)
class StepInProgress:
    """A planned step: its sums are known after the backward passes."""

    plan: StepPlan
    began_s: float
    totals: StepTotals = field(default_factory=StepTotals)

    def metrics(self, reward_names: Sequence[str]) -> dict[str, float]:
        tokens = {"tokens": float(self.totals.tokens)}
        return plan_metrics(self.plan, reward_names) | correction_metrics(self.totals) | tokens


class StepPlans:
    """One plan per optimizer step, made when it is asked for: nothing is prefetched."""

    def __init__(self, next_plan: Callable[[], StepPlan]) -> None:
        self._next_plan = next_plan

    def __iter__(self) -> Iterator[StepPlan]:
        while True:
            yield self._next_plan()


class StepEvents:
    """Emits what happens in the steps of one rank."""

    def __init__(self, recorder: Recorder, rank: int, correction: str) -> None:
        self._recorder = recorder
        self._rank = rank
        self._correction = correction

    def consumed(self, plan: StepPlan, step_of_version: Callable[[int], int]) -> None:
        """The gradient of the step begins to use the plan's groups. Rank 0 tells it for all."""
        for group in plan.groups:
            self._recorder.emit(
                group_consumed(
                    group,
                    term=plan.term,
                    version=plan.version,
                    optimizer_step=plan.optimizer_step,
                    optimizer_step_first=step_of_version(group.version_first),
                    correction=self._correction,
                    correction_versions=self._correction_versions(group),
                )
            )

    def micro_batch_began(
        self, plan: StepPlan, number: int, samples: Sequence[TrainSample], tokens: int
    ) -> None:
        self._recorder.emit(
            MicroBatchBegan(
                term=plan.term,
                optimizer_step=plan.optimizer_step,
                version=plan.version,
                rank=self._rank,
                micro_batch=number,
                groups=tuple(dict.fromkeys(item.group_id for item in samples)),
                samples=len(samples),
                tokens=tokens,
            )
        )

    def applied(
        self, step: StepInProgress, metrics: dict[str, float], grad_norm: float | None, changed: bool
    ) -> None:
        plan, totals = step.plan, step.totals
        if totals.gap_tokens:
            self._recorder.emit(
                LogprobGapMeasured(
                    version=plan.version,
                    gap_max=totals.gap_max,
                    gap_mean=totals.gap_sum / totals.gap_tokens,
                    tokens=totals.gap_tokens,
                )
            )
        self._recorder.emit(
            OptimizerStepApplied(
                term=plan.term,
                optimizer_step=plan.optimizer_step,
                version=plan.version,
                loss=totals.loss,
                reward_mean=metrics.get("reward"),
                grad_norm=grad_norm,
                tokens=totals.tokens,
                duration_s=time.monotonic() - step.began_s,
                wait_s=plan.wait_s,
                changed=changed,
                metrics=metrics,
            )
        )

    def _correction_versions(self, group: RolloutGroup) -> tuple[int, ...]:
        """Every version whose logprobs the correction divides by."""
        if self._correction == "none":
            return ()
        ends = {
            version for sample in group.samples for version in (sample.version_first, sample.version_last)
        }
        return tuple(sorted(ends | {span.version for sample in group.samples for span in sample.spans}))


def parameter_norms(model: nn.Module) -> Tensor:
    """A norm per parameter in double precision: equal before and after a step that changed nothing.

    A small learning rate moves a large tensor's norm by less than single precision can show.
    """
    parameters = [parameter.detach() for parameter in model.parameters()]
    return torch.stack(torch._foreach_norm(parameters, 2, torch.float64))
