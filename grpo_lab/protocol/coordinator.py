"""The coordinator: the only place where the weight version moves.

It runs on every rank. Rank 0 talks to the engines; after each phase all ranks agree on its outcome,
so that they take the same path. A sync is

    RUNNING -> PAUSING -> PAUSED -> TRANSFERRING -> LOADED [-> PROBATION] -> RESUMING -> RUNNING

and a failure anywhere leads, after the retries, over ABORTING back to RUNNING on the previous version.
An engine that may hold anything else than the committed version is FENCED: it stays paused and out of
the view. The version moves in ``_commit`` and nowhere else: not on a timeout, not on an error, and not
on a 200 either, but when every engine of the view has loaded it and proved that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from grpo_lab.errors import ConfigError, EngineUnreachable, GrpoLabError, SyncError
from grpo_lab.events import PhaseAgreed, StateChanged, SyncAborted, SyncBegan, SyncEnded, VersionCommitted
from grpo_lab.ports import Engine, Ranks, Recorder, WeightSource, WeightTransport
from grpo_lab.protocol.canary import Canary
from grpo_lab.protocol.delivery import Delivery, drain
from grpo_lab.protocol.engine_set import EngineSet
from grpo_lab.protocol.phase_times import PhaseTimes
from grpo_lab.protocol.timeouts import Timeouts
from grpo_lab.types import PauseMode, SyncId, SyncState

REPEATED_FAILURES = 2  # attempts of one sync that an engine may fail before the others go on without it
HEALTH_RETRY_S = 0.2  # between two tries to reach an engine that is still starting


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """How to sync. Without a canary, engines that check no hashes prove structure only."""

    pause_mode: PauseMode = "keep"
    clear_cache: bool = True
    attempts: int = 3
    min_engines: int = 1
    canary: Canary | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if self.pause_mode not in ("abort", "wait", "keep"):
            raise ConfigError("pause_mode", self.pause_mode, "abort, wait or keep")
        for name in ("attempts", "min_engines"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "an integer of at least 1")


@dataclass(frozen=True, slots=True)
class SyncReport:
    """``version`` is the committed one after the sync, whether or not this sync moved it."""

    version: int
    committed: bool
    phases_s: dict[str, float]


class Coordinator:
    """Owns the weight version of one trainer.

    Life: ``connect(term, base_version)`` -> ``sync`` any number of times -> ``close``. A second training
    run connects again, with a higher term. ``sync`` may also be taken in its three steps ``pause``,
    ``transfer`` and ``resume``; a step that raises has released the engines before.

    Raises:
        SyncError: when fewer than ``min_engines`` engines are left.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        transport: WeightTransport,
        source: WeightSource,
        ranks: Ranks,
        recorder: Recorder,
        settings: SyncSettings,
    ) -> None:
        self._set = EngineSet(engines, recorder, settings.min_engines)
        self._delivery = Delivery(self._set, transport, source, recorder, settings.canary, settings.timeouts)
        self._source = source
        self._ranks = ranks
        self._recorder = recorder
        self._settings = settings
        self._limits = settings.timeouts
        self._sync = SyncId(0, 0, 0)
        self._times = PhaseTimes(lambda: 0.0)
        self._moved = False
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
        failure: GrpoLabError | None = None
        try:
            if self.is_sender:
                await self._reach_engines()
                await self._delivery.handshake(self._sync)
        except GrpoLabError as error:
            failure = error
        await self._require_agreement("connect", failure)
        self._enter(SyncState.RUNNING)

    async def sync(self, optimizer_step: int = 0, weights_changed: bool = True) -> SyncReport:
        """Publishes the source's weights as the next version. All ranks call it together."""
        await self.pause(optimizer_step, weights_changed)
        await self.transfer()
        return await self.resume()

    async def pause(self, optimizer_step: int = 0, weights_changed: bool = True) -> None:
        """First step: no engine of the view generates any more (or the sync is going to be aborted)."""
        if self.state is not SyncState.RUNNING:
            raise SyncError(f"sync in state {self.state.value}: connect first, and one sync at a time")
        self._times = PhaseTimes(asyncio.get_running_loop().time)
        self._moved = False
        self._optimizer_step = optimizer_step
        await self._begin(weights_changed)
        async with self._released_on_error():
            await self._pause()

    async def transfer(self) -> bool:
        """Second step: True when the version moved; False when all are back on the previous one."""
        async with self._released_on_error():
            if self.state is SyncState.PAUSED and await self._transfer():
                await self._probation()
                self._commit()
            else:
                await self._abort()
        return self._moved

    async def resume(self) -> SyncReport:
        """Last step: every engine of the view generates again."""
        async with self._released_on_error():
            await self._resume()
        phases_s = {**self._source.phases_s(), **self._times.finish()}
        if self.is_sender:
            self._recorder.emit(
                SyncEnded(
                    term=self._sync.term,
                    version=self._sync.version,
                    outcome="committed" if self._moved else "aborted",
                    phases_s=phases_s,
                )
            )
        return SyncReport(self.committed, self._moved, phases_s)

    async def close(self) -> None:
        """Resumes whoever is still paused and takes the transfer down. Safe on every path."""
        if self.state is SyncState.DISCONNECTED:
            return
        try:
            if self.state is not SyncState.RUNNING:
                await self._release()
        finally:
            self._enter(SyncState.DISCONNECTED)
            if self.is_sender:
                await self._delivery.close()

    # -- phases, on every rank -----------------------------------------------------------------------

    async def _begin(self, weights_changed: bool) -> None:
        self._sync = SyncId(self._sync.term, self.committed + 1, 1)
        await self._delivery.begin_version()
        if self.is_sender:
            self._recorder.emit(
                SyncBegan(
                    term=self._sync.term,
                    version=self._sync.version,
                    attempt=1,
                    view=self._set.view_number,
                    members=self._set.names,
                    pause_mode=self._settings.pause_mode,
                    clear_cache=self._settings.clear_cache,
                    optimizer_step=self._optimizer_step,
                    weights_changed=weights_changed,
                )
            )

    async def _pause(self) -> None:
        self._enter(SyncState.PAUSING)
        failure: GrpoLabError | None = None
        with self._times.measure("pause"):
            if self.is_sender:
                failure = await self._pause_engines()
        if await self._agree("pause", failure):
            self._enter(SyncState.PAUSED)
        else:
            self._emit_aborted(f"pause: {failure}", final=True)

    async def _transfer(self) -> bool:
        """Attempts, always the same weights, until the whole view has proved them or none is left."""
        for attempt in range(1, self._settings.attempts + 1):
            self._sync = SyncId(self._sync.term, self._sync.version, attempt)
            self._enter(SyncState.TRANSFERRING)
            failure: GrpoLabError | None = None
            try:
                if self.is_sender:
                    await self._delivery.attempt(self._sync, self._times)
                else:
                    await self._source.begin(self._sync)
                    await drain(self._source)
            except GrpoLabError as error:
                failure = error
            if await self._agree("transfer", failure):
                self._enter(SyncState.LOADED)
                return True
            last = attempt == self._settings.attempts
            self._emit_aborted(str(failure or "another rank failed"), final=last)
            self._enter(SyncState.PAUSED)
            if last or not await self._agree("retry", await self._prepare_retry()):
                break
        return await self._settle()

    async def _probation(self) -> None:
        needed = self.is_sender and self._delivery.needs_probation
        failure: GrpoLabError | None = None
        if needed:
            self._enter(SyncState.PROBATION)
            try:
                await self._delivery.probation(self._sync)
            except GrpoLabError as error:
                failure = error
        await self._require_agreement("probation", failure)

    def _commit(self) -> None:
        self.committed = self._sync.version
        self._moved = True
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
        """Back to the previous version: what is staged is dropped, who may hold the new one is fenced."""
        self._enter(SyncState.ABORTING)
        failure: GrpoLabError | None = None
        if self.is_sender:
            try:
                await self._return_to_previous("aborted")
                self._set.require_enough()
            except GrpoLabError as error:
                failure = error
        await self._require_agreement("abort", failure)

    async def _resume(self) -> None:
        self._enter(SyncState.RESUMING)
        failure: GrpoLabError | None = None
        with self._times.measure("resume"):
            if self.is_sender:
                try:
                    await self._resume_engines()
                    self._set.require_enough()
                except GrpoLabError as error:
                    failure = error
        await self._require_agreement("resume", failure)
        self._enter(SyncState.RUNNING)

    # -- what rank 0 does ------------------------------------------------------------------------------

    async def _reach_engines(self) -> None:
        self._set.declare_view()
        limit_s = self._limits.connect_s
        failures = await self._set.each("health", _until_healthy, limit_s, self._sync)
        for name, error in failures.items():
            self._set.fence(name, f"not healthy within {limit_s:g} s: {error}", self._sync)
        self._set.require_enough()

    async def _pause_engines(self) -> GrpoLabError | None:
        mode, clear_cache = self._settings.pause_mode, self._settings.clear_cache
        failures = await self._set.each(
            "pause",
            lambda engine: engine.pause(mode, clear_cache, self._sync.term),
            self._limits.pause_s,
            self._sync,
        )
        if failures:
            await self._set.fence_dead(tuple(failures), self._limits.resume_s, self._sync)
            alive = [error for name, error in failures.items() if name not in self._set.fenced]
            if alive:
                return alive[0]
        return self._too_few()

    async def _prepare_retry(self) -> GrpoLabError | None:
        """Fences the dead and joins the rest anew; an error means that no retry is possible."""
        if not self.is_sender:
            return None
        try:
            await self._set.fence_dead(self._set.names, self._limits.resume_s, self._sync)
            self._set.require_enough()
            self._fence_repeaters()
            await self._delivery.close()
            await self._delivery.handshake(self._sync)
        except GrpoLabError as error:
            return error
        return None

    def _fence_repeaters(self) -> None:
        """One engine that fails attempt after attempt must not keep the others from the new version."""
        repeaters = [name for name in self._set.names if self._delivery.failures[name] >= REPEATED_FAILURES]
        if len(self._set.names) - len(repeaters) >= self._settings.min_engines:
            for name in repeaters:
                times = self._delivery.failures[name]
                self._set.fence(name, f"failed {times} attempts of {self._sync}", self._sync)

    async def _settle(self) -> bool:
        """After the last attempt: go on with those who proved the version, if they are enough."""
        failure: GrpoLabError | None = None
        if self.is_sender:
            missing = [name for name in self._set.names if name not in self._delivery.proved]
            if len(self._set.names) - len(missing) < self._settings.min_engines:
                failure = SyncError(f"{self._sync}: not proved by {', '.join(missing)}")
            else:
                for name in missing:
                    self._set.fence(name, f"could not load and prove {self._sync}", self._sync)
        return await self._agree("settle", failure)

    async def _return_to_previous(self, why: str) -> None:
        if not self._delivery.started:
            return
        for engine in self._set.view:
            if engine.name in self._delivery.loaded or not engine.capabilities.staged:
                self._set.fence(engine.name, f"{self._sync} {why}: weights uncertain", self._sync)
        failures = await self._set.each(
            "abandon", lambda engine: engine.abandon_update(self._sync), self._limits.resume_s, self._sync
        )
        for name, error in failures.items():
            self._set.fence(name, f"could not drop {self._sync}: {error}", self._sync)

    async def _resume_engines(self) -> None:
        failures = await self._set.each(
            "resume", lambda engine: engine.resume(self._sync.term), self._limits.resume_s, self._sync
        )
        for name, error in failures.items():
            self._set.fence(name, f"could not be resumed: {error}", self._sync)

    @asynccontextmanager
    async def _released_on_error(self) -> AsyncIterator[None]:
        """Whatever leaves a step, cancellation included: nobody else would ever resume the engines."""
        try:
            yield
        except BaseException as error:
            self._emit_aborted(f"{type(error).__name__}: {error}", final=True)
            await self._release()
            raise

    async def _release(self) -> None:
        """Last resort on an exception: nobody stays paused without being declared fenced."""
        if self.is_sender:
            if self.committed != self._sync.version:
                await self._return_to_previous("ended before its commit")
            await self._resume_engines()
        self._enter(SyncState.RUNNING if self._set.view or not self.is_sender else SyncState.FENCED)

    # -- small things ------------------------------------------------------------------------------------

    def _too_few(self) -> GrpoLabError | None:
        try:
            self._set.require_enough()
        except SyncError as error:
            return error
        return None

    async def _agree(self, phase: str, failure: GrpoLabError | None) -> bool:
        ok = await self._ranks.agree(failure is None, self._limits.agree_s)
        if self._ranks.size > 1:
            self._recorder.emit(
                PhaseAgreed(phase=phase, rank=self._ranks.rank, ok=ok, detail=str(failure or "")[:300])
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


async def _until_healthy(engine: Engine) -> None:
    """A server that is still loading refuses connections; its caller bounds the wait."""
    while True:
        try:
            await engine.health()
            return
        except EngineUnreachable:
            await asyncio.sleep(HEALTH_RETRY_S)
