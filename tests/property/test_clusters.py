"""Whole clusters under drawn delays, faults and schedules: the protocol breaks no rule, planted bugs do."""

import dataclasses
import json
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from grpo_lab.cli.main import main
from grpo_lab.errors import ConfigError
from grpo_lab.sim.scenario import Failure
from grpo_lab.sim.tape import Tape, random_tape
from grpo_lab.sim.world import simulate
from grpo_lab.testing.failures import load_case
from grpo_lab.testing.marks import MUST_BE_REACHED, marks_table
from grpo_lab.testing.search import (
    PROMPT,
    SCENARIOS,
    load_coordinator,
    load_parts,
    run_once,
    run_with,
    save_all,
    search,
)
from grpo_lab.testing.strategies import churn, clusters, tapes

QUICK_EXAMPLES, CHURN_EXAMPLES = 80, 15
RACE = "mutant:M44"
NIGHTLY_MINUTES = float(os.environ.get("GRPO_LAB_NIGHTLY_MINUTES", "30"))


@settings(
    max_examples=QUICK_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(clusters(), tapes())
def test_no_cluster_breaks_a_rule(scenario, tape):
    outcome = simulate(scenario, tape).value
    assert outcome.optimizer_steps == scenario.steps
    assert outcome.check.violations == 0


@settings(
    max_examples=CHURN_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(churn(), tapes())
def test_engines_that_die_and_come_back_break_no_rule(scenario, tape):
    outcome = simulate(scenario, tape).value
    assert outcome.optimizer_steps == scenario.steps


@pytest.mark.nightly
@pytest.mark.timeout(60 * NIGHTLY_MINUTES + 900)
def test_a_long_search_breaks_no_rule_and_reaches_everything(capsys):
    """The campaign of ``make nightly``: 30 minutes (GRPO_LAB_NIGHTLY_MINUTES), other cases every time."""
    seed = int(time.time())
    marks: Counter[str] = Counter()
    for cases, share in ((clusters(), 0.75), (churn(), 0.25)):
        state = search(cases, minutes=share * NIGHTLY_MINUTES, first_seed=seed)
        marks.update(state.marks)
        files = save_all(state.found, Path("runs/failures"))
        with capsys.disabled():
            print(f"\nseed {seed}: {state}")  # noqa: T201
        found = [f"{rule}: {failure.message}" for rule, failure in sorted(state.found.items())]
        assert not found, f"replay {files}: " + "\n".join(found)
    with capsys.disabled():
        print(marks_table(marks))  # noqa: T201
    assert MUST_BE_REACHED.keys() - marks.keys() == set()


@pytest.mark.parametrize(
    ("planted", "rules"),
    [
        ("CountsAttempts", {"S1"}),
        pytest.param("ForgetsToResume", {"S32"}, marks=pytest.mark.nightly),
    ],
)
def test_a_planted_bug_is_found_saved_and_replayed(planted, rules, tmp_path, capsys):
    name = f"planted_coordinators:{planted}"
    words = ["--scenario", "faults", "--minutes", "0.5", "--max-examples", "120", "--out", str(tmp_path)]
    assert main(["fuzz", *words, "--coordinator", name]) == 1
    path = min(tmp_path.glob("*.json"), key=lambda item: load_case(item).failure.rule not in rules)
    failure = load_case(path).failure
    assert failure.rule in rules
    assert 1 <= len(failure.scenario.faults) <= 2
    assert sum(1 for choice in failure.tape.choices if choice) <= 5
    capsys.readouterr()

    assert main(["replay", str(path), "--html", str(tmp_path / "page.html")]) == 1
    said = capsys.readouterr().out
    assert f"{failure.rule} at event {failure.event}" in said
    assert "exactly as in the file" in said
    assert "<html" in (tmp_path / "page.html").read_text()

    again = run_once(failure.scenario, failure.tape, load_coordinator(name), name)
    assert again.event_ids == failure.event_ids
    correct = json.loads(path.read_text()) | {"protocol": ""}
    path.write_text(json.dumps(correct))
    assert main(["replay", str(path), "--until", "3"]) == 0
    assert "no rule is broken" in capsys.readouterr().out


def test_a_race_that_first_in_first_out_never_shows_is_found_made_small_and_replayed(tmp_path, capsys):
    """M44: a pause waits as long as a step takes. Both are due at the same time, and the step was first."""
    racing = load_parts(RACE)
    for engines in (1, 2):
        simulate(dataclasses.replace(PROMPT, engines=engines), parts=racing)

    words = ["--scenario", "schedules", "--max-examples", "30", "--minutes", "2", "--out", str(tmp_path)]
    assert main(["fuzz", *words, "--coordinator", RACE]) == 1
    said = capsys.readouterr().out
    counts = re.search(r"(\d+) of its (\d+) choices were not first in, first out; (\d+) of (\d+) after", said)
    assert counts is not None, said
    before, _, after, _ = map(int, counts.groups())
    (path,) = tmp_path.glob("*.json")
    failure = load_case(path).failure
    assert failure.rule in {"S16", "S7"}
    assert 1 <= after <= 5 < before
    assert failure.tape.unusual == after

    traces = []
    for number in range(2):
        trace = tmp_path / f"{number}.jsonl"
        assert main(["replay", str(path), "--trace", str(trace)]) == 1
        assert "exactly as in the file" in capsys.readouterr().out
        traces.append(trace.read_bytes())
    assert traces[0] == traces[1]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tape": {"choices": []}}))
    assert main(["replay", str(path)]) == 0


def test_a_replayed_failure_can_be_made_small(tmp_path, capsys):
    large, small = tmp_path / "large.json", tmp_path / "small.json"
    scenario = dataclasses.replace(PROMPT, engines=1, steps=3)
    tried = (run_with(scenario, random_tape(seed, 3000), load_parts(RACE), RACE) for seed in range(100))
    failure = next(failure for failure in tried if failure is not None)
    failure.save(large)
    assert main(["replay", str(large), "--shrink", str(small)]) == 1
    said = capsys.readouterr().out
    assert f"{failure.tape.unusual} of {len(failure.tape.choices)}; now " in said
    assert "exactly as in the file" in said
    shrunk = load_case(small).failure
    assert shrunk.rule == failure.rule
    assert 1 <= shrunk.tape.unusual <= 5 < failure.tape.unusual


@pytest.mark.parametrize(
    "words",
    [["--shrink-runs", "7"], ["--shrink", "/nowhere/x.json"], ["--shrink", "x", "--shrink-runs", "0"]],
)
def test_replay_refuses_what_it_would_ignore_or_cannot_write(words, tmp_path, capsys):
    path = tmp_path / "failure.json"
    Failure(PROMPT, Tape(), "S1").save(path)
    assert main(["replay", str(path), *words]) == 2
    assert "expected" in capsys.readouterr().err


def test_named_searches_run(capsys):
    for name in SCENARIOS:
        assert main(["fuzz", "--scenario", name, "--minutes", "1", "--max-examples", "3"]) == 0
    assert "0 rules broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["fuzz", "--scenario", "moon"],
        ["fuzz", "--minutes", "0"],
        ["fuzz", "--max-examples", "0"],
        ["fuzz", "--coordinator", "nowhere:Nothing"],
        ["fuzz", "--coordinator", "json:dumps"],
        ["fuzz", "--depth", "2"],
        ["fuzz", "--cases", "quick"],
        ["fuzz", "--exhaustive", "--cases", "moon"],
        ["fuzz", "--exhaustive", "--scenario", "churn"],
        ["fuzz", "--exhaustive", "--seed", "1"],
        ["fuzz", "--out", "/proc/version"],
        ["replay", "/nowhere/failure.json"],
    ],
)
def test_bad_input_is_refused(words, capsys):
    assert main(words) == 2
    assert words[0] in capsys.readouterr().err


def test_a_coordinator_must_be_one():
    with pytest.raises(ConfigError, match="subclass"):
        load_coordinator("json:JSONDecoder")
