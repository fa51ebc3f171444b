"""Mutants of the trainer: what it consumes, when, and where it goes on after a crash."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from grpo_lab.events import OptimizerStepApplied, StepPlanned
from grpo_lab.protocol.rollout_worker import RolloutWorker
from grpo_lab.protocol.staleness import GroupBuffer
from grpo_lab.sim.light_trainer import LightTrainer
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.clusters import Clusters, varied
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.trainer.term import TrainingTerm
from grpo_lab.types import RolloutGroup


def with_buffer(buffer: type[GroupBuffer], base: type[TrainingTerm] = TrainingTerm) -> dict[str, Any]:
    return {"term": type("Term", (base,), {"buffer_type": buffer})}


class SlowAreStarved(GroupBuffer):
    """First in, first out, and what is too old is dropped at the end: slow prompts are never trained on.

    Field: tinker-cookbook#822, slime#2238, trl 1.16.0: heavy tails are what the filter removes.
    Planted: nothing is held back at admission (see ``FreeAdmission``), and stale groups are dropped.
    Exposed by: heavy-tailed lengths. D3.
    """

    def _choose(self) -> list[int]:
        return list(self._ready)[: self._bound.groups_per_step]


class FreeAdmission(RolloutWorker):
    """Planted beside ``SlowAreStarved``: no bound at admission."""

    def __init__(self, *args: Any, **named: Any) -> None:
        free = dataclasses.replace(args[-1].bound, policy="drop")
        changed = (*args[:-1], dataclasses.replace(args[-1], bound=free))
        super().__init__(*changed, **named)


class Prefetches(TrainingTerm):
    """Staleness is checked when a group leaves the queue, and the group is used steps later.

    Field: trl 1.16.0: prefetch and gradient accumulation come after the check.
    Planted: two steps' groups are decided ahead.
    Exposed by: a bound that is small. S18.
    """

    ahead = 2

    def next_groups(self) -> tuple[tuple[RolloutGroup, ...], float]:
        waiting: list[Any] = self.__dict__.setdefault("prefetched", [])
        first, step = len(waiting), self.optimizer_step
        recorder, self._recorder = self._recorder, _Silent(self._recorder)
        try:
            for number in range(first, self.ahead):
                self.optimizer_step = step + number
                waiting.append(super().next_groups())
        finally:
            self._recorder, self.optimizer_step = recorder, step
        groups, wait_s = waiting.pop(0)
        recorder.emit(
            StepPlanned(
                term=self.term,
                optimizer_step=step,
                version=self.version,
                groups=tuple(group.group_id for group in groups),
            )
        )
        return groups, wait_s


class _Silent:
    """A recorder that does not tell of steps that are only planned ahead."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def emit(self, event: Any) -> str:
        return self._recorder.last_id if isinstance(event, StepPlanned) else str(self._recorder.emit(event))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


class VersionsForSteps(GroupBuffer):
    """The lag is counted in versions where it was meant in optimizer steps.

    Field: trl 1.16.0: ``weight_sync_steps=4`` makes the true lag four times the logged one.
    Planted: the age in steps is the age in versions.
    Exposed by: several steps a sync, and a bound in steps. S18.
    """

    def staleness(self, group: RolloutGroup, version: int, optimizer_step: int) -> tuple[int, int]:
        versions, _ = super().staleness(group, version, optimizer_step)
        return versions, versions


class LastSampleLeftOut(GroupBuffer):
    """The last sample of a group is left out.

    Own case: a batch that is cut to a multiple of its micro-batches.
    Planted: groups lose their last sample when a step is formed.
    Exposed by: any step. S21.
    """

    def assemble(self, version: int, optimizer_step: int) -> tuple[RolloutGroup, ...] | None:
        groups = super().assemble(version, optimizer_step)
        if groups is None:
            return None
        return tuple(dataclasses.replace(group, samples=group.samples[:-1]) for group in groups)


class FirstDoneFirstUsed(GroupBuffer):
    """Groups are used in the order in which they are complete.

    Own case: an ``as_completed`` where dispatch order was promised.
    Planted: the policies that keep an order take what is there.
    Exposed by: lengths that differ. S22.
    """

    def _choose(self) -> list[int]:
        return list(self._ready)[: self._bound.groups_per_step]


