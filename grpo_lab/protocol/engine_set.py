"""The engines of a run: which of them are in the view, and calls to all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from grpo_lab.errors import EngineRefused, GrpoLabError, SyncError
from grpo_lab.events import EngineAcknowledged, EngineAdmitted, EngineFailed, EngineFenced, ViewChanged
from grpo_lab.ports import Engine, Recorder
from grpo_lab.protocol.timeouts import bounded
from grpo_lab.types import PauseMode, SyncId, SyncScope

EngineCall = Callable[[Engine], Awaitable[Any]]


class EngineSet:
    """The *view* is the set of engines that must prove the next version; a fenced one has left it.

    FENCED is left only by a restart and a full sync: ``look`` admits an engine that says another start id
    than the one it was fenced under, that was never met before, or that was fenced only until the next sync.
    ``newcomers`` were admitted that way and hold no committed weights yet; ``inherited`` are those that were
    there when the term began: what they hold, an earlier term has left, and perhaps never committed.
    ``turn`` is the part of the view that is paused and gets the weights now: all of it at once, or, rolling,
    one engine after another.
    """

    def __init__(self, engines: Sequence[Engine], recorder: Recorder, min_engines: int) -> None:
        names = [engine.name for engine in engines]
        if len(set(names)) != len(names):
            raise ValueError(f"engine names must differ, got {names}")
        self._engines = {engine.name: engine for engine in engines}
        self._recorder = recorder
        self._min_engines = min_engines
        self.view_number = 0
        self.fenced: dict[str, str] = {}
        self.newcomers: list[str] = []
        self.inherited: tuple[str, ...] = ()
        self._turns: list[tuple[str, ...]] = [tuple(names)]  # that under way, and those to come
        self._starts: dict[str, str] = {}  # start ids of the engines that were met
        self._until_next_sync: set[str] = set()  # fenced engines that it takes in again

    @property
    def all(self) -> tuple[Engine, ...]:
        """Also those that are fenced."""
        return tuple(self._engines.values())

    @property
    def view(self) -> tuple[Engine, ...]:
        """Live engines in a fixed order."""
        return tuple(engine for name, engine in self._engines.items() if name not in self.fenced)

    @property
    def has_any(self) -> bool:
        """Also one that only waits for the next sync."""
        return bool(self.view or self._until_next_sync)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(engine.name for engine in self.view)

    def begin_term(self) -> None:
        """Its first sync goes to every engine, whatever was known of it in an earlier term."""
        for known in (self.fenced, self.newcomers, self._starts, self._until_next_sync):
            known.clear()
        self._turns = [self.names]
        self.declare_view()

    @property
    def turn(self) -> tuple[Engine, ...]:
        return tuple(engine for engine in self.view if engine.name in self._turns[0])

    @property
    def turn_names(self) -> tuple[str, ...]:
        return tuple(engine.name for engine in self.turn)

    def begin_turns(self, scope: SyncScope) -> None:
        """All at once, or one after another; those that hold nothing that this term has committed come first,
        together: they must not serve while the others have their turns.
        """
        self._turns = [self.names]
        if scope == "rolling":
            first = tuple(name for name in self.names if name in (*self.newcomers, *self.inherited))
            others: list[tuple[str, ...]] = [(name,) for name in self.names if name not in first]
            self._turns = [first, *others] if first or not others else others

    @property
    def is_last_turn(self) -> bool:
        return len(self._turns) == 1

    def next_turn(self) -> None:
        del self._turns[0]

    def end_turns(self) -> None:
        """All again. A pause that was given up may come late, and hit one that has had its turn."""
        self._turns = [self.names]

    def declare_view(self) -> None:
        self.view_number += 1
        self._recorder.emit(ViewChanged(view=self.view_number, members=self.names))

    def fence(self, name: str, reason: str, sync: SyncId, *, until_next_sync: bool = False) -> None:
        """Takes the engine out of service. The rest goes on under a new view."""
        if name in self.fenced:
            return
        if until_next_sync:
            self._until_next_sync.add(name)
        self.fenced[name] = reason
        if name in self.newcomers:
            self.newcomers.remove(name)
        start = self._starts.get(name, "")
        self._recorder.emit(
            EngineFenced(engine=name, reason=reason[:500], term=sync.term, version=sync.version, start=start)
        )
        self.declare_view()

    def fence_newcomers(self, reason: str, sync: SyncId, uncertain: Collection[str]) -> None:
        """They were to get their first weights from a sync that ends without a commit. The next one takes
        them in again, apart from those that are ``uncertain``: the others hold nothing.
        """
        for name in tuple(self.newcomers):
            self.fence(name, reason, sync, until_next_sync=name not in uncertain)

    def all_committed(self) -> None:
        """Every engine of the view holds what this term has committed."""
        self.newcomers.clear()
        self.inherited = ()

    async def look(self, members: Sequence[Engine], limit_s: float, sync: SyncId) -> tuple[Engine, ...]:
        """Asks which start of its process each is; admits and returns those that hold nothing any more."""
        answers = await asyncio.gather(*(_start_of(engine, limit_s) for engine in members))
        found = []
        for engine, start in zip(members, answers, strict=True):
            if start is not None and self._is_new(engine.name, start):
                found.append(engine)
                if engine.name not in self.newcomers:
                    self.newcomers.append(engine.name)
                self._admit(engine.name, start, sync)
        return tuple(found)

    async def meet(self, limit_s: float, sync: SyncId) -> None:
        """The first look of a term at the engines of the view."""
        self.inherited = self.names
        answers = await asyncio.gather(*(_start_of(engine, limit_s) for engine in self.view))
        for name, start in zip(self.names, answers, strict=True):
            if start is not None:
                self._admit(name, start, sync)

    def _is_new(self, name: str, start: str) -> bool:
        known = self._starts.get(name)
        return name in self._until_next_sync or known is None or start not in ("", known)

    def _admit(self, name: str, start: str, sync: SyncId) -> None:
        self._starts[name] = start
        self._until_next_sync.discard(name)
        self._recorder.emit(EngineAdmitted(engine=name, start=start, term=sync.term, version=sync.version))
        if self.fenced.pop(name, None) is not None:
            self.declare_view()

    def enough_without(self, names: Sequence[str]) -> bool:
        return len([name for name in self.names if name not in names]) >= self._min_engines

    def require_enough(self, *, soon: bool = False) -> None:
        """Raises ``SyncError`` when fewer than ``min_engines`` are left, with why each was lost.

        ``soon``: engines count too that only wait for the next sync.
        """
        if len(self.view) + (len(self._until_next_sync) if soon else 0) < self._min_engines:
            lost = "; ".join(f"{name}: {reason}" for name, reason in self.fenced.items())
            raise SyncError(
                f"{len(self.view)} engines are left, min_engines is {self._min_engines}. Lost: {lost}"
            )

    async def each(
        self, call: str, function: EngineCall, timeout_s: float, sync: SyncId
    ) -> dict[str, GrpoLabError]:
        """Calls every engine of the turn at once; returns the failures by engine name."""
        return await self.failures_of(
            self.turn, lambda engine: self.one(call, function, engine, timeout_s, sync)
        )

    @staticmethod
    async def failures_of(members: Sequence[Engine], function: EngineCall) -> dict[str, GrpoLabError]:
        """``function`` of each of ``members``, side by side. What is not of ``grpo_lab.errors`` is raised."""
        outcomes = await asyncio.gather(*(function(engine) for engine in members), return_exceptions=True)
        failures: dict[str, GrpoLabError] = {}
        for engine, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, GrpoLabError):
                failures[engine.name] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return failures

    async def one(
        self, call: str, function: EngineCall, engine: Engine, timeout_s: float, sync: SyncId
    ) -> Any:
        """One bounded call with its answer in the trace. Raises what the call raised."""
        try:
            result = await bounded(function(engine), timeout_s, f"{call} of {engine.name}")
        except GrpoLabError as error:
            status = error.status if isinstance(error, EngineRefused) else 0
            self._recorder.emit(
                EngineFailed(engine=engine.name, call=call, detail=str(error)[:500], status=status)
            )
            raise
        self._recorder.emit(
            EngineAcknowledged(
                engine=engine.name,
                call=call,
                term=sync.term,
                version=sync.version,
                attempt=sync.attempt,
            )
        )
        return result

    async def pause(
        self, members: Sequence[Engine], mode: PauseMode, clear_cache: bool, limit_s: float, sync: SyncId
    ) -> dict[str, GrpoLabError]:
        """Returns the failures by engine name."""

        async def pause(engine: Engine) -> None:
            await self.one(
                "pause", lambda one: one.pause(mode, clear_cache, sync.term), engine, limit_s, sync
            )

        return await self.failures_of(members, pause)

    async def fence_dead(self, suspects: Sequence[str], limit_s: float, sync: SyncId) -> None:
        """Fences those of ``suspects`` that do not answer a health request either."""
        failures = await self.each("health", _health, limit_s, sync)
        for name, error in failures.items():
            if name in suspects:
                self.fence(name, f"dead: {error}", sync)


async def _health(engine: Engine) -> None:
    await engine.health()


async def _start_of(engine: Engine, limit_s: float) -> str | None:
    """None when it does not answer."""
    try:
        return await bounded(engine.start_id(), limit_s, f"start id of {engine.name}")
    except GrpoLabError:
        return None
