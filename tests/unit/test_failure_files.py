"""Damaged, foreign and absurd failure files, traces and numbers: exit 2, one clear line, no traceback."""

import copy
import json
from pathlib import Path

import pytest

from grpo_lab.cli.main import main
from grpo_lab.errors import ConfigError, TraceError
from grpo_lab.sim.scenario import Failure, Scenario
from grpo_lab.sim.tape import Tape
from grpo_lab.testing.coordinators import load_coordinator
from grpo_lab.testing.failures import load_case

GOOD = {
    "schema": 1,
    "rule": "S1",
    "message": "",
    "event": 3,
    "event_ids": [],
    "protocol": "",
    "faults": [],
    "scenario": {name: value for name, value in Scenario(steps=1).to_json().items() if name != "faults"},
    "tape": {"choices": []},
}
SCOPE = {
    "schema": 1,
    "kind": "scope",
    "rule": "S1",
    "message": "",
    "event": 3,
    "protocol": "",
    "scope": {"engines": 1, "abilities": "full", "canary": True, "fault": None, "interruption": ""},
    "tape": {"choices": [0, 1]},
}


def changed(row, path, value):
    row = copy.deepcopy(row)
    at = row
    *parents, last = path.split(".")
    for name in parents:
        at = at[name]
    at[last] = value
    return json.dumps(row)


BAD = {
    "empty": "",
    "no json": "{",
    "a list": "[]",
    "a number": "1e999",
    "too deep": "[" * 100_000,
    "no schema": "{}",
    "schema of text": changed(GOOD, "schema", "1"),
    "schema 0": changed(GOOD, "schema", 0),
    "schema of the future": changed(GOOD, "schema", 10**30),
    "event is infinite": changed(GOOD, "event", float("inf")),
    "event is text": changed(GOOD, "event", "3"),
    "rule is a list": changed(GOOD, "rule", ["S1"]),
    "seed is text": changed(GOOD, "scenario.seed", "zero"),
    "half an engine": changed(GOOD, "scenario.engines", 1.5),
    "a huge number of engines": changed(GOOD, "scenario.engines", 10**100),
    "an endless step": changed(GOOD, "scenario.step_s", float("inf")),
    "not a number of seconds": changed(GOOD, "scenario.step_s", float("nan")),
    "an unknown field": changed(GOOD, "scenario.moon", 1),
    "scenario is text": changed(GOOD, "scenario", "small"),
    "faults are text": changed(GOOD, "faults", "many"),
    "a fault is text": changed(GOOD, "faults", ["refuse"]),
    "a fault without a target": changed(GOOD, "faults", [{"kind": "refuse"}]),
    "a fault at no call": changed(
        GOOD, "faults", [{"kind": "refuse", "target": "engine-0", "call": "dance"}]
    ),
    "tape is text": changed(GOOD, "tape", "fifo"),
    "a choice is text": changed(GOOD, "tape", {"choices": ["0"]}),
    "a choice is huge": changed(GOOD, "tape", {"choices": [10**100]}),
    "a choice is negative": changed(GOOD, "tape", {"choices": [-1]}),
    "an unknown coordinator": changed(GOOD, "protocol", "nowhere:Nothing"),
    "scope of the future": changed(SCOPE, "schema", 99),
    "scope is text": changed(SCOPE, "scope", "small"),
    "scope with an unknown interruption": changed(SCOPE, "scope.interruption", "lunch"),
    "scope with an odd fault": changed(SCOPE, "scope.fault", {"kind": 3, "target": "engine-0"}),
    "scope with many engines": changed(SCOPE, "scope.engines", 10**9),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_failure_file_is_refused(name, tmp_path, capsys):
    path = tmp_path / "failure.json"
    path.write_text(BAD[name])
    assert main(["replay", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("grpo-lab replay: ")
    assert "Traceback" not in said


def test_a_binary_file_and_a_directory_are_refused(tmp_path, capsys):
    path = tmp_path / "failure.json"
    path.write_bytes(bytes(range(256)))
    for place in (path, tmp_path):
        assert main(["replay", str(place)]) == 2
        assert "no failure file can be read" in capsys.readouterr().err


@pytest.mark.parametrize("row", [GOOD, SCOPE], ids=["cluster", "scope"])
def test_the_good_ones_replay(row, tmp_path, capsys):
    path = tmp_path / "failure.json"
    path.write_text(json.dumps(row))
    assert main(["replay", str(path)]) == 0
    assert "no rule is broken (the file says S1, at event 3)" in capsys.readouterr().out


def test_files_of_the_search_are_read(tmp_path):
    path = tmp_path / "failure.json"
    Failure(Scenario(), Tape([1, 2]), "S1", "words", 7, ("trainer:1",)).save(path)
    assert json.loads(path.read_text()).keys() == GOOD.keys()


@pytest.mark.parametrize(
    "words",
    [
        ["--minutes", "nan"],
        ["--minutes", "inf"],
        ["--minutes", "-1"],
        ["--minutes", "1e300"],
        ["--max-examples", "-5"],
        ["--exhaustive", "--depth", "-1"],
        ["--exhaustive", "--depth", "1000000000"],
        ["--exhaustive", "--cases", "all"],
        ["--coordinator", "a:b:c"],
        ["--coordinator", ":"],
    ],
)
def test_absurd_options_of_fuzz_are_refused(words, capsys):
    assert main(["fuzz", *words]) == 2
    assert capsys.readouterr().err.startswith("grpo-lab fuzz: ")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"t": 1e999, "actor": "a", "seq": 0, "kind": "reached", "mark": "x"}',
        "\x00" * 50,
        "[" * 100_000,
    ],
)
def test_a_damaged_trace_is_refused_or_judged_but_never_crashes(line, tmp_path, capsys):
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n")
    assert main(["check", str(path)]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_with_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    path.write_text('{"schema": 1, "rule": "\\ud800"}')
    with pytest.raises(TraceError, match="no failure file can be read"):
        load_case(path)


def test_a_coordinator_with_a_relative_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="module:Class"):
        load_coordinator("..:x")


def test_a_failure_is_refused_by_name_where_no_directory_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot be written"):
        Failure(Scenario(steps=1), Tape([]), "S1", "", 0).save(tmp_path / "file" / "below" / "S1-1.json")
