"""Reads the parts of a trace and merges them by happens-before.

A record is released only when every event that it names as a cause has been. Among those that may go, the
earliest by ``(t, actor)`` goes first, so that the merged trace reads naturally; but no order is ever decided
by comparing the clocks of two actors where a message says otherwise. Only one line of each part is in memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.errors import TraceError
from grpo_lab.events import Record, RunDeclared, make_record, parse_id, split_line
from grpo_lab.events.record import Place
from grpo_lab.files import replacing


def read_parts(path: Path) -> Iterator[Record]:
    """The records of a trace in an order that respects causes, streamed. Unknown kinds are skipped.

    Args:
        path: a run directory (``events.jsonl``, else ``events/*.jsonl``), a directory of parts with one
            actor each, or a file that holds several actors in a merged order.

    Raises:
        TraceError: nothing there, or damage, by file and line. An unfinished last line, as a killed process
            leaves it, is ignored; an event that is named as a cause but was never written holds nobody up.
    """
    for line in _lines_of(path):
        try:
            record = make_record(line.place, line.row)
        except ValueError as error:
            raise line.damaged(str(error)) from error
        if record is not None:
            yield record


def merge_to(source: Path, target: Path) -> int:
    """Writes the merged trace of ``source`` to ``target`` (whole or not at all); returns the records.

    Lines are copied as they are, also those of kinds that this version does not know. Raises like
    ``read_parts``.
    """
    count = 0
    with replacing(target) as partial, partial.open("wb") as output:
        for line in _lines_of(source):
            output.write(line.text)
            count += 1
    return count


@dataclass(slots=True)
class _Line:
    path: Path
    number: int
    text: bytes
    place: Place
    row: dict[str, Any]

    @property
    def id(self) -> str:
        return f"{self.place[1]}:{self.place[2]}"

    def damaged(self, why: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.number}: {why[:300]}")


def _lines_of(path: Path) -> Iterator[_Line]:
    parts = _parts_of(path)
    return _in_order(_read(parts[0])) if len(parts) == 1 else _Merge(parts).run()


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


def _read(path: Path) -> Iterator[_Line]:
    """The lines of one file; each actor's numbers must rise."""
    last: dict[str, int] = {}
    try:
        with path.open("rb") as lines:
            for number, text in enumerate(lines, start=1):
                if text.isspace():
                    continue
                try:
                    place, row = split_line(text)
                except ValueError as error:
                    if not text.endswith(b"\n"):
                        return  # its writer was killed in the middle of it
                    raise TraceError(f"{path}, line {number}: {str(error)[:300]}") from error
                line = _Line(path, number, text if text.endswith(b"\n") else text + b"\n", place, row)
                _, actor, seq, _ = place
                if seq <= last.get(actor, -1):
                    raise line.damaged(f"event {line.id} stands after {actor}:{last[actor]}")
                last[actor] = seq
                yield line
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def _in_order(lines: Iterator[_Line]) -> Iterator[_Line]:
    """A file of several actors must have been merged: no event stands after one that it caused."""
    awaited: dict[str, tuple[int, str]] = {}  # actor -> highest number named as a cause, and by whom
    for line in lines:
        _, actor, seq, cause = line.place
        if actor in awaited and seq <= awaited[actor][0]:
            raise line.damaged(
                f"event {line.id} stands after {awaited[actor][1]}, which it caused: this file is not in the "
                "order of causes. Name the directory of its parts, or write it in the order of happening"
            )
        for other, number in _causes(line, cause):
            if number > awaited.get(other, (-1, ""))[0]:
                awaited[other] = (number, line.id)
        released = awaited.get(actor)
        if released is not None and released[0] <= seq:
            del awaited[actor]
        yield line


def _causes(line: _Line, cause: Sequence[str]) -> Iterator[tuple[str, int]]:
    for event_id in cause:
        try:
            yield parse_id(event_id)
        except ValueError as error:
            raise line.damaged(str(error)) from error


class _Merge:
    """k-way merge of parts of one actor each. A part whose head waits for another actor sleeps until then."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._sources = [_read(path) for path in paths]
        self._heads: dict[str, _Line] = {}  # of parts that have not ended, by actor
        self._part_of: dict[str, int] = {}
        self._ready: list[tuple[bool, float, str]] = []
        self._sleeping: dict[str, list[tuple[int, str]]] = {}  # awaited actor -> heap of (number, sleeper)

    def run(self) -> Iterator[_Line]:
        for part, source in enumerate(self._sources):
            line = next(source, None)
            if line is not None:
                self._admit(part, line)
        for actor in self._heads:
            self._schedule(actor)
        while self._heads:
            if not self._ready:
                raise self._circle()
            actor = heapq.heappop(self._ready)[2]
            yield self._heads[actor]
            self._advance(actor)

    def _admit(self, part: int, line: _Line) -> None:
        actor = line.place[1]
        if actor in self._part_of:
            raise line.damaged(f"events of {actor} are also in {self._heads[actor].path}")
        self._part_of[actor] = part
        self._heads[actor] = line

    def _advance(self, actor: str) -> None:
        line = next(self._sources[self._part_of[actor]], None)
        if line is None:
            del self._heads[actor]
        elif line.place[1] != actor:
            raise line.damaged(f"event {line.id} in the part of {actor}: a part holds one actor's events")
        else:
            self._heads[actor] = line
            self._schedule(actor)
        self._wake(actor)

    def _schedule(self, actor: str) -> None:
        line = self._heads[actor]
        t, _, _, cause = line.place
        for other, number in _causes(line, cause):
            if self._awaits(other, number):
                heapq.heappush(self._sleeping.setdefault(other, []), (number, actor))
                return
        # Bounds come from the declaration, so no clock may put anything before it.
        heapq.heappush(self._ready, (line.row.get("kind") != RunDeclared.kind, t, actor))

    def _awaits(self, actor: str, number: int) -> bool:
        """Whether that event is still to come: it is not, if its part has ended or never was."""
        head = self._heads.get(actor)
        return head is not None and head.place[2] <= number

    def _wake(self, actor: str) -> None:
        sleeping = self._sleeping.get(actor)
        while sleeping and not self._awaits(actor, sleeping[0][0]):
            self._schedule(heapq.heappop(sleeping)[1])

    def _circle(self) -> TraceError:
        line = min(self._heads.values(), key=lambda head: (head.place[0], head.place[1]))
        waits = "; ".join(f"{head.id} names {', '.join(head.place[3])}" for head in self._heads.values())
        return line.damaged(f"events are each other's causes, which cannot be: {waits}")
