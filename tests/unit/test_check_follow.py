"""A trace that grows is checked as if it were whole, only a moment later."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys

import pytest
from report_trace import synthetic

from grpo_lab.check import Checker, check_records, read_parts
from grpo_lab.check.follow import FIRST_FILE_S, GIVE_UP_S, Follower, await_parts, follow
from grpo_lab.cli import check as check_command
from grpo_lab.cli.main import main
from grpo_lab.errors import TraceError
from grpo_lab.events import Record, RunDeclared, RunEnded, VersionCommitted
from grpo_lab.harness.live_check import SHOWN_PER_RULE, LiveCheck


class Parts:
    """Writes records as their processes would: in order, line by line, cut anywhere."""

    def __init__(self, directory, records):
        self.directory = directory
        self.left = [(record.actor, record.to_line().encode() + b"\n") for record in records]
        self.owed = {}

    def write(self, lines, rng=None):
        """What is owed and the next lines; with ``rng`` each part may lack the end of its last one."""
        new = dict.fromkeys(self.owed, b"")
        for actor, text in self.left[:lines]:
            new[actor] = new.get(actor, b"") + text
        del self.left[:lines]
        for actor, fresh in new.items():
            text = self.owed.get(actor, b"") + fresh
            keep = rng.randrange(min(len(fresh), 30) + 1) if rng else 0
            with (self.directory / f"{actor}.jsonl").open("ab") as file:
                file.write(text[: len(text) - keep])
            self.owed[actor] = text[len(text) - keep :]


def broken_trace(seed=0):
    """A trace in which some version is never committed, and one is committed twice."""
    records, _ = synthetic(seed)
    committed = [index for index, record in enumerate(records) if isinstance(record.event, VersionCommitted)]
    event = dataclasses.replace(records[committed[3]].event, version=2)
    records[committed[3]] = dataclasses.replace(records[committed[3]], event=event)
    last = records[-1]
    if not isinstance(last.event, RunEnded):
        records.append(Record(last.t, "run", 10_000, (), RunEnded("clean", "", 0, 0)))
    return records


def said(violations):
    return sorted((item.rule, item.message) for item in violations)


@pytest.mark.parametrize("seed", range(5))
def test_every_record_is_released_once_and_in_the_finished_traces_order(tmp_path, seed):
    records, _ = synthetic(seed)
    rng = random.Random(seed)
    parts, follower, released = Parts(tmp_path, records), Follower(tmp_path, lag_s=1.0), []
    while parts.left:
        parts.write(rng.randrange(1, 40), rng)
        released += follower.poll()
    assert 0 < len(released) < len(records)
    parts.write(0)
    released += follower.drain()
    assert [record.id for record in released] == [record.id for record in read_parts(tmp_path)]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_seen_at_once_is_what_the_whole_trace_shows(tmp_path, seed):
    records = broken_trace(seed)
    rng = random.Random(seed)
    parts, checker, found_with = Parts(tmp_path, records), Checker(), []

    def pause(_):
        parts.write(rng.randrange(1, 60), rng if len(parts.left) > 60 else None)

    for violation in follow(tmp_path, checker, pause):
        found_with.append((violation, len(parts.left)))
    live = [violation for violation, _ in found_with]
    whole = Checker()
    at_once = [item for record in read_parts(tmp_path) for item in whole.feed(record)]
    assert said(live) == said(at_once)
    assert any(item.rule == "S1" for item in live)
    assert found_with[0][1] > 0, "the first was seen while the trace was still being written"
    assert checker.finish().to_json() == check_records(read_parts(tmp_path)).to_json()


def test_a_cause_that_was_lost_with_its_process_holds_nobody_up_for_long(tmp_path):
    declared = Record(0.0, "run", 0, (), RunDeclared())
    orphan = Record(1.0, "worker", 0, ("engine-0:7",), RunDeclared())
    late = Record(2.0 + GIVE_UP_S, "run", 1, (), RunDeclared())
    later = Record(9.0 + 2 * GIVE_UP_S, "run", 2, (), RunDeclared())
    parts, follower = Parts(tmp_path, [declared, orphan, late, later]), Follower(tmp_path, lag_s=0.5)
    parts.write(2)
    assert [record.id for record in follower.poll()] == ["run:0"]
    parts.write(2)
    assert [record.id for record in follower.poll()] == ["worker:0", "run:1"]
    assert [record.id for record in follower.drain()] == ["run:2"]


def test_damage_is_told_by_file_and_line(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"t": 0.0, "actor": "run", "seq": 0, "kind": "x"}\n{"t": }\n')
    with pytest.raises(TraceError, match=r"run.jsonl, line 2: "):
        list(Follower(tmp_path).poll())


def test_a_violation_is_shown_while_the_run_goes_on(tmp_path):
    records = broken_trace()
    parts, seen = Parts(tmp_path, records), []
    with LiveCheck(tmp_path, seen.append):
        parts.write(len(records))
    assert "S1" in {item.rule for item in seen}
    assert max(sum(item.rule == one.rule for item in seen) for one in seen) <= SHOWN_PER_RULE


def test_live_checking_that_fails_says_why(tmp_path):
    (tmp_path / "run.jsonl").write_text("no record\n")
    with LiveCheck(tmp_path, print) as live:
        pass
    assert "could not be checked while it was written: " in live.failure
    assert "run.jsonl, line 1" in live.failure


@pytest.mark.parametrize("below", ["", "events"])
def test_the_first_event_file_is_waited_for(tmp_path, below):
    directory = tmp_path / below
    waits = []

    def pause(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            directory.mkdir(exist_ok=True)
            (directory / "run.jsonl").touch()

    assert await_parts(tmp_path, pause) == directory
    assert len(waits) == 3


def test_a_run_that_never_begins_is_not_waited_for_for_ever(tmp_path):
    waits = []
    with pytest.raises(TraceError, match=f"no event file came in {FIRST_FILE_S:g} s"):
        await_parts(tmp_path, waits.append)
    assert sum(waits) == FIRST_FILE_S


def test_the_command_says_that_it_waits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check_command, "await_parts", lambda path: await_parts(path, lambda _: None))
    assert main(["check", str(tmp_path), "--follow"]) == 2
    said = capsys.readouterr()
    assert f"waiting up to {FIRST_FILE_S:g} s for the first" in said.out
    assert "no event file came" in said.err


def test_the_command_follows_a_run_to_its_end(tmp_path):
    records = broken_trace()
    (tmp_path / "events").mkdir()
    parts = Parts(tmp_path / "events", records)
    parts.write(len(records) // 2)
    command = [sys.executable, "-m", "grpo_lab.cli.main", "check", str(tmp_path), "--follow"]
    json_file = tmp_path / "check.json"
    process = subprocess.Popen([*command, "--json", str(json_file)], stdout=subprocess.PIPE, text=True)
    try:
        parts.write(len(records))
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "S1" in output
    assert json.loads(json_file.read_text())["violations"] > 0
