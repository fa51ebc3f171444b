"""What the checker says about engines that are fenced, restart, and are taken in again."""

from grpo_lab.check import check_records
from grpo_lab.events import (
    EngineAdmitted,
    EngineFenced,
    EngineProved,
    EngineResumed,
    FaultsEnded,
    MemberStarted,
    Reached,
    Record,
    RunDeclared,
    RunEnded,
    TermBegan,
    VersionCommitted,
    ViewChanged,
)

DECLARED = RunDeclared(
    parameters={"liveness_bound_s": 10.0, "scope": "global"},
    capabilities={name: {"events": True} for name in ("engine-0", "engine-1")},
)
FIRST = EngineAdmitted(engine="engine-0", start="a", term=1)
PROVED = EngineProved(engine="engine-0", term=1, version=1, attempt=1, proof="hash", outcome="holds")
FENCED = EngineFenced(engine="engine-0", reason="refused", term=1, version=2, start="a")


def check(*events, step_s=1.0):
    records = [
        Record(place * step_s, "trainer", place, (), event) for place, event in enumerate((DECLARED, *events))
    ]
    return check_records(records)


def test_a_fenced_engine_must_restart_before_it_is_taken_in_again():
    again = EngineAdmitted(engine="engine-0", start="b", term=1, version=3)
    assert check(FIRST, PROVED, FENCED, again).of("S11").status == "passed"
    assert "S11" in check(FIRST, PROVED, FENCED, FIRST).violated
    assert "S11" not in check(FIRST, FENCED, FIRST).violated, "it never held anything"
    assert "S11" not in check(FIRST, PROVED, FENCED, again, FENCED, again).violated, "nor does its new run"
    assert "S11" in check(FIRST, PROVED, FENCED, EngineResumed(engine="engine-0")).violated


def test_a_new_term_takes_in_whom_it_likes():
    term = TermBegan(term=2, base_version=1, optimizer_step=1)
    assert "S11" not in check(FIRST, PROVED, FENCED, term, FIRST).violated


def commit(version, *members):
    return VersionCommitted(term=1, version=version, attempt=1, view=1, members=members)


def test_an_engine_that_restarted_is_owed_the_next_versions():
    view = ViewChanged(view=1, members=())
    start = MemberStarted(member="engine-0", role="engine", incarnation=2, start="b")
    later = [Reached(mark=str(number)) for number in range(15)]
    assert "L7" in check(view, start, commit(1), *later, RunEnded(outcome="clean")).violated
    # Fenced under its old start: it may come back. Fenced in this very run: not before it restarts again.
    assert "L7" in check(view, start, FENCED, commit(1), FaultsEnded(), *later).violated
    fenced = EngineFenced(engine="engine-0", reason="another plan", term=1, start="b")
    assert "L7" not in check(view, start, fenced, commit(1), *later).violated
    taken_in = EngineAdmitted(engine="engine-0", start="b", term=1)
    assert "L7" in check(view, start, fenced, taken_in, commit(1), *later).violated
