"""What rank 0 does to the engines in each phase of a sync, apart from moving the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpo_lab.errors import EngineUnreachable, GrpoLabError, SyncError
from grpo_lab.ports import Engine
from grpo_lab.protocol.delivery import Delivery
from grpo_lab.protocol.engine_set import EngineSet
from grpo_lab.protocol.timeouts import Timeouts
from grpo_lab.types import PauseMode, SyncId

REPEATED_FAILURES = 2  # attempts of one sync that an engine may fail before the others go on without it
HEALTH_RETRY_S = 0.2  # between two tries to reach an engine that is still starting


class EngineActions:
    """One method a phase; each raises ``GrpoLabError`` when the phase has failed.

    An engine that is dead, or that may hold anything else than it should, is fenced on the way; whether
    enough are left decides if the phase has failed.
    """

    def __init__(
        self,
        engines: EngineSet,
        delivery: Delivery,
        timeouts: Timeouts,
        pause_mode: PauseMode,
        clear_cache: bool,
    ) -> None:
        self._set = engines
        self._delivery = delivery
        self._limits = timeouts
        self._pause_mode: PauseMode = pause_mode
        self._clear_cache = clear_cache

    async def connect(self, sync: SyncId) -> None:
        """Waits for the engines and joins them to the transfer."""
        self._set.begin_term()
        limit_s = self._limits.connect_s
        failures = await self._set.each("health", _until_healthy, limit_s, sync)
        for name, error in failures.items():
            self._set.fence(name, f"not healthy within {limit_s:g} s: {error}", sync)
        self._set.require_enough()
        await self._set.meet(self._limits.look_s, sync)
        _raise_first(await self._delivery.handshake(sync))

    async def look(self, sync: SyncId) -> None:
        """Takes in who has restarted, or is new: before a sync, of all engines."""
        if await self._set.look(self._set.all, self._limits.look_s, sync):
            self._delivery.forget_members()

    async def pause(self, sync: SyncId) -> None:
        """Raises the first failure of an engine that lives: it may be generating still. When others hold the
        version already, it is rather this one that goes.
        """
        failures = await self._pause(self._set.turn, sync)
        if failures:
            await self._set.fence_dead(tuple(failures), self._limits.resume_s, sync)
            suspects = [engine for engine in self._set.turn if engine.name in failures]
            restarted = await self._set.look(suspects, self._limits.look_s, sync)
            if restarted:
                self._delivery.forget_members()
                for engine in restarted:
                    del failures[engine.name]
                failures |= await self._pause(restarted, sync)
            for name, error in failures.items():
                if name in self._set.newcomers:  # nobody sends it anything
                    self._set.fence(name, f"could not be paused: {error}", sync, until_next_sync=True)
                elif self._delivery.loaded and self._set.enough_without([name]):
                    self._set.fence(name, f"could not be paused for {sync}: {error}", sync)
                elif name not in self._set.fenced:
                    raise error
        self._set.require_enough()

    async def prepare_retry(self, sync: SyncId) -> None:
        """Fences the dead and joins the rest anew."""
        await self._set.fence_dead(self._set.turn_names, self._limits.resume_s, sync)
        self._set.require_enough()
        self._fence_repeaters(sync)
        await self.join(sync)
        if not self._set.turn:
            raise SyncError(f"{sync}: nobody is left whose turn it is")

    async def join(self, sync: SyncId) -> None:
        """The transport's members become the view again, if they are not. One that cannot join must not
        keep the others from the new version: it is fenced if enough are left. Nobody may be left whose turn
        it is.
        """
        if self._delivery.is_joined or not self._set.turn:
            return
        await self._delivery.close()
        failures = await self._delivery.handshake(sync)
        if failures and self._set.enough_without(list(failures)):
            for name, error in failures.items():
                self._set.fence(name, f"could not join the transfer: {error}", sync)
            if not self._set.turn:
                return
            failures = await self._delivery.handshake(sync)
        _raise_first(failures)
        await self._pause_restarted(sync)

    async def _pause_restarted(self, sync: SyncId) -> None:
        """Who has restarted since the pause generates, once it has loaded, before the commit.

        After joining, not before: who restarts later has left the transfer, and cannot load.
        """
        restarted = await self._set.look(self._set.turn, self._limits.look_s, sync)
        for name, error in (await self._pause(restarted, sync)).items():
            reason = f"restarted, and could not be paused: {error}"
            self._set.fence(name, reason, sync, until_next_sync=True)
        self._set.require_enough()
        if self._set.turn and not self._delivery.is_joined:
            raise SyncError(f"{sync}: an engine that had joined could not be paused")

    async def _pause(self, members: Sequence[Engine], sync: SyncId) -> dict[str, GrpoLabError]:
        mode, clear_cache = self._pause_mode, self._clear_cache
        return await self._set.pause(members, mode, clear_cache, self._limits.pause_s, sync)

    def _fence_repeaters(self, sync: SyncId) -> None:
        """One engine that fails attempt after attempt must not keep the others from the new version."""
        failures = self._delivery.failures
        repeaters = [name for name in self._set.turn_names if failures[name] >= REPEATED_FAILURES]
        if self._set.enough_without(repeaters):
            for name in repeaters:
                self._set.fence(name, f"failed {failures[name]} attempts of {sync}", sync)

    async def settle(self, sync: SyncId) -> None:
        """After the last attempt: go on with those who proved the version, if they are enough."""
        missing = [name for name in self._set.turn_names if name not in self._delivery.proved]
        if not self._set.enough_without(missing):
            raise SyncError(f"{sync}: not proved by {', '.join(missing)}")
        for name in missing:
            self._set.fence(name, f"could not load and prove {sync}", sync)

    async def return_to_previous(self, why: str, sync: SyncId) -> None:
        """What is staged is dropped, who may hold anything else than the previous version is fenced."""
        self._set.fence_newcomers(f"{sync} {why}: no weights yet", sync, self._delivery.loaded)
        ahead = [engine for engine in self._set.all if engine.name in self._delivery.loaded]
        for engine in ahead:
            self._set.fence(engine.name, f"{sync} {why}: weights uncertain", sync)
        await self._drop(why, sync)
        running = [engine for engine in ahead if engine.name in self._delivery.let_go]
        await self._set.pause(running, "abort", True, self._limits.pause_s, sync)
        self._delivery.let_go.clear()
        await self._fence_heirs(why, sync)

    async def _drop(self, why: str, sync: SyncId) -> None:
        touched = [engine for engine in self._set.turn if engine.name in self._delivery.started]
        self._delivery.started.clear()
        for engine in touched:
            if not engine.capabilities.staged:
                self._set.fence(engine.name, f"{sync} {why}: weights uncertain", sync)
        staged = [engine for engine in touched if engine.capabilities.staged]
        failures = await self._set.failures_of(staged, lambda engine: self._abandon(engine, sync))
        for name, error in failures.items():
            self._set.fence(name, f"could not drop {sync}: {error}", sync)

    async def _abandon(self, engine: Engine, sync: SyncId) -> None:
        limit_s = self._limits.resume_s
        await self._set.one("abandon", lambda one: one.abandon_update(sync), engine, limit_s, sync)

    async def _fence_heirs(self, why: str, sync: SyncId) -> None:
        """Before a term's first commit there is no previous version of its own to return to. An engine that
        holds weights of an earlier term may hold some that were never committed: it waits for the next sync.
        """
        heirs = [engine for engine in self._set.view if engine.name in self._set.inherited]
        held_by = await asyncio.gather(*map(self._delivery.held_by, heirs))
        for engine, held in zip(heirs, held_by, strict=True):
            if held is None or SyncId.fits(held):
                reason = f"{sync} {why}: it holds {held or 'nobody knows what'}, not of this term"
                self._set.fence(engine.name, reason, sync, until_next_sync=True)

    async def resume(self, sync: SyncId) -> None:
        """Raises ``SyncError`` when too few engines came back."""
        self._delivery.let_go.update(self._set.turn_names)
        failures = await self._set.each(
            "resume", lambda engine: engine.resume(sync.term), self._limits.resume_s, sync
        )
        for name, error in failures.items():
            self._set.fence(name, f"could not be resumed: {error}", sync)
        self._set.require_enough(soon=True)


def _raise_first(failures: dict[str, GrpoLabError]) -> None:
    for error in failures.values():
        raise error


async def _until_healthy(engine: Engine) -> None:
    """A server that is still loading refuses connections; its caller bounds the wait."""
    while True:
        try:
            await engine.health()
            return
        except EngineUnreachable:
            await asyncio.sleep(HEALTH_RETRY_S)
