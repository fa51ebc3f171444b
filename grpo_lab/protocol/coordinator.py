"""The coordinator: the only place where the weight version moves.

It runs on every rank. Rank 0 talks to the engines; after each phase all ranks agree on its outcome,
so that they take the same path. A sync is

    RUNNING -> PAUSING -> PAUSED -> TRANSFERRING -> LOADED [-> PROBATION] -> RESUMING -> RUNNING

and, rolling, from RESUMING back to PAUSING for every further engine. A failure anywhere leads, after the
retries, over ABORTING back to RUNNING on the previous version. An engine that may hold anything else than
the committed version is FENCED: it stays paused and out of the view. The version moves in ``_commit`` and
nowhere else: not on a timeout, not on an error, and not on a 200 either, but when every engine of the view
has loaded it and proved that. Rolling, an engine goes on under the new version before: what it generates
is *provisional* until the commit, and lost if there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from grpo_lab.errors import ConfigError, GrpoLabError, SyncError
from grpo_lab.events import PhaseAgreed, StateChanged, SyncAborted, SyncBegan, SyncEnded, VersionCommitted
from grpo_lab.ports import Engine, Ranks, Recorder, WeightSource, WeightTransport
from grpo_lab.protocol.canary import Canary
from grpo_lab.protocol.delivery import Delivery, drain, gathered_to_the_end
from grpo_lab.protocol.engine_actions import EngineActions
from grpo_lab.protocol.engine_set import EngineSet
from grpo_lab.protocol.phase_times import PhaseTimes
from grpo_lab.protocol.timeouts import Timeouts
from grpo_lab.types import PauseMode, SyncId, SyncScope, SyncState


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """How to sync. Without a canary, engines that check no hashes prove structure only.

    ``scope``: ``global`` pauses all engines, and none goes on before the commit; ``rolling`` pauses one after
    another, so that the others generate meanwhile, each at most one version ahead of the committed one.
    """

    pause_mode: PauseMode = "keep"
    scope: SyncScope = "global"
    clear_cache: bool = True
    attempts: int = 3
    min_engines: int = 1
    canary: Canary | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if self.pause_mode not in ("abort", "wait", "keep"):
            raise ConfigError("pause_mode", self.pause_mode, "abort, wait or keep")
        if self.scope not in ("global", "rolling"):
            raise ConfigError("scope", self.scope, "global or rolling")
        for name in ("attempts", "min_engines"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "an integer of at least 1")


@dataclass(frozen=True, slots=True)
class SyncReport:
    """``version`` is the committed one after the sync, whether or not this sync moved it; ``fenced`` names
    the engines that are out of service.
    """

    version: int
    committed: bool
    phases_s: dict[str, float]
    fenced: tuple[str, ...] = ()


class Coordinator:
    """Owns the weight version of one trainer.

    Life: ``connect(term, base_version)`` -> ``sync`` any number of times -> ``close``. A second training
    run connects again, with a higher term. ``sync`` may also be taken in its three steps ``pause``,
    ``transfer`` and ``resume``; a step that raises has released the engines before.

    Raises:
        SyncError: when fewer than ``min_engines`` engines are left, or when something broke that no retry
            mends (an exception that is not of ``grpo_lab.errors``; it is the cause).
    """

    set_type: ClassVar[type[EngineSet]] = EngineSet
    delivery_type: ClassVar[type[Delivery]] = Delivery
    actions_type: ClassVar[type[EngineActions]] = EngineActions

    def __init__(
        self,
        engines: Sequence[Engine],
        transport: WeightTransport,
        source: WeightSource,
        ranks: Ranks,
        recorder: Recorder,
        settings: SyncSettings,
    ) -> None:
        self._set = self.set_type(engines, recorder, settings.min_engines)
        self._delivery = self.delivery_type(
            self._set, transport, source, recorder, settings.canary, settings.timeouts
        )
        self._actions = self.actions_type(
            self._set, self._delivery, settings.timeouts, settings.pause_mode, settings.clear_cache
        )
        self._source = source
        self._ranks = ranks
        self._recorder = recorder
        self._settings = settings
        self._limits = settings.timeouts
        self._rolls = settings.scope == "rolling"
        self._sync = SyncId(0, 0, 0)
        self._times = PhaseTimes(lambda: 0.0)
        self._moved = False
        self._beginning = False
        self._broken: GrpoLabError | None = None
        self._why = ""
        self._optimizer_step = 0
        self.state = SyncState.DISCONNECTED
        self.committed = 0

    @property
    def engines(self) -> EngineSet:
        return self._set

    @property
    def is_sender(self) -> bool:
        return self._ranks.rank == 0

    # -- life ------------------------------------------------------------------------------------

    async def connect(self, term: int, base_version: int) -> None:
        """Waits for the engines and joins them to the transfer. The next sync is base_version + 1."""
        self._sync = SyncId(term, base_version, 0)
        self.committed = base_version
        await self._require_agreement("connect", await self._led(self._actions.connect))
        self._enter(SyncState.RUNNING)

    async def sync(self, optimizer_step: int = 0) -> SyncReport:
        """Publishes the source's weights as the next version. All ranks call it together."""
        await self.pause(optimizer_step)
        await self.transfer()
        return await self.resume()

    async def pause(self, optimizer_step: int = 0) -> None:
        """First step: no engine generates any more whose turn is first (or the sync is going to be aborted).

        With scope ``global`` that is every engine of the view.
        """
        if self.state is not SyncState.RUNNING or self._beginning:
            raise SyncError(f"sync in state {self.state.value}: connect first, and one sync at a time")
        self._times = PhaseTimes(asyncio.get_running_loop().time)
        self._moved = False
        self._broken = None
        self._optimizer_step = optimizer_step
        self._beginning = True
        try:
            await self._begin()
        finally:
            self._beginning = False
        async with self._released_on_error():
            await self._pause()

    async def transfer(self) -> bool:
        """Second step: True when the version moved; False when all are back on the previous one."""
        if self._moved:
            raise SyncError(f"{self._sync} is committed: resume, then begin the next sync with pause")
        async with self._released_on_error():
            if await self._take_turns():
                self._commit()
            else:
                await self._abort()
        return self._moved

    async def resume(self) -> SyncReport:
        """Last step: every engine of the view generates again."""
        async with self._released_on_error():
            self._set.end_turns()
            await self._resume()
            self._enter(SyncState.RUNNING)
        self._times.add_all(self._source.phases_s())
        phases_s = self._times.finish()
        if self.is_sender:
            self._recorder.emit(
                SyncEnded(
                    term=self._sync.term,
                    version=self._sync.version,
                    outcome="committed" if self._moved else "aborted",
                    phases_s=phases_s,
                    nbytes=self._delivery.nbytes,
                )
            )
        return SyncReport(self.committed, self._moved, phases_s, tuple(self._set.fenced))

    async def close(self) -> None:
        """Resumes whoever is still paused and takes the transfer down. Safe on every path."""
        try:
            if self.state not in (SyncState.RUNNING, SyncState.DISCONNECTED):
                await self._release()
        finally:
            self._enter(SyncState.DISCONNECTED)
            if self.is_sender:  # also when a connect was cut short: the transport may be open
                await self._delivery.close()

    # -- phases, on every rank -----------------------------------------------------------------------

    async def _begin(self) -> None:
        # A version that an earlier sync gave up may be tried again with newer weights: another attempt
        # number then, since engines take an identity that they know for done.
        version = self.committed + 1
        used = self._sync.attempt if self._sync.version == version else 0
        self._sync = SyncId(self._sync.term, version, used + 1)
        with self._times.measure("look"):
            failure = await self._led(self._actions.look)
            failure = await self._failure_of(self._delivery.begin_version()) or failure
        await self._require_agreement("begin", failure)
        self._set.begin_turns(self._settings.scope)
        if self.is_sender:
            self._recorder.emit(
                SyncBegan(
                    term=self._sync.term,
                    version=self._sync.version,
                    attempt=self._sync.attempt,
                    view=self._set.view_number,
                    members=self._set.names,
                    scope=self._settings.scope,
                    pause_mode=self._settings.pause_mode,
                    clear_cache=self._settings.clear_cache,
                    optimizer_step=self._optimizer_step,
                )
            )

    async def _pause(self) -> None:
        self._enter(SyncState.PAUSING)
        with self._times.measure("pause"):
            failure = await self._led(self._actions.pause)
        if await self._agree("pause", failure):
            self._enter(SyncState.PAUSED)
        else:
            self._why = f"pause: {failure or 'another rank failed'}"

    async def _take_turns(self) -> bool:
        """Whether all who are left in the view hold the version, turn by turn."""
        while self.state is SyncState.PAUSED:
            if not await self._transfer():
                return False
            await self._probation()
            if not self._rolls or not await self._rank_0_says("next turn", not self._set.is_last_turn):
                return True
            await self._resume()
            self._times.add_all(self._source.phases_s())
            if self.is_sender:
                self._set.next_turn()
            # Another attempt, since what an identity carries is published once.
            self._sync = SyncId(self._sync.term, self._sync.version, self._sync.attempt + 1)
            await self._pause()
        return False

    async def _rank_0_says(self, what: str, there_is: bool) -> bool:
        """Rank 0 knows the engines; the others hear of turns by this agreement."""
        missing = self.is_sender and not there_is
        return await self._agree(what, SyncError(f"nobody has the {what}") if missing else None)

    async def _transfer(self) -> bool:
        """Attempts, always the same weights, until the whole turn has proved them or none is left."""
        failure = await self._led(self._actions.join)
        if not await self._agree("join", failure):
            self._why = f"join: {failure or 'another rank failed'}"
            return False
        if self._rolls and not await self._rank_0_says("turn", bool(self._set.turn)):
            return True  # it could not be paused, or not join
        first = self._sync.attempt
        for attempt in range(first, first + self._settings.attempts):
            self._sync = SyncId(self._sync.term, self._sync.version, attempt)
            self._enter(SyncState.TRANSFERRING)
            failure = await self._failure_of(self._attempt())
            if await self._agree("transfer", failure):
                self._enter(SyncState.LOADED)
                return True
            last = attempt == first + self._settings.attempts - 1
            self._why = str(failure or "another rank failed")
            self._emit_aborted(self._why, final=False)
            self._enter(SyncState.PAUSED)
            if last or not await self._agree("retry", await self._prepare_retry()):
                break
        # Engines that proved the version may go on with it, but not over a rank that could not gather it.
        objection = self._broken or (None if self.is_sender else failure)
        return await self._agree("settle", objection or await self._led(self._actions.settle))

    async def _attempt(self) -> None:
        if self.is_sender:
            await self._delivery.attempt(self._sync, self._times)
        else:
            async with gathered_to_the_end(self._source):
                await self._source.begin(self._sync)
                await drain(self._source)

    async def _prepare_retry(self) -> GrpoLabError | None:
        """An error means that no retry is possible."""
        return self._broken or await self._led(self._actions.prepare_retry)

    async def _probation(self) -> None:
        failure: GrpoLabError | None = None
        if self.is_sender and self._delivery.needs_probation:
            self._enter(SyncState.PROBATION)
            with self._times.measure("verify"):
                failure = await self._led(self._delivery.probation)
        await self._require_agreement("probation", failure)

    def _commit(self) -> None:
        self.committed = self._sync.version
        self._moved = True
        self._set.all_committed()
        if self.is_sender:
            self._recorder.emit(
                VersionCommitted(
                    term=self._sync.term,
                    version=self._sync.version,
                    attempt=self._sync.attempt,
                    view=self._set.view_number,
                    members=self._set.names,
                    optimizer_step=self._optimizer_step,
                )
            )

    async def _abort(self) -> None:
        """Back to the previous version."""
        self._emit_aborted(self._why, final=True)
        self._enter(SyncState.ABORTING)
        failure = await self._led(lambda sync: self._actions.return_to_previous("aborted", sync))
        await self._require_agreement("abort", self._broken or failure)

    async def _resume(self) -> None:
        self._enter(SyncState.RESUMING)
        with self._times.measure("resume"):
            failure = await self._led(self._actions.resume)
        await self._require_agreement("resume", failure)

    @asynccontextmanager
    async def _released_on_error(self) -> AsyncIterator[None]:
        """Whatever leaves a step, cancellation included: nobody else would ever resume the engines."""
        try:
            yield
        except BaseException as error:
            if not self._moved:
                self._emit_aborted(f"{type(error).__name__}: {error}", final=True)
            await self._release()
            raise

    async def _release(self) -> None:
        """Last resort on an exception: nobody stays paused without being declared fenced."""
        if not self._moved:
            await self._led(lambda sync: self._actions.return_to_previous("ended before its commit", sync))
        self._set.end_turns()
        await self._led(self._actions.resume)
        can_go_on = self._set.has_any or not self.is_sender
        self._enter(SyncState.RUNNING if can_go_on else SyncState.FENCED)

    # -- small things ------------------------------------------------------------------------------------

    async def _led(self, action: Callable[[SyncId], Awaitable[None]]) -> GrpoLabError | None:
        """What went wrong when rank 0 did this; nothing on the other ranks."""
        return await self._failure_of(action(self._sync)) if self.is_sender else None

    async def _failure_of(self, phase: Awaitable[None]) -> GrpoLabError | None:
        """The exception of a phase as a value: the other ranks wait for this one's word on it.

        What is not of ``grpo_lab.errors`` (out of memory, a bug) is mended by no retry: it ends the sync,
        after the ranks have agreed and the engines were released.
        """
        try:
            await phase
        except GrpoLabError as error:
            return error
        except Exception as error:
            self._broken = SyncError(f"{self._sync}: {type(error).__name__}: {error}")
            self._broken.__cause__ = error
            return self._broken
        return None

    async def _agree(self, phase: str, failure: GrpoLabError | None) -> bool:
        ok = await self._ranks.agree(failure is None, self._limits.agree_s)
        if self._ranks.size > 1:
            self._recorder.emit(
                PhaseAgreed(
                    phase=phase,
                    rank=self._ranks.rank,
                    ok=ok,
                    detail=str(failure or "")[:300],
                    term=self._sync.term,
                    version=self._sync.version,
                    attempt=self._sync.attempt,
                )
            )
        return ok

    async def _require_agreement(self, phase: str, failure: GrpoLabError | None) -> None:
        if not await self._agree(phase, failure):
            raise failure or SyncError(f"{phase}: another rank failed; its error says why")

    def _enter(self, after: SyncState) -> None:
        before, self.state = self.state, after
        if before is not after and self.is_sender:
            self._recorder.emit(
                StateChanged(
                    term=self._sync.term,
                    version=self._sync.version,
                    attempt=self._sync.attempt,
                    before=before.value,
                    after=after.value,
                )
            )

    def _emit_aborted(self, reason: str, *, final: bool) -> None:
        if self.is_sender:
            self._recorder.emit(
                SyncAborted(
                    term=self._sync.term,
                    version=self._sync.version,
                    attempt=self._sync.attempt,
                    reason=reason[:500],
                    final=final,
                )
            )
