"""Mutants of the engine's update session: what is loaded, when, and how often."""

from __future__ import annotations

import asyncio
import dataclasses

from grpo_lab.engine.rl_state import RlState, Session
from grpo_lab.events import WeightWriteBegan, WeightWriteEnded
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.coordinator import Patient
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.testing.mutants.worker import PATIENT, STAYING
from grpo_lab.types import SyncId


class CountsReferences(RlState):
    """Loading waits until no request refers to the old version, and those are paused until it is loaded.

    Field: miles#2780: the old version is unloaded when its last reference is gone.
    Planted: finish waits for requests under way; nobody's wait has a bound.
    Exposed by: pause(keep) with requests under way. L2, L3, L6 (or a deadlock, where nothing else moves).
    """

    async def _switch(self, session: Session) -> None:
        while list(self.core.scheduler.in_flight()):
            await asyncio.sleep(1.0)
        await super()._switch(session)


class HalfLoadedServes(RlState):
    """After an update that failed half-way the engine is resumed and serves what it has.

    Field: vLLM 0.32's contract: a failed update leaves the model without its weights; it looks healthy
    until the next request.
    Planted: a failed update writes what had come into the served weights.
    Exposed by: a bad bucket. S15.
    """

    def _close_session(self, session: Session, reason: str) -> None:
        if self._session is session and session.hashes:
            name, sync = self.core.config.name, session.sync
            assert sync is not None
            self.core.recorder.emit(WeightWriteBegan(engine=name, term=sync.term, version=sync.version))
            self.core.recorder.emit(
                WeightWriteEnded(engine=name, term=sync.term, version=sync.version, complete=False)
            )
        super()._close_session(session, reason)


class AppliesAgain(RlState):
    """A finish that is asked for again is applied again.

    Own case: the answer was lost, not the work.
    Planted: the identity of what is loaded is not looked at.
    Exposed by: a finish that arrives twice. S14.
    """

    async def finish(self, label: str | None, sync: SyncId | None = None, term: int = 0) -> None:
        session = self._session or self.__dict__.get("_before")
        if session is not None and self._session is None:
            self._session = session
        self._before = session
        identity = self.core.identity
        if sync is not None and identity.label == str(sync):
            self.core.identity = dataclasses.replace(identity, label="again")
        await super().finish(label, sync, term)


class NeverActivates(RlState):
    """The engine says yes to every update and serves what it had.

    Own case: it was configured with another update route, which answers 200.
    Planted: from the second version on, finish returns without a switch; engine-0 only.
    Exposed by: any run that lasts. L1, S11.
    """

    async def finish(self, label: str | None, sync: SyncId | None = None, term: int = 0) -> None:
        if self.core.config.name == "engine-0" and sync is not None and sync.version > 1:
            self._session = None
            return
        await super().finish(label, sync, term)


MUTANTS = (
    Mutant(
        "M31",
        ("L2", "L3", "L6", "deadlock"),
        spaces.LONG_REQUESTS,
        CountsReferences,
        {"rl": CountsReferences, "coordinator": Patient, **PATIENT},
    ),
    Mutant("M50", ("S15",), spaces.FAILED_SYNCS, HalfLoadedServes, {"rl": HalfLoadedServes}),
    Mutant("M58-a", ("S14",), spaces.REPEATED_CALLS, AppliesAgain, {"rl": AppliesAgain}),
    Mutant("M67", ("L1",), spaces.SLOW_TRAINER, NeverActivates, {"rl": NeverActivates, **STAYING}),
)
