"""Where the seconds of a sync go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class PhaseTimes:
    """Adds up seconds by phase on the given clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = clock()
        self._phases_s: dict[str, float] = {}

    def add(self, phase: str, seconds: float) -> None:
        self._phases_s[phase] = self._phases_s.get(phase, 0.0) + seconds

    def add_all(self, phases_s: Mapping[str, float]) -> None:
        for phase, seconds in phases_s.items():
            self.add(phase, seconds)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        started_s = self._clock()
        try:
            yield
        finally:
            self.add(phase, self._clock() - started_s)

    def finish(self) -> dict[str, float]:
        """Seconds by phase, and ``total`` since construction."""
        return {**self._phases_s, "total": self._clock() - self._started_s}
