"""Faults that were drawn before the run, and when each of them strikes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from grpo_lab.events import FaultInjected
from grpo_lab.ports import Recorder
from grpo_lab.sim.scenario import CRASHES, LINK_FAULTS, Fault, Scenario

SLOW_FACTOR = 10.0

Crash = Callable[[str, float], None]
"""``crash(member, down_s)``: the member is gone at once and starts again ``down_s`` later."""

Stall = Callable[[str, float], None]
"""``stall(member, duration_s)``: the member, trainer or worker, does nothing meanwhile."""


@dataclass(frozen=True, slots=True)
class _Window:
    kind: str
    until_s: float


class Faults:
    """Counts the calls of a run and says which faults strike now; after ``end`` none does.

    A call is counted for each member that takes part in it. ``busy_until_s`` is when the last effect of
    those that have struck is over.
    """

    def __init__(self, scenario: Scenario, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._waiting = [fault for fault in scenario.faults if fault.kind != "clock_skew"]
        self._skews = {f.target: f.duration_s for f in scenario.faults if f.kind == "clock_skew"}
        self._recorder = recorder
        self._clock = clock
        self._counts: Counter[tuple[str, str]] = Counter()
        self._windows: dict[str, list[_Window]] = {}
        self._all_struck = asyncio.Event()
        self._note_progress()
        self.busy_until_s = 0.0
        self.struck = 0

    def skew_s(self, member: str) -> float:
        return self._skews.get(member, 0.0)

    def strike(self, call: str, *parties: str) -> dict[str, Fault]:
        """Counts one ``call`` between ``parties``; the faults that it meets, by kind."""
        met: dict[str, Fault] = {}
        for party in parties:
            self._counts[party, call] += 1
        for fault in list(self._waiting):
            due = fault.call == call and self._counts[fault.target, call] == fault.occurrence
            if due and fault.target in parties:
                self._waiting.remove(fault)
                self._inject(fault)
                met[fault.kind] = fault
        self._note_progress()
        return met

    def arm(self, fault: Fault) -> None:
        """One more fault, whose occurrence counts from now."""
        seen = self._counts[fault.target, fault.call]
        self._waiting.append(dataclasses.replace(fault, occurrence=seen + fault.occurrence))
        self._all_struck.clear()

    def slowness(self, engine: str) -> float:
        return SLOW_FACTOR if self.cut(engine, "slow_link") else 1.0

    def cut(self, engine: str, kind: str) -> bool:
        """Whether a fault of the link to ``engine`` goes on."""
        now_s = self._clock()
        return any(w.kind == kind and w.until_s > now_s for w in self._windows.get(engine, ()))

    def end(self) -> None:
        """What has not struck never does, and links are whole again."""
        self._waiting.clear()
        self._windows.clear()
        self._note_progress()

    async def over(self, until_s: float) -> None:
        """Until all have struck and their effects are over; at ``until_s`` the rest is called off."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._all_struck.wait()
        except TimeoutError:
            self._waiting.clear()
        while (left_s := self.busy_until_s - self._clock()) > 0:
            await asyncio.sleep(left_s)

    def _inject(self, fault: Fault) -> None:
        now_s = self._clock()
        self.struck += 1
        lasting = fault.duration_s if fault.kind in (*LINK_FAULTS, *CRASHES, "stall", "delay") else 0.0
        if fault.kind in ("late_reply", "late"):
            lasting = fault.duration_s
        self.busy_until_s = max(self.busy_until_s, now_s + lasting)
        if fault.kind in LINK_FAULTS:
            window = _Window(fault.kind, now_s + fault.duration_s)
            self._windows.setdefault(fault.target, []).append(window)
        detail = f"at {fault.call} number {fault.occurrence}"
        if lasting:
            detail += f", for {lasting:g} s"
        self._recorder.emit(FaultInjected(fault=fault.kind, target=fault.target, detail=detail))

    def _note_progress(self) -> None:
        if not self._waiting:
            self._all_struck.set()
