"""All schedules of small scopes: no rule is broken, every transition of the coordinator is taken."""

import json

import pytest
from planted_scopes import LeavesTheTable, ReadsBesideTheWrite

from grpo_lab.cli import fuzz_exhaustive
from grpo_lab.cli.main import main
from grpo_lab.errors import InvariantViolation, TraceError
from grpo_lab.events import Record, StateChanged
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import Fault
from grpo_lab.testing.coverage import TRANSITIONS, Coverage
from grpo_lab.testing.exhaustive import explore_scopes, paired_scopes, quick_scopes, run_once, single_scopes
from grpo_lab.testing.failures import load_case
from grpo_lab.testing.scopes import INTERRUPTIONS, LATER_CANCELS, Scope, run_scope
from grpo_lab.types import SyncState


def words_of(report):
    return f"{report}\n" + "\n".join(f"{item.scope}: {item.tape}: {item.message}" for item in report.failures)


@pytest.mark.timeout(600)
def test_every_transition_is_taken_and_no_rule_is_broken():
    report = explore_scopes(quick_scopes(), depth=0)
    assert report.failures == [], words_of(report)
    assert report.coverage.missing == []
    assert report.coverage.states_missing == []
    assert "10 of 10 states, 31 of 31 transitions, 0 undeclared" in str(report)


@pytest.mark.parametrize(("engines", "depth"), [(1, 5), (2, 3)])
def test_all_schedules_of_the_first_decisions(engines, depth):
    scopes = [Scope(engines), Scope(engines, fault=Fault("lose_reply", "engine-0", "finish_update", 2))]
    report = explore_scopes(scopes, depth=depth)
    assert report.complete
    assert report.failures == [], words_of(report)
    assert report.longest == depth
    assert report.schedules >= 2 * 2**depth


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("engines", [1, 2])
def test_all_schedules_of_all_single_faults(engines, capsys):
    report = explore_scopes(single_scopes((engines,)), depth=2)
    with capsys.disabled():
        print(f"\n{engines} engines: {report}")  # noqa: T201
    assert report.failures == [], words_of(report)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("engines", [1, 2])
def test_every_fault_with_every_interruption(engines, capsys):
    report = explore_scopes(paired_scopes((engines,)), depth=0)
    with capsys.disabled():
        print(f"\n{engines} engines: {report}")  # noqa: T201
    assert report.failures == [], words_of(report)


def test_a_scope_runs_the_same_twice_and_says_what_it_came_to():
    scope = Scope(2, fault=Fault("crash_before", "engine-1", "update", 2))
    first, again = run_scope(scope), run_scope(scope)
    assert first.digest == again.digest
    assert (first.value.committed, first.value.struck) == (3, 1)
    assert Scope.from_json(scope.to_json()) == scope
    assert str(scope) == "2 engines, full, crash_before at update 2 of engine-1"


def test_a_transition_that_is_in_no_table_is_a_failure():
    with pytest.raises(InvariantViolation, match="loaded -> paused is in no table"):
        run_scope(Scope(), parts=Parts(coordinator=LeavesTheTable))


def test_coverage_counts_and_compares():
    coverage = Coverage()
    changes = [("running", "pausing"), ("running", "pausing"), ("fenced", "loaded")]
    coverage.add(
        Record(
            0.0, "trainer", seq, (), StateChanged(term=1, version=1, attempt=1, before=before, after=after)
        )
        for seq, (before, after) in enumerate(changes)
    )
    assert coverage.edges[SyncState.RUNNING, SyncState.PAUSING] == 2
    assert coverage.undeclared == [(SyncState.FENCED, SyncState.LOADED)]
    assert len(coverage.missing) == len(TRANSITIONS) - 1
    assert str(coverage) == f"2 of 10 states, 1 of {len(TRANSITIONS)} transitions, 1 undeclared"


def test_a_planted_bug_is_found_saved_and_replayed(tmp_path, capsys, monkeypatch):
    name = "planted_scopes:CountsAttempts"
    monkeypatch.setattr(fuzz_exhaustive, "CASES", {"quick": lambda: quick_scopes((1,))[::20]})
    words = ["fuzz", "--exhaustive", "--depth", "0", "--cases", "quick"]
    assert main([*words, "--out", str(tmp_path), "--coordinator", name]) == 1
    said = capsys.readouterr().out
    assert "Transitions of the coordinator" in said
    (path, *_) = sorted(tmp_path.glob("*.json"))
    case = load_case(path)
    assert case.protocol == name
    assert run_once(case.failure.scope, case.failure.tape) is None, "the protocol's own coordinator is right"

    page = tmp_path / "page.html"
    assert main(["replay", str(path), "--html", str(page)]) == 1
    said = capsys.readouterr().out
    assert f"{case.failure.rule} at event {case.failure.event}" in said
    assert "exactly as in the file" in said
    assert "<html" in page.read_text()


def test_a_race_that_first_in_first_out_never_shows_is_found_saved_and_replayed(
    tmp_path, capsys, monkeypatch
):
    name = "planted_scopes:ReadsBesideTheWrite"
    racing = Parts(coordinator=ReadsBesideTheWrite)
    assert explore_scopes([Scope(), Scope(2)], depth=0, parts=racing).failures == []

    monkeypatch.setattr(fuzz_exhaustive, "CASES", {"quick": lambda: [Scope()]})
    words = ["fuzz", "--exhaustive", "--depth", "4", "--cases", "quick"]
    assert main([*words, "--out", str(tmp_path), "--coordinator", name]) == 1
    (path,) = tmp_path.glob("*.json")
    case = load_case(path)
    assert case.failure.rule == "S1"
    assert sum(1 for choice in case.failure.tape.choices if choice) <= 3
    capsys.readouterr()

    traces = []
    for number in range(2):
        trace = tmp_path / f"{number}.jsonl"
        assert main(["replay", str(path), "--html", str(tmp_path / "page.html"), "--trace", str(trace)]) == 1
        assert "exactly as in the file" in capsys.readouterr().out
        traces.append(trace.read_bytes())
    assert traces[0] == traces[1]
    assert "<html" in (tmp_path / "page.html").read_text()
    in_order = json.loads(path.read_text()) | {"tape": {"choices": []}}
    path.write_text(json.dumps(in_order))
    assert main(["replay", str(path)]) == 0


def test_scopes_are_validated():
    with pytest.raises(ValueError, match="interruption='lunch'"):
        Scope(interruption="lunch")
    with pytest.raises(TraceError, match="not a scope"):
        Scope.from_json({"engines": 1})
    assert len(set(quick_scopes())) > 600
    assert {scope.interruption for scope in quick_scopes()} == {*INTERRUPTIONS, *LATER_CANCELS}
