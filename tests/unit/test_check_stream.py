"""A long run is checked in a stream: what a rule knows does not grow with the length of the trace."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator

import pytest
from check_shapes import fresh_run
from check_world import World

from grpo_lab.check import Checker, read_parts
from grpo_lab.events import Record

ROUNDS = 1_200  # about 91 records each


def long_run(rounds: int) -> Iterator[list[Record]]:
    """The records of a valid run, a round at a time: groups, a step, a sync."""
    world = World()
    world.begin_term()
    world.sync()
    world.start_worker()
    for _ in range(rounds):
        world.rounds(1)
        yield world.records
        world.records.clear()
    world.end()
    yield world.records


@pytest.mark.slow
def test_memory_does_not_grow_with_the_trace():
    checker = Checker()
    settled = records = 0
    tracemalloc.start()
    try:
        for number, part in enumerate(long_run(ROUNDS)):
            for record in part:
                assert not checker.feed(record)
            records += len(part)
            if number == ROUNDS // 2:
                gc.collect()
                settled = tracemalloc.get_traced_memory()[0]
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - settled
    finally:
        tracemalloc.stop()
    result = checker.finish()
    assert records == result.records > 100_000
    assert result.violations == 0
    # Half a run is more than 50,000 records; remembering 16 bytes of each would exceed this.
    print(f"grew by {grown:,} bytes from {settled:,} in the second half of {records:,} records")  # noqa: T201
    assert grown < 800_000, f"{grown:,} bytes more after the second half of {records:,} records"


def test_speed_of_reading_and_checking(tmp_path, capsys):
    events = tmp_path / "events"
    events.mkdir()
    files = {}
    for part in long_run(150):
        for record in part:
            file = files.get(record.actor)
            if file is None:
                file = files[record.actor] = (events / f"{record.actor}.jsonl").open("w", encoding="utf-8")
            file.write(record.to_line() + "\n")
    for file in files.values():
        file.close()
    checker = Checker()
    started_s = time.process_time()
    for record in read_parts(tmp_path):
        checker.feed(record)
    result = checker.finish()
    per_s = result.records / (time.process_time() - started_s)
    with capsys.disabled():
        print(f"\nmerged, parsed and checked {result.records:,} records, {per_s:,.0f} a second")  # noqa: T201
    assert result.violations == 0
    assert per_s > 5_000  # measured: about 80,000; only a disaster may fail here, never a busy machine


def test_violations_are_seen_at_once_and_kept_few():
    world = fresh_run()
    commit = next(record for record in world.records if record.event.kind == "version_committed")
    checker = Checker()
    for record in world.records:
        assert not checker.feed(record)
    seen = [violation for _ in range(500) for violation in checker.feed(commit) if violation.rule == "S1"]
    s1 = checker.finish().of("S1")
    assert s1.violation_count == 500
    assert s1.violations == tuple(seen)
    assert len(seen) == 50
