"""Reads the parts of a trace and merges them by happens-before.

A record is released only when every event that it names as a cause has been. Among those that may go, the
earliest by ``t`` goes first (so that the merged trace reads naturally), but no order is ever decided by
comparing clocks of two actors where a message says otherwise.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from grpo_lab.errors import TraceError
from grpo_lab.events import Record, parse_id, parse_line


def read_parts(path: Path) -> Iterator[Record]:
    """The records of a trace in an order that respects causes, streamed.

    Args:
        path: a run directory (``events.jsonl``, else ``events/*.jsonl``), a directory of parts, or a file.

    Raises:
        TraceError: nothing there, or a damaged line (by file and line). An unfinished last line, as a killed
            process leaves it, is ignored.
    """
    return merge(_read_file(part) for part in _parts_of(path))


def merge_to(source: Path, target: Path) -> int:
    """Writes the merged trace of ``source`` to ``target`` (whole or not at all); returns the records."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as lines:
            for record in read_parts(source):
                lines.write(record.to_line() + "\n")
                count += 1
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return count


def merge(parts: Iterable[Iterator[Record]]) -> Iterator[Record]:
    """Merges parts, each of one actor (or already merged) and in its own order.

    A cause that lies beyond the end of its part (its writer was killed) counts as released.
    """
    merger = _Merger(list(parts))
    yield from merger.run()


class _Merger:
    """k-way merge; a part whose head waits for another actor sleeps until that actor gets there."""

    def __init__(self, parts: list[Iterator[Record]]) -> None:
        self._parts = parts
        self._heads: dict[int, Record] = {}
        self._ready: list[tuple[float, str, int, int]] = []
        self._released: dict[str, int] = {}
        self._sleeping: dict[str, list[tuple[int, int]]] = {}  # actor -> heap of (seq, part)

    def run(self) -> Iterator[Record]:
        for part in range(len(self._parts)):
            self._advance(part)
        while self._heads:
            if not self._ready:
                self._wake_all()
            _, _, _, part = heapq.heappop(self._ready)
            record = self._heads.pop(part)
            yield record
            self._released[record.actor] = record.seq
            self._wake(record.actor, record.seq)
            self._advance(part)

    def _advance(self, part: int) -> None:
        record = next(self._parts[part], None)
        if record is not None:
            self._heads[part] = record
            self._schedule(part, record)

    def _schedule(self, part: int, record: Record) -> None:
        for cause in record.cause:
            actor, seq = parse_id(cause)
            if self._released.get(actor, -1) < seq:
                heapq.heappush(self._sleeping.setdefault(actor, []), (seq, part))
                return
        heapq.heappush(self._ready, (record.t, record.actor, record.seq, part))

    def _wake(self, actor: str, seq: int) -> None:
        sleeping = self._sleeping.get(actor)
        while sleeping and sleeping[0][0] <= seq:
            _, part = heapq.heappop(sleeping)
            self._schedule(part, self._heads[part])

    def _wake_all(self) -> None:
        """Nobody can go: what they wait for was never written. The earliest goes on without it."""
        waiting = [part for heap in self._sleeping.values() for _, part in heap]
        part = min(waiting, key=lambda one: (self._heads[one].t, self._heads[one].actor))
        for heap in self._sleeping.values():
            heap[:] = [item for item in heap if item[1] != part]
            heapq.heapify(heap)
        record = self._heads[part]
        heapq.heappush(self._ready, (record.t, record.actor, record.seq, part))


def _parts_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TraceError(f"{path}: no such run directory or trace file")
    merged = path / "events.jsonl"
    if merged.is_file():
        return [merged]
    directory = path / "events" if (path / "events").is_dir() else path
    parts = sorted(directory.glob("*.jsonl"))
    if not parts:
        raise TraceError(f"{path}: there is no events.jsonl and no events/*.jsonl. Name a run's directory")
    return parts


def _read_file(path: Path) -> Iterator[Record]:
    damaged: str | None = None
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if damaged is not None:
                    raise TraceError(damaged)
                try:
                    record = parse_line(line) if line.strip() else None
                except ValueError as error:
                    # Forgiven only if it is the last line: then its writer was killed while writing it.
                    damaged = f"{path}, line {number}: {str(error)[:200]}"
                    continue
                if record is not None:
                    yield record
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
