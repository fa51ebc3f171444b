"""Mutants of the coordinator: who pauses, sends, commits and resumes, and in which order."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing, suppress
from typing import Any

from grpo_lab.errors import GrpoLabError
from grpo_lab.ports import Engine
from grpo_lab.protocol.coordinator import Coordinator
from grpo_lab.protocol.delivery import Delivery
from grpo_lab.protocol.engine_actions import EngineActions
from grpo_lab.protocol.engine_set import EngineSet
from grpo_lab.protocol.nursery import run_all
from grpo_lab.protocol.phase_times import PhaseTimes
from grpo_lab.protocol.timeouts import Timeouts
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.types import SyncId, SyncState

FOR_EVER_S = 80_000.0


def with_delivery(delivery: type[Delivery]) -> dict[str, Any]:
    return {"coordinator": type("Coordinator", (Coordinator,), {"delivery_type": delivery})}


def with_actions(actions: type[EngineActions]) -> dict[str, Any]:
    return {"coordinator": type("Coordinator", (Coordinator,), {"actions_type": actions})}


class Patient(Coordinator):
    """No bound on any wait, as where a collective has none."""

    def __init__(self, *args: Any) -> None:
        names = [item.name for item in dataclasses.fields(Timeouts)]
        endless = Timeouts(**dict.fromkeys(names, FOR_EVER_S))
        changed = (*args[:-1], dataclasses.replace(args[-1], timeouts=endless))
        super().__init__(*changed)


class AnswerNotRead(Delivery):
    """The HTTP error of an update call is not read.

    Field: trl#6796. The request that makes the engine join the broadcast fails; the sender goes on to its
    side of the broadcast and waits there for a receiver that will never come.
    Planted: failures of ``update`` are swallowed, and the send has no bound.
    Exposed by: a 500, or no answer, to any update call. L3, or L2 and S32 where engines are left paused.
    """

    async def _move(self, sync: SyncId, times: PhaseTimes) -> None:
        info = self._transport.update_info(sync)

        async def send() -> None:
            self._transport.progress_timeout_s = FOR_EVER_S  # type: ignore[attr-defined]
            async with aclosing(self._published(sync)) as buckets:
                await self._transport.send(sync, buckets)

        async def update(engine: Engine) -> None:
            with suppress(GrpoLabError):
                await self._set.one("update", lambda one: one.update(sync, info), engine, FOR_EVER_S, sync)

        updates = [(f"update of {engine.name}", update(engine)) for engine in self._set.view]
        await run_all(f"move {sync}", [("send", send()), *updates], FOR_EVER_S)


class FailedFinishCounts(Delivery):
    """An engine whose finish failed is counted among those that hold the version.

    Field: trl#6796 in its second form: the status of the last call is not looked at either.
    Planted: whoever was asked to finish has proved the version.
    Exposed by: an error of ``finish_update``. S11: a commit needs every member's own load.
    """

    async def _finish(self, sync: SyncId) -> list[GrpoLabError]:
        await super()._finish(sync)
        self.proved.update(self._set.names)
        return []


class ForgetsToResume(Coordinator):
    """After a sync that was given up, nobody is resumed.

    Field: AReaL#1160, OpenRLHF#1262, prime-rl#2759: one of several ways out of an update misses the resume.
    Planted: ``resume`` does nothing when the version did not move.
    Exposed by: any sync that fails for good. S32, L2.
    """

    async def _resume(self) -> None:
        if self._moved:
            await super()._resume()
        else:
            self._enter(SyncState.RUNNING)


class FirstErrorSkipsTheRest(EngineActions):
    """An exception on the way leaves the engines after it paused.

    Field: OpenRLHF#1262, prime-rl#2759: resume is the last statement of a block without ``finally``.
    Planted: engines are resumed one after the other, and an error of one ends the loop.
    Exposed by: a resume that is refused. S32, L2.
    """

    async def resume(self, sync: SyncId) -> None:
        for engine in self._set.view:
            try:
                await self._set.one(
                    "resume", lambda one: one.resume(sync.term), engine, self._limits.resume_s, sync
                )
            except GrpoLabError as error:
                self._set.fence(engine.name, f"could not be resumed: {error}", sync)
                return


class RetryCountsTwice(Coordinator):
    """A sync that needed a retry moves the version twice.

    Field: marin#1829, in its cause: the version is a counter beside the sync, raised once an attempt.
    Planted: the commit of a later attempt adds one more.
    Exposed by: one failed attempt. S1.
    """

    def _commit(self) -> None:
        super()._commit()
        if self._sync.attempt > 1:
            self.committed += 1


class SleepsFirst(Coordinator):
    """A fixed sleep before every pause makes asynchronous training slower than synchronous.

    Field: marin#8936: a wait that once hid a race stayed when the race was gone.
    Planted: a second of sleep at the beginning of each sync, in no phase of it.
    Exposed by: any run of ten syncs. D4.
    """

    async def _begin(self) -> None:
        await asyncio.sleep(1.0)
        await super()._begin()


class ResumesBeforeCommit(Coordinator):
    """Every engine is resumed as soon as it has loaded, before the version is committed.

    Own case: the fastest engine serves a version that may still be given up.
    Planted: resume, then commit.
    Exposed by: any sync. S3.
    """

    def _commit(self) -> None:
        pass

    async def _resume(self) -> None:
        moved = self.state in (SyncState.LOADED, SyncState.PROBATION)
        await super()._resume()
        if moved:
            await asyncio.sleep(0.2)
            super()._commit()


class CommitsAgain(Coordinator):
    """A version that is committed is committed once more.

    Own case: the commit is in a block that is tried again when the resume behind it was slow.
    Planted: the commit is told a second time after the resume.
    Exposed by: any sync. S1: a version is used once.
    """

    async def _resume(self) -> None:
        await super()._resume()
        if self._moved:
            self._commit()


class CommitsAfterTheFirstTurn(Coordinator):
    """Rolling, the version moves when the first engine has proved it.

    Own case: the first of a rolling update is taken for the canary of all.
    Planted: the commit is told at the end of the first turn.
    Exposed by: any rolling sync but the first of its term. S11: the others have not proved it.
    """

    async def _rank_0_says(self, what: str, there_is: bool) -> bool:
        if what == "next turn" and there_is and not self._moved:
            self._commit()
        return await super()._rank_0_says(what, there_is)


class ForgetsWhoIsAhead(EngineActions):
    """When a rolling sync is given up, only the engines whose turn it is are looked after.

    Own case: those that have had their turn are in nobody's hands any more, and go on under the version
    that was given up.
    Planted: they are not known to hold it.
    Exposed by: a rolling sync that fails in a later turn, when no engine may be lost. S15, S3.
    """

    async def return_to_previous(self, why: str, sync: SyncId) -> None:
        self._delivery.loaded.intersection_update(self._set.turn_names)
        await super().return_to_previous(why, sync)


class TrustsTheHeirs(EngineActions):
    """A term that gives its first sync up resumes the engines as an earlier term has left them.

    Own case: a sync that has touched no engine is thought to have nothing to take back.
    Planted: nobody is asked what it holds.
    Exposed by: a trainer that dies between a finish and its commit; then a pause that is refused. S3.
    """

    async def _fence_heirs(self, why: str, sync: SyncId) -> None:
        pass


class Quorum(Delivery):
    """A commit is content with some of the members.

    Own case: majorities are right for logs, not for weights: the rest serves older ones under the new name.
    Planted: one engine that has loaded is enough.
    Exposed by: an error of one engine in an update. S11.
    """

    async def attempt(self, sync: SyncId, times: PhaseTimes) -> None:
        try:
            await super().attempt(sync, times)
        except GrpoLabError:
            if not self.proved:
                raise


class SyncInsideSync(Coordinator):
    """A retry begins a whole new sync inside the one that is under way.

    Own case: a retry around the whole call, while the state of the first is still there.
    Planted: after a failed attempt ``_begin`` is called again.
    Exposed by: one failed attempt. S13.
    """

    async def _prepare_retry(self) -> GrpoLabError | None:
        problem = await super()._prepare_retry()
        await self._begin()
        return problem


class ForgetsTheRestarted(EngineSet):
    """An engine that has restarted is never taken in again.

    Own case: fenced is for ever; nobody looks whether it is another process now.
    Planted: nobody is new.
    Exposed by: an engine that dies, and a run that lasts. L7.
    """

    def _is_new(self, name: str, start: str) -> bool:
        return False


MUTANTS = (
    Mutant("M01-a", ("L3", "L2", "S32"), spaces.UPDATE_ERRORS, AnswerNotRead, with_delivery(AnswerNotRead)),
    Mutant("M01-b", ("S11",), spaces.UPDATE_ERRORS, FailedFinishCounts, with_delivery(FailedFinishCounts)),
    Mutant("M25-b", ("S1",), spaces.UPDATE_ERRORS, RetryCountsTwice, {"coordinator": RetryCountsTwice}),
    Mutant("M28-a", ("S32", "L2"), spaces.SYNC_ERRORS, ForgetsToResume, {"coordinator": ForgetsToResume}),
    Mutant(
        "M28-b",
        ("S32", "L2"),
        spaces.RESUME_ERRORS,
        FirstErrorSkipsTheRest,
        with_actions(FirstErrorSkipsTheRest),
    ),
    Mutant("M32", ("D4",), spaces.MANY_SYNCS, SleepsFirst, {"coordinator": SleepsFirst}),
    Mutant("M80", ("S1",), spaces.QUIET, CommitsAgain, {"coordinator": CommitsAgain}),
    Mutant("M53", ("S3",), spaces.QUIET, ResumesBeforeCommit, {"coordinator": ResumesBeforeCommit}),
    Mutant("M55", ("S11",), spaces.UPDATE_ERRORS, Quorum, with_delivery(Quorum)),
    Mutant(
        "M68",
        ("L7",),
        spaces.LONG_LIFE,
        ForgetsTheRestarted,
        {"coordinator": type("Coordinator", (Coordinator,), {"set_type": ForgetsTheRestarted})},
    ),
    Mutant(
        "M81", ("S11",), spaces.ROLLING, CommitsAfterTheFirstTurn, {"coordinator": CommitsAfterTheFirstTurn}
    ),
    Mutant("M82", ("S15", "S3"), spaces.ROLLING, ForgetsWhoIsAhead, with_actions(ForgetsWhoIsAhead)),
    Mutant("M83", ("S3",), spaces.HEIRS, TrustsTheHeirs, with_actions(TrustsTheHeirs)),
    Mutant("M57", ("S13",), spaces.UPDATE_ERRORS, SyncInsideSync, {"coordinator": SyncInsideSync}),
)
