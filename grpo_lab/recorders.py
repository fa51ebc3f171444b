"""Recorders: a list for simulations and tests, a file per actor for real processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from grpo_lab.events import Event, Record, parse_id

Clock = Callable[[], float]


class ListRecorder:
    """Keeps the records of one actor in memory, or of many when ``records`` is shared.

    >>> from grpo_lab.events import Reached
    >>> trace: list[Record] = []
    >>> a, b = ListRecorder("a", clock=lambda: 0.0, records=trace), ListRecorder("b", lambda: 0.0, trace)
    >>> b.observe(a.emit(Reached(mark="first")))
    >>> _ = b.emit(Reached(mark="second"))
    >>> trace[1].cause
    ('a:0',)
    """

    def __init__(self, actor: str, clock: Clock, records: list[Record] | None = None) -> None:
        self.actor = actor
        self.records = records if records is not None else []
        self._clock = clock
        self._next_seq = 0
        self._causes: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def next_seq(self) -> int:
        return self._next_seq

    @property
    def now_s(self) -> float:
        """Seconds since the run began, on this actor's clock."""
        return self._clock()

    @property
    def last_id(self) -> str:
        return f"{self.actor}:{self._next_seq - 1}" if self._next_seq else ""

    def observe(self, event_id: str) -> None:
        """The next event of this actor comes after ``event_id``. Ids of its own are ignored."""
        if not event_id:
            return
        actor, seq = parse_id(event_id)
        if actor == self.actor:
            return
        with self._lock:
            self._causes[actor] = max(seq, self._causes.get(actor, -1))

    def emit(self, event: Event) -> str:
        """Appends the event and returns its id."""
        with self._lock:
            causes = tuple(f"{actor}:{seq}" for actor, seq in sorted(self._causes.items()))
            self._causes.clear()
            record = Record(self._clock(), self.actor, self._next_seq, causes, event)
            self._next_seq += 1
            self._store(record)
        return record.id

    def _store(self, record: Record) -> None:
        self.records.append(record)


class NullRecorder(ListRecorder):
    """Numbers events and keeps none: for runs without a trace."""

    def __init__(self, actor: str) -> None:
        super().__init__(actor, clock=lambda: 0.0)

    def _store(self, record: Record) -> None:
        """Nobody asked for it."""


class FileRecorder(ListRecorder):
    """Appends records to ``events/<actor>.jsonl``, a line each.

    Lines are written through at once, so that a killed process loses at most the line in the making;
    readers ignore an unfinished last line. A process that starts again under the same name continues
    the numbering of its file.
    """

    def __init__(self, actor: str, directory: Path, clock: Clock) -> None:
        super().__init__(actor, clock)
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{actor}.jsonl"
        self._next_seq = _records_in(self.path)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def _store(self, record: Record) -> None:
        self._file.write(record.to_line() + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def run_clock(started_monotonic_s: float | None = None) -> Clock:
    """Seconds since the run began. Pass the first process' ``time.monotonic()`` to all others of a host."""
    start = time.monotonic() if started_monotonic_s is None else started_monotonic_s
    return lambda: time.monotonic() - start


def _records_in(path: Path) -> int:
    """Whole lines in an existing part; cuts off an unfinished last one."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return data.count(b"\n")
