"""Whole clusters under drawn delays, faults and schedules: the protocol breaks no rule, planted bugs do."""

import json
import os
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from grpo_lab.cli.main import main
from grpo_lab.errors import ConfigError
from grpo_lab.sim.world import simulate
from grpo_lab.testing.failures import load_case
from grpo_lab.testing.marks import MUST_BE_REACHED, marks_table
from grpo_lab.testing.search import SCENARIOS, load_coordinator, run_once, search
from grpo_lab.testing.strategies import churn, clusters, tapes

QUICK_EXAMPLES, CHURN_EXAMPLES = 80, 15
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
        with capsys.disabled():
            print(f"\nseed {seed}: {state}")  # noqa: T201
        found = [f"{rule}: {failure.message}" for rule, failure in state.found.items()]
        assert not found, "\n".join(found)
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
        ["replay", "/nowhere/failure.json"],
    ],
)
def test_bad_input_is_refused(words, capsys):
    assert main(words) == 2
    assert words[0] in capsys.readouterr().err


def test_a_coordinator_must_be_one():
    with pytest.raises(ConfigError, match="subclass"):
        load_coordinator("json:JSONDecoder")
