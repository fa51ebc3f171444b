"""What all liveness rules share: a clock that stands still under faults, and obligations that run out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import FaultInjected, FaultsEnded, Record, RunEnded


@dataclass(slots=True)
class Obligation:
    """Something that must happen within the bound of ``since_s``; ``words`` say what did not."""

    since_s: float
    event_id: str
    words: str


class LivenessRule(Rule):
    """Obligations are opened by one event and met by another; the oldest is looked at with each event read.

    Time counts from ``FaultsEnded`` on, or from the start while nothing has injected a fault. A trace that
    stops early ends all that is still within its bound. Durations are differences of ``t``, so the clocks of
    the actors must agree to much better than the bound.
    """

    parameters: ClassVar[tuple[str, ...]] = ("liveness_bound_s",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.bound_s: float = context.parameter("liveness_bound_s")
        self._open: dict[Hashable, Obligation] = {}  # in the order of their beginning
        self._calm_since_s: float | None = 0.0

    @on(FaultInjected)
    def fault_injected(self, record: Record) -> None:
        self._calm_since_s = None

    @on(FaultsEnded)
    def faults_ended(self, record: Record) -> None:
        self._calm_since_s = record.t

    @on(RunEnded)
    def run_ended(self, record: Record) -> None:
        """Whatever the run still owed it owes no more."""
        self.expire(record.t)
        self._open.clear()

    @property
    def calm(self) -> bool:
        return self._calm_since_s is not None

    def owe(self, key: Hashable, record: Record, words: str) -> None:
        """Opens an obligation, unless it is open already."""
        self.expire(record.t)
        if key not in self._open:
            self._open[key] = Obligation(record.t, record.id, words)

    def meet(self, key: Hashable, record: Record) -> None:
        """The obligation is met, maybe too late."""
        self.expire(record.t)
        if self._open.pop(key, None) is not None and self.calm:
            self.count()

    def waive(self, matches: Callable[[Hashable], bool], record: Record) -> None:
        """Obligations that nobody can meet from ``record`` on; those that were overdue by then stay so."""
        self.expire(record.t)
        for key in [key for key in self._open if matches(key)]:
            del self._open[key]

    def expire(self, now_s: float) -> None:
        """Reports what is overdue; the order of opening is the order of running out."""
        while self._open and self._calm_since_s is not None:
            key, oldest = next(iter(self._open.items()))
            waited_s = now_s - max(oldest.since_s, self._calm_since_s)
            if waited_s <= self.bound_s:
                return
            del self._open[key]
            self.count()
            self._overdue(oldest, waited_s, now_s)

    def finish(self, last: Record | None) -> None:
        if last is not None:
            self.expire(last.t)

    def _overdue(self, item: Obligation, waited_s: float, now_s: float) -> None:
        self._now_s = now_s
        self.violate(f"{item.words}, {waited_s:.1f} s later (bound {self.bound_s:g} s)", None, item.event_id)