class Corrects(LightTrainer):
    """Environment: a trainer with an importance correction, which says whose logprobs it divides by."""

    def versions(self, group: RolloutGroup) -> tuple[int, ...]:
        return tuple(sorted({span.version for sample in group.samples for span in sample.spans}))

    def _consume(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            told = self._consumed(group)
            versions = self.versions(group)
            self._life.emit(dataclasses.replace(told, correction="tis", correction_versions=versions))


class DividesByTheNewest(Corrects):
    """The correction divides by logprobs of other weights than those that sampled.

    Own case: behaviour logprobs are computed again, with the newest weights.
    Planted: the version is the trainer's.
    Exposed by: a sample that is older than the trainer. S25.
    """

    def versions(self, group: RolloutGroup) -> tuple[int, ...]:
        return (self.term.version,)


class StepTwice(LightTrainer):
    """A step that was interrupted is applied again.

    Own case: the optimizer's state was saved after the step, the trainer's before it.
    Planted: every third step is applied twice.
    Exposed by: any run. S26.
    """

    def _train_step(self) -> None:
        super()._train_step()
        step = self.term.optimizer_step - 1
        if step % 3 == 2:
            self._life.emit(
                OptimizerStepApplied(
                    term=self.term.term, optimizer_step=step, version=self.term.version, loss=0.0
                )
            )


class WorkerLeftRunning(TrainingTerm):
    """The end of training does not stop the worker.

    Own case: only the error path stopped it.
    Planted: a normal end leaves it running.
    Exposed by: any end. L9.
    """

    def _stop_worker(self) -> None:
        if self.lineage.term > 1:
            super()._stop_worker()


HEAVY_TAILS = Clusters(
    "heavy tails",
    varied(
        dataclasses.replace(
            spaces.BASE,
            engines=1,
            slots=16,
            steps=60,
            lengths="heavy",
            mean_tokens=8,
            max_tokens=200,
            token_s=0.05,
            step_s=0.3,
            generations=1,
            prompts_per_step=1,
            max_inflight=16,
            queue_capacity=4,
            checkpoint_every_steps=0,
        ),
        seed=st.integers(0, 5),
        max_staleness=st.integers(1, 2),
    ),
)
"""A hundred groups whose lengths differ widely."""

STEP_BOUND = Clusters(
    "bound in steps",
    varied(
        dataclasses.replace(
            spaces.BASE, staleness_policy="drop", weight_sync_steps=3, max_staleness_steps=2, queue_capacity=6
        ),
        steps=st.integers(4, 7),
        staleness_policy=st.sampled_from(("drop", "freshest")),
        weight_sync_steps=st.integers(2, 3),
        max_staleness=st.integers(1, 3),
        seed=st.integers(0, 3),
        step_s=st.sampled_from((0.05, 0.5)),
    ),
)
"""Several optimizer steps a sync, and a staleness bound that counts steps."""

CORRECTED = Clusters("corrected", spaces.LONG_REQUESTS.scenarios, environment={"trainer": Corrects})

MUTANTS = (
    Mutant(
        "M26", ("D3",), HEAVY_TAILS, SlowAreStarved, {**with_buffer(SlowAreStarved), "worker": FreeAdmission}
    ),
    Mutant("M34", ("S18",), spaces.FREE_ADMISSION, Prefetches, {"term": Prefetches}),
    Mutant("M38", ("S18",), STEP_BOUND, VersionsForSteps, with_buffer(VersionsForSteps)),
    Mutant("M60", ("S21",), spaces.QUIET, LastSampleLeftOut, with_buffer(LastSampleLeftOut)),
    Mutant("M61", ("S22",), spaces.OUT_OF_ORDER, FirstDoneFirstUsed, with_buffer(FirstDoneFirstUsed)),
    Mutant("M63", ("S25",), CORRECTED, DividesByTheNewest, {"trainer": DividesByTheNewest}),
    Mutant("M64-a", ("S26",), spaces.QUIET, StepTwice, {"trainer": StepTwice}),
    Mutant("M69", ("L9",), spaces.QUIET, WorkerLeftRunning, {"term": WorkerLeftRunning}),
)
