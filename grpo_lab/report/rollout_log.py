"""The ledger of samples: dispatched = consumed + dropped + in flight + queued."""

from __future__ import annotations

from collections import Counter

from grpo_lab.events import (
    GroupConsumed,
    GroupDropped,
    GroupQueued,
    GroupTaken,
    Record,
    SampleCompleted,
    SampleDispatched,
)
from grpo_lab.report.spans import Span


class RolloutLog:
    """Follows every dispatched sample to its end.

    Attributes:
        dispatched, consumed: samples.
        dropped: samples by reason. Samples of a dropped group that were never dispatched do not count.
        provisional_dropped: dropped samples that an engine on probation had decoded.
        tokens: completion tokens of all completed samples.
        in_flight_series, queue_series: (t, samples in flight) and (t, groups queued) after each change.
        engine_requests: for each engine, the times with a request in flight, as the client saw them.
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.consumed = 0
        self.dropped: Counter[str] = Counter()
        self.provisional_dropped = 0
        self.completed = 0
        self.tokens = 0
        self.first_dispatch_t: float | None = None
        self.last_completion_t: float | None = None
        self.in_flight_series: list[tuple[float, int]] = []
        self.queue_series: list[tuple[float, int]] = []
        self.engine_requests: dict[str, list[Span]] = {}
        self._in_flight: dict[str, tuple[str, float]] = {}  # sample -> engine, t of its (last) dispatch
        self._waiting: dict[str, bool] = {}  # completed, not ended: sample -> provisional
        self._queue_depth = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def queued(self) -> int:
        """Completed samples that are neither consumed nor dropped yet."""
        return len(self._waiting)

    def see(self, record: Record) -> None:
        match record.event:
            case SampleDispatched() as event:
                self._dispatch(record.t, event)
            case SampleCompleted() as event:
                self._complete(record.t, event)
            case GroupQueued() as event:
                self._queue(record.t, event.depth)
            case GroupTaken():
                self._queue(record.t, max(0, self._queue_depth - 1))
            case GroupConsumed() as event:
                self.consumed += sum(self._end(record.t, sample) is not None for sample in event.samples)
            case GroupDropped() as event:
                self._drop(record.t, event)

    def finish(self, end_t: float) -> None:
        """Requests still in flight were in flight until the end of the trace."""
        for engine, since in self._in_flight.values():
            self.engine_requests.setdefault(engine, []).append((since, end_t))

    def _dispatch(self, t: float, event: SampleDispatched) -> None:
        if self.first_dispatch_t is None:
            self.first_dispatch_t = t
        again = event.sample in self._in_flight or self._waiting.pop(event.sample, None) is not None
        self.dispatched += not again
        self._in_flight[event.sample] = (event.engine, t)
        self.in_flight_series.append((t, len(self._in_flight)))

    def _complete(self, t: float, event: SampleCompleted) -> None:
        self.completed += 1
        self.tokens += event.tokens
        self.last_completion_t = t
        if event.sample in self._in_flight:
            self._land(t, event.sample)
            self._waiting[event.sample] = event.provisional

    def _land(self, t: float, sample: str) -> None:
        engine, since = self._in_flight.pop(sample)
        self.engine_requests.setdefault(engine, []).append((since, t))
        self.in_flight_series.append((t, len(self._in_flight)))

    def _queue(self, t: float, depth: int) -> None:
        self._queue_depth = depth
        self.queue_series.append((t, depth))

    def _drop(self, t: float, event: GroupDropped) -> None:
        for sample in event.samples:
            provisional = self._end(t, sample)
            if provisional is not None:
                self.dropped[event.reason] += 1
                self.provisional_dropped += provisional

    def _end(self, t: float, sample: str) -> bool | None:
        """Whether the ended sample was provisional; None if it was not alive."""
        if sample in self._in_flight:
            self._land(t, sample)
            return False
        return self._waiting.pop(sample, None)
