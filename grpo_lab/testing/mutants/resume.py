"""Mutants of a resume: where a trainer that died, or trains again, goes on."""

from __future__ import annotations

import dataclasses
from typing import Any

from grpo_lab.protocol.cursor import PromptCursorLedger
from grpo_lab.protocol.staleness import GroupBuffer
from grpo_lab.sim.light_trainer import CheckpointStore, Cut, LightTrainer
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.testing.mutants.trainer import with_buffer
from grpo_lab.testing.mutants.worker import STAYING, PatientTerm
from grpo_lab.trainer.protocols import SyncOutcome
from grpo_lab.trainer.term import TrainingTerm
from grpo_lab.types import CursorState, RolloutGroup


def with_store(change: Any) -> dict[str, Any]:
    """A trainer whose checkpoints are changed as they are read."""

    class Store(CheckpointStore):
        def __init__(self, kept: CheckpointStore) -> None:
            self._kept = kept

        def save(self, cut: Cut) -> None:
            self._kept.save(cut)

        def resume(self, fresh: Any) -> Cut:
            cut = self._kept.resume(fresh)
            lineage = cut.lineage
            return cut if not lineage.checkpoint else dataclasses.replace(cut, lineage=change(lineage))

    class Trainer(LightTrainer):
        def __init__(
            self, scenario: Any, loop: Any, life: Any, store: Any, *args: Any, **kwargs: Any
        ) -> None:
            super().__init__(scenario, loop, life, Store(store), *args, **kwargs)

    return {"trainer": Trainer}


class VersionFallsBack:
    """After a failover the version begins at 1 again; staleness is negative and the filter lets all through.

    Field: miles#2244, #2835: the counter lives in the process that died.
    Planted: a resumed run begins with version 0 and its optimizer steps.
    Exposed by: a trainer that dies. S1, S18.
    """

    @staticmethod
    def change(lineage: Any) -> Any:
        return dataclasses.replace(lineage, version=0, checkpoint="")


class CutIsMixed:
    """A resume takes weights and version from two moments.

    Field: miles#2835, in its second form: the version comes from the tracker's file, the rest from the
    checkpoint.
    Planted: a resumed run begins one version later than its checkpoint says.
    Exposed by: a trainer that dies. S27.
    """

    @staticmethod
    def change(lineage: Any) -> Any:
        return dataclasses.replace(lineage, version=lineage.version + 1)


class StepsAhead:
    """A resumed run counts optimizer steps that were never applied.

    Own case: the step is counted before the checkpoint is written, and once more when it is read.
    Planted: two steps more, without the name of a checkpoint.
    Exposed by: a trainer that dies. S26, S27.
    """

    @staticmethod
    def change(lineage: Any) -> Any:
        return dataclasses.replace(lineage, optimizer_step=lineage.optimizer_step + 2, checkpoint="")


class PromptsSkipped:
    """A resume skips the prompts that were under way.

    Field: NeMo-RL#2651, #3599: the cursor of the data loader is that of what was dispatched.
    Planted: the cursor of a checkpoint is three prompts ahead.
    Exposed by: a trainer that dies. S27.
    """

    @staticmethod
    def change(lineage: Any) -> Any:
        cursor = CursorState(lineage.cursor.low_water + 3, ())
        return dataclasses.replace(lineage, cursor=cursor)


class AllIsStale(GroupBuffer):
    """A restarted trainer takes everything for stale, for ever.

    Field: marin#1829: after a restart with a version that has fallen back all that comes is dropped.
    Planted: in a later term ages are ten versions too large.
    Exposed by: a trainer that dies. L8, L5.
    """

    def assemble(self, version: int, optimizer_step: int) -> tuple[RolloutGroup, ...] | None:
        return super().assemble(version + (10 if self._term > 1 else 0), optimizer_step)


class SecondRunWithoutSync(TrainingTerm):
    """A second training run neither syncs nor starts the worker anew, yet its version rises.

    Field: trl 1.16.0: callbacks that do their work once in the life of the trainer.
    Planted: from the second term on the initial sync is taken for done.
    Exposed by: a second term. S1, S31.
    """

    def begin(self, weights_hash: str) -> SyncOutcome | None:
        if self.term == 1:
            return super().begin(weights_hash)
        real, self._sync_until_committed = self._sync_until_committed, self._assumed  # type: ignore[method-assign]
        try:
            return super().begin(weights_hash)
        finally:
            self._sync_until_committed = real  # type: ignore[method-assign]

    def _assumed(self) -> SyncOutcome:
        self.version += 1
        self.synced_step = self._steps_of[self.version] = self.optimizer_step
        return SyncOutcome(self.version, True, {}, 0.0, ())


class OneMarkOnly(PromptCursorLedger):
    """One dropped group pins the resume cursor for ever.

    Field: trl 1.16.0: the cursor is the first prompt that is not done; all behind it is trained on again.
    Planted: what is done above the low-water mark is not kept, and a dropped prompt is never done.
    Exposed by: a stale group, then a checkpoint. S27.
    """

    def state(self) -> CursorState:
        return CursorState(super().state().low_water, ())


class TermsAreNotCounted(TrainingTerm):
    """A trainer that starts again takes the term that it had before.

    Own case: the term was in the process's memory.
    Planted: every incarnation calls itself the first.
    Exposed by: a trainer that dies. S27, S12.
    """

    def __init__(self, lineage: Any, *args: Any) -> None:
        super().__init__(dataclasses.replace(lineage, term=1), *args)


MUTANTS = (
    Mutant(
        "M24-a", ("S1", "S18"), spaces.DYING_TRAINER, VersionFallsBack, with_store(VersionFallsBack.change)
    ),
    Mutant("M24-b", ("S27",), spaces.DYING_TRAINER, CutIsMixed, with_store(CutIsMixed.change)),
    Mutant(
        "M25-a",
        ("L8", "L5"),
        spaces.DYING_TRAINER,
        AllIsStale,
        {**STAYING, **with_buffer(AllIsStale, PatientTerm)},
    ),
    Mutant("M30-a", ("S27",), spaces.DYING_TRAINER, PromptsSkipped, with_store(PromptsSkipped.change)),
    Mutant("M35", ("S1", "S31"), spaces.DYING_TRAINER, SecondRunWithoutSync, {"term": SecondRunWithoutSync}),
    Mutant(
        "M36",
        ("S27",),
        spaces.FREE_ADMISSION,
        OneMarkOnly,
        {"term": type("Term", (TrainingTerm,), {"cursor_type": OneMarkOnly})},
    ),
    Mutant("M64-b", ("S26",), spaces.DYING_TRAINER, StepsAhead, with_store(StepsAhead.change)),
    Mutant("M78", ("S27", "S12"), spaces.DYING_TRAINER, TermsAreNotCounted, {"term": TermsAreNotCounted}),
)
