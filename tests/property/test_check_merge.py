"""Merging the parts of a trace: causes come first, whatever the clocks say and wherever a part ends."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.check import merge_to, read_parts
from grpo_lab.errors import TraceError
from grpo_lab.events import Reached, Record, parse_id


@st.composite
def histories(draw: st.DrawFn) -> list[Record]:
    """A history of 1 to 5 actors in the order in which it happened, each with a clock of its own.

    Clocks of one actor never run backwards, but may be off by any amount from the others'.
    """
    actors = [f"actor-{index}" for index in range(draw(st.integers(1, 5)))]
    offsets = {actor: draw(st.floats(-100, 100, allow_nan=False)) for actor in actors}
    clocks = dict.fromkeys(actors, 0.0)
    records: list[Record] = []
    seqs = dict.fromkeys(actors, 0)
    for number in range(draw(st.integers(1, 40))):
        actor = draw(st.sampled_from(actors))
        clocks[actor] += draw(st.sampled_from([0.0, 0.001, 1.0]))
        heard = {}
        for other in draw(st.lists(st.sampled_from(actors), max_size=3, unique=True)):
            if other != actor and seqs[other]:
                heard[other] = draw(st.integers(0, seqs[other] - 1))
        cause = tuple(f"{other}:{seq}" for other, seq in sorted(heard.items()))
        records.append(
            Record(
                round(clocks[actor] + offsets[actor], 6), actor, seqs[actor], cause, Reached(mark=str(number))
            )
        )
        seqs[actor] += 1
    return records


def write_parts(records: list[Record], directory: Path) -> None:
    for actor in sorted({record.actor for record in records}):
        lines = [record.to_line() + "\n" for record in records if record.actor == actor]
        (directory / f"{actor}.jsonl").write_text("".join(lines), encoding="utf-8")


def merged(records: list[Record], cut_bytes: dict[str, int] | None = None) -> list[Record]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_parts(records, directory)
        for actor, nbytes in (cut_bytes or {}).items():
            path = directory / f"{actor}.jsonl"
            path.write_bytes(path.read_bytes()[:nbytes])
        return list(read_parts(directory))


def assert_causal(order: list[Record]) -> None:
    """Every actor's own order, and every cause that is there before what it caused."""
    present = {record.id for record in order}
    seen: set[str] = set()
    last: dict[str, int] = {}
    for record in order:
        assert record.seq > last.get(record.actor, -1)
        last[record.actor] = record.seq
        for cause in record.cause:
            actor, seq = parse_id(cause)
            # A cause means: that event and all before it of the same actor.
            earlier = [f"{actor}:{number}" for number in range(seq + 1)]
            missing = [item for item in earlier if item in present and item not in seen]
            assert not missing, f"{record.id} stands before {missing}"
        seen.add(record.id)


@given(histories())
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_and_causes_come_first(records):
    order = merged(records)
    assert sorted(order, key=lambda record: record.id) == sorted(records, key=lambda record: record.id)
    assert_causal(order)


@given(histories(), st.data())
@settings(max_examples=250, deadline=None)
def test_parts_that_end_anywhere_keep_causes_first(records, data):
    """A killed process: its file ends in the middle of a line, its later events are named but missing."""
    victims = data.draw(st.lists(st.sampled_from(sorted({r.actor for r in records})), unique=True))
    sizes = {
        actor: sum(len(r.to_line().encode()) + 1 for r in records if r.actor == actor) for actor in victims
    }
    cuts = {actor: data.draw(st.integers(0, size)) for actor, size in sizes.items()}
    order = merged(records, cuts)
    untouched = [record for record in records if record.actor not in victims]
    assert [r for r in order if r.actor not in victims] or not untouched
    assert {r.id for r in untouched} <= {r.id for r in order}
    assert_causal(order)


@given(histories())
@settings(max_examples=60, deadline=None)
def test_the_order_does_not_depend_on_names_of_files_or_on_who_reads_first(records):
    order = merged(records)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_parts(records, directory)
        target = directory / "merged" / "events.jsonl"
        target.parent.mkdir()
        assert merge_to(directory, target) == len(records)
        assert list(read_parts(target)) == order
        assert [path.name for path in target.parent.iterdir()] == ["events.jsonl"]


@given(histories())
@settings(max_examples=60, deadline=None)
def test_equal_clocks_and_no_causes_merge_by_time(records):
    free = [replace(record, cause=(), t=float(place)) for place, record in enumerate(records)]
    assert merged(free) == free


def write_lines(path: Path, *lines: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def line(t: float, actor: str, seq: int, *cause: str) -> str:
    return Record(t, actor, seq, cause, Reached(mark="m")).to_line() + "\n"


def test_a_cause_of_a_kind_that_nobody_knows_is_waited_for(tmp_path):
    future = '{"t":9.0,"actor":"b","seq":1,"kind":"from_the_future"}\n'
    write_lines(tmp_path / "a.jsonl", line(1.0, "a", 0, "b:1"))
    write_lines(tmp_path / "b.jsonl", line(8.0, "b", 0), future, line(10.0, "b", 2))
    assert [record.id for record in read_parts(tmp_path)] == ["b:0", "a:0", "b:2"]


def test_an_actor_without_a_part_holds_nobody_up(tmp_path):
    write_lines(tmp_path / "a.jsonl", line(1.0, "a", 0, "gone:7"), line(2.0, "a", 1))
    write_lines(tmp_path / "b.jsonl", line(1.5, "b", 0), line(3.0, "b", 1))
    assert [record.id for record in read_parts(tmp_path)] == ["a:0", "b:0", "a:1", "b:1"]


def test_two_events_that_caused_each_other_are_a_damaged_trace(tmp_path):
    write_lines(tmp_path / "a.jsonl", line(1.0, "a", 0, "b:0"))
    write_lines(tmp_path / "b.jsonl", line(1.0, "b", 0, "a:0"))
    with pytest.raises(TraceError, match=r"a:0.*b:0|b:0.*a:0"):
        list(read_parts(tmp_path))


@pytest.mark.parametrize(
    "damage", ["nonsense\n", "[]\n", '{"t":1,"actor":"a","seq":1,"kind":"reached"}\n', "\x00\n"]
)
def test_a_damaged_line_is_named_with_its_file_and_number(tmp_path, damage):
    write_lines(tmp_path / "a.jsonl", line(1.0, "a", 0), damage, line(2.0, "a", 2))
    with pytest.raises(TraceError, match=r"a\.jsonl, line 2"):
        list(read_parts(tmp_path))


def test_an_unfinished_last_line_is_forgiven(tmp_path):
    write_lines(tmp_path / "a.jsonl", line(1.0, "a", 0), line(2.0, "a", 1)[:-20])
    assert [record.id for record in read_parts(tmp_path)] == ["a:0"]


def test_a_part_whose_numbers_fall_is_damaged(tmp_path):
    write_lines(tmp_path / "a.jsonl", line(1.0, "a", 1), line(2.0, "a", 0))
    with pytest.raises(TraceError, match=r"a\.jsonl, line 2"):
        list(read_parts(tmp_path))


def test_nothing_to_read_says_what_to_name(tmp_path):
    with pytest.raises(TraceError, match=r"events\.jsonl"):
        list(read_parts(tmp_path))
    with pytest.raises(TraceError, match="no such"):
        list(read_parts(tmp_path / "absent"))
