"""Checks a trace while it is being written.

Parts of several processes are read as they grow. A record is released when every event that it names as
a cause has been, and when it is ``lag_s`` older than the newest one of any part: by then whatever happened
before it has been written too. So the order is that of the finished trace, a moment later.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from grpo_lab.check.checker import Checker
from grpo_lab.check.result import Violation
from grpo_lab.errors import TraceError
from grpo_lab.events import Record, RunDeclared, RunEnded, make_record, parse_id, split_line
from grpo_lab.events.record import Place

LAG_S = 2.0
GIVE_UP_S = 30.0  # what is named as a cause and has not been written by then was lost with its process
POLL_S = 0.25
FIRST_FILE_S = 120.0  # for a run that is about to begin


class Follower:
    """Reads ``events/*.jsonl`` of a run that goes on. ``poll`` never blocks."""

    def __init__(self, directory: Path, lag_s: float = LAG_S) -> None:
        self._directory = directory
        self._lag_s = lag_s
        self._parts: dict[Path, _Part] = {}
        self._released: dict[str, int] = {}  # the newest event of every actor that was handed out
        self._newest_s = -math.inf

    @property
    def run_ended(self) -> bool:
        """Whether the event that ends a run was read, although it may not have been handed out yet."""
        return any(part.run_ended for part in self._parts.values())

    def poll(self) -> Iterator[Record]:
        """Records that were written since and are in order now. Raises ``TraceError`` for damage."""
        self._read()
        yield from self._release(self._newest_s - self._lag_s)

    def drain(self) -> Iterator[Record]:
        """Everything that is left: nobody writes any more."""
        self._read()
        yield from self._release(math.inf)

    def _read(self) -> None:
        for path in sorted(self._directory.glob("*.jsonl")):
            part = self._parts.setdefault(path, _Part(path))
            self._newest_s = max(self._newest_s, part.read())

    def _release(self, until_s: float) -> Iterator[Record]:
        while True:
            heads = {part.waiting[0][0][1]: part for part in self._parts.values() if part.waiting}
            free = [
                part
                for part in heads.values()
                if part.waiting[0][0][0] <= until_s and not self._waits(part.waiting[0][0], heads, until_s)
            ]
            if not free:
                return
            # Bounds come from the declaration, so no clock may put anything before it.
            first = min(free, key=lambda part: (not part.declares, part.waiting[0][0][:2]))
            place, record = first.waiting.popleft()
            self._released[place[1]] = place[2]
            if record is not None:
                yield record

    def _waits(self, place: Place, heads: Mapping[str, _Part], until_s: float) -> bool:
        """Whether an event that caused this one is still to come."""
        for actor, number in map(parse_id, place[3]):
            if self._released.get(actor, -1) >= number:
                continue
            if actor in heads:
                if heads[actor].waiting[0][0][2] <= number:
                    return True
            elif math.isfinite(until_s) and place[0] > until_s - GIVE_UP_S:
                return True
        return False


class _Part:
    """One growing file: whole lines that have not been handed out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[tuple[Place, Record | None]] = deque()  # None: of a kind that is not known
        self.run_ended = False
        self._offset = 0
        self._lines = 0

    @property
    def declares(self) -> bool:
        """Whether its first waiting record is the run's declaration."""
        record = self.waiting[0][1]
        return record is not None and record.event.kind == RunDeclared.kind

    def read(self) -> float:
        """Takes what was appended; the time of the last line, or minus infinity."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._lines += 1
            try:
                place, row = split_line(line)
                record = make_record(place, row)
            except ValueError as error:
                raise TraceError(f"{self.path}, line {self._lines}: {str(error)[:300]}") from error
            self.waiting.append((place, record))
            self.run_ended = self.run_ended or (record is not None and record.event.kind == RunEnded.kind)
        return self.waiting[-1][0][0] if self.waiting else -math.inf


def parts_directory(path: Path) -> Path | None:
    """Where a run writes its event files, below ``path`` or there; None as long as there is none."""
    return next((place for place in (path / "events", path) if any(place.glob("*.jsonl"))), None)


def await_parts(
    path: Path, pause: Callable[[float], None] = time.sleep, give_up_s: float = FIRST_FILE_S
) -> Path:
    """The directory of the event files, as soon as there is one. Raises ``TraceError`` when none comes."""
    waited_s = 0.0
    while (directory := parts_directory(path)) is None:
        if waited_s >= give_up_s:
            raise TraceError(
                f"{path}: no event file came in {give_up_s:g} s. Name the directory of a run that goes on"
            )
        pause(POLL_S)
        waited_s += POLL_S
    return directory


def follow(
    directory: Path, checker: Checker, pause: Callable[[float], None] = time.sleep, lag_s: float = LAG_S
) -> Iterator[Violation]:
    """Every violation as soon as it can be seen, until the trace says that the run has ended.

    ``checker`` is fed meanwhile; call its ``finish`` afterwards. Raises ``TraceError`` for damage.
    """
    follower = Follower(directory, lag_s)
    ended = False
    while not ended:
        for record in follower.poll():
            yield from checker.feed(record)
        ended = follower.run_ended
        if not ended:
            pause(POLL_S)
    for record in follower.drain():
        yield from checker.feed(record)
