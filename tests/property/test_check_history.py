"""What ``merge_to`` writes is what was read: as one file the trace says the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.check import merge_to, read_parts
from grpo_lab.events import Heartbeat, Record
from grpo_lab.recorders import ListRecorder

ACTORS = ("run", "trainer", "worker", "engine-0", "engine-1")


@st.composite
def histories(draw: st.DrawFn) -> list[Record]:
    """A run of 1 - 5 actors that tell each other what they have seen; every clock is wrong in its own way."""
    actors = ACTORS[: draw(st.integers(1, len(ACTORS)))]
    moment = 0
    trace: list[Record] = []

    def recorder(actor: str) -> ListRecorder:
        skew_s = draw(st.floats(-1000.0, 1000.0))
        rate = draw(st.floats(0.25, 4.0))
        return ListRecorder(actor, clock=lambda: skew_s + rate * moment, records=trace)

    recorders = {actor: recorder(actor) for actor in actors}
    for actor, heard in draw(
        st.lists(
            st.tuples(st.sampled_from(actors), st.lists(st.sampled_from(actors), max_size=2)), max_size=40
        )
    ):
        moment += 1
        for other in heard:
            recorders[actor].observe(recorders[other].last_id)
        recorders[actor].emit(Heartbeat(member=actor, progress=moment))
    return trace


def write_parts(trace: list[Record], directory: Path) -> None:
    for actor in ACTORS:
        lines = [record.to_line() + "\n" for record in trace if record.actor == actor]
        if lines:
            (directory / f"{actor}.jsonl").write_text("".join(lines), encoding="utf-8")


@given(histories())
def test_a_merged_file_reads_back_the_same(trace: list[Record]) -> None:
    if not trace:
        return
    with tempfile.TemporaryDirectory() as name:
        parts, target = Path(name, "events"), Path(name, "events.jsonl")
        parts.mkdir()
        write_parts(trace, parts)
        merged = list(read_parts(parts))
        assert merge_to(parts, target) == len(merged)
        assert list(read_parts(target)) == merged
        assert list(read_parts(Path(name))) == merged  # a run directory prefers the merged file
        assert sorted(path.name for path in Path(name).iterdir()) == ["events", "events.jsonl"]


@given(histories(), st.data())
def test_the_merged_file_of_a_killed_run_reads_back_too(trace: list[Record], data: st.DataObject) -> None:
    """Parts end anywhere, also in the middle of a line, and name causes that were never written."""
    if not trace:
        return
    with tempfile.TemporaryDirectory() as name:
        parts, target = Path(name, "events"), Path(name, "events.jsonl")
        parts.mkdir()
        write_parts(trace, parts)
        for part in sorted(parts.iterdir()):
            whole = part.read_bytes()
            part.write_bytes(whole[: data.draw(st.integers(0, len(whole)), label=part.name)])
        merged = list(read_parts(parts))
        assert merge_to(parts, target) == len(merged)
        assert list(read_parts(target)) == merged
