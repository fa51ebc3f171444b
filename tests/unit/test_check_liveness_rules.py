"""L1 - L10: what never happens, what happens in time, and what faults and early ends excuse."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_trace import RolloutTrace
from trace_builder import Trace, declared

from grpo_lab.events import (
    EngineFenced,
    EnginePaused,
    EngineResumed,
    Event,
    FaultInjected,
    FaultsEnded,
    GroupScored,
    Heartbeat,
    MemberDied,
    MemberStarted,
    MemberStopped,
    PhaseAgreed,
    Reached,
    RequestAdmitted,
    RequestFinished,
    RunEnded,
    StepPlanned,
    SyncAborted,
    SyncBegan,
    SyncEnded,
    TermBegan,
    TrainerStarved,
    VersionCommitted,
    ViewChanged,
    WeightsActivated,
)

SYNC: dict[str, Any] = {"term": 1, "version": 1, "attempt": 1, "view": 1}
BOUND_S = 10.0


def trace(*items: tuple[float, str, Event], **parameters: Any) -> Trace:
    """Events as (time, actor, event), under a bound of ten seconds."""
    made = Trace(declared(liveness_bound_s=BOUND_S, heartbeat_stale_after_s=5.0, **parameters))
    for t, actor, event in items:
        made.emit(actor, event, t=t)
    return made


def liveness(made: Trace) -> set[str]:
    """Violated liveness rules; these hand-written scraps of traces may break others."""
    return {rule for rule in made.violated() if rule.startswith("L")}


def later(t: float) -> tuple[float, str, Event]:
    return (t, "run", Reached(mark="later"))


def ended(t: float, outcome: str = "failed") -> tuple[float, str, Event]:
    return (t, "run", RunEnded(outcome=outcome))


BEGAN = (1.0, "trainer", SyncBegan(**SYNC, members=("engine-0",)))
COMMITTED = (2.0, "trainer", VersionCommitted(**SYNC, members=("engine-0",)))
SYNC_ENDED = (3.0, "trainer", SyncEnded(term=1, version=1, outcome="committed"))
ACTIVATED = (
    3.5,
    "engine-0",
    WeightsActivated(engine="engine-0", term=1, version=1, first_step=0),
)
PAUSED = (1.0, "engine-0", EnginePaused(engine="engine-0", mode="keep", clear_cache=True))
RESUMED = (2.0, "engine-0", EngineResumed(engine="engine-0"))
ENGINE_STARTED = (0.5, "run", MemberStarted(member="engine-0", role="engine"))
ENGINE_DIED = (1.5, "run", MemberDied(member="engine-0"))
STARVED = (1.0, "trainer", TrainerStarved(term=1, optimizer_step=0, have_groups=0, need_groups=1))
PLANNED = (2.0, "trainer", StepPlanned(term=1, optimizer_step=0, version=1, groups=()))
ADMITTED = (
    1.0,
    "engine-0",
    RequestAdmitted(
        engine="engine-0", request="r", request_kind="rollout", prompt_tokens=1, weight_version=1
    ),
)
FINISHED = (
    2.0,
    "engine-0",
    RequestFinished(engine="engine-0", request="r", finish_reason="stop", tokens=1),
)

# rule, what opens the obligation, what meets it, what excuses it
CASES = [
    ("L1", [COMMITTED], ACTIVATED, (3.0, "run", MemberDied(member="engine-0"))),
    ("L2", [PAUSED], RESUMED, (3.0, "trainer", EngineFenced(engine="engine-0", reason="x"))),
    ("L5", [STARVED], PLANNED, (3.0, "run", MemberDied(member="engine-0"))),
    ("L6", [ADMITTED], FINISHED, (3.0, "run", MemberDied(member="engine-0"))),
    ("L7", [ENGINE_STARTED, COMMITTED], ACTIVATED, (3.0, "run", MemberDied(member="engine-0"))),
]
FOLLOWERS = {"L7": {"L1", "L7"}}  # an engine that never serves never activates the version either


@pytest.mark.parametrize(("rule", "opened", "met", "excuse"), CASES)
class TestObligation:
    def test_overdue(self, rule: str, opened: list[Any], met: Any, excuse: Any) -> None:
        made = trace(*opened, later(13.0))
        assert liveness(made) == FOLLOWERS.get(rule, {rule})
        assert "bound 10 s" in made.check().of(rule).violations[0].message

    def test_met_in_time(self, rule: str, opened: list[Any], met: Any, excuse: Any) -> None:
        made = trace(*opened, met, later(30.0))
        assert liveness(made) == set()
        assert made.evaluated(rule) >= 1

    def test_met_too_late(self, rule: str, opened: list[Any], met: Any, excuse: Any) -> None:
        assert rule in liveness(trace(*opened, (13.5, *met[1:])))

    def test_still_within_its_bound(self, rule: str, opened: list[Any], met: Any, excuse: Any) -> None:
        made = trace(*opened, later(9.0))
        assert liveness(made) == set()
        assert made.check().of(rule).status == "vacuous"

    def test_the_run_ends_early(self, rule: str, opened: list[Any], met: Any, excuse: Any) -> None:
        assert liveness(trace(*opened, ended(9.0), later(60.0))) == set()

    def test_excused(self, rule: str, opened: list[Any], met: Any, excuse: Any) -> None:
        assert liveness(trace(*opened, excuse, later(60.0))) == set()

    def test_time_stands_still_under_faults(
        self, rule: str, opened: list[Any], met: Any, excuse: Any
    ) -> None:
        fault = (0.1, "run", FaultInjected(fault="delay"))
        assert liveness(trace(fault, *opened, later(60.0))) == set()
        calm = (60.0, "run", FaultsEnded())
        assert liveness(trace(fault, *opened, calm, later(69.0))) == set()
        assert rule in liveness(trace(fault, *opened, calm, later(71.0)))


def test_not_evaluable_without_a_bound() -> None:
    made = Trace()
    del made.records[0].event.parameters["liveness_bound_s"]  # type: ignore[attr-defined]
    results = made.check()
    assert {rule.status for rule in results.rules if rule.id in ("L1", "L2", "L3", "L5", "L6", "L7")} == {
        "not evaluable"
    }


# ---- syncs ------------------------------------------------------------------------------------------


def test_l3_a_sync_that_never_ends_commits_nothing_either() -> None:
    assert liveness(trace(BEGAN, later(13.0))) == {"L1", "L3"}
    assert liveness(trace(BEGAN, COMMITTED, ACTIVATED, later(13.0))) == {"L3"}
    good = trace(BEGAN, COMMITTED, SYNC_ENDED, ACTIVATED, later(60.0))
    assert liveness(good) == set()
    assert good.evaluated("L3") == 1


def test_l1_syncs_that_are_given_up_again_and_again() -> None:
    given_up = SyncAborted(term=1, version=1, attempt=3, reason="x", final=True)
    made = trace(BEGAN, (5.0, "trainer", given_up), (6.0, *BEGAN[1:]), (11.5, "trainer", given_up))
    assert liveness(made) == {"L1"}


def test_l3_a_dead_engine_stays_in_the_view() -> None:
    view = ViewChanged(view=2, members=())
    made = trace(BEGAN, ENGINE_DIED, COMMITTED, SYNC_ENDED, later(13.0))
    assert liveness(made) == {"L3", "L1"}
    assert "still in the view" in made.check().of("L3").violations[0].message
    evicted = trace(BEGAN, ENGINE_DIED, (1.8, "trainer", view), COMMITTED, SYNC_ENDED, later(60.0))
    assert "L3" not in liveness(evicted)


# ---- L4 ---------------------------------------------------------------------------------------------


def beats(progress: list[int], every_s: float = 4.0) -> list[tuple[float, str, Event]]:
    return [
        (1.0 + index * every_s, "worker", Heartbeat(member="worker", progress=value))
        for index, value in enumerate(progress)
    ]


def test_l4_heartbeats_on_time() -> None:
    made = trace(*beats([0, 1, 2, 3]))
    assert liveness(made) == set()
    assert made.evaluated("L4") == 3
    assert trace().check().of("L4").status == "vacuous"


def test_l4_a_heartbeat_is_late_or_stays_away() -> None:
    assert liveness(trace(*beats([0, 1], every_s=6.0))) == {"L4"}
    assert liveness(trace(*beats([0, 1]), later(11.0))) == {"L4"}
    stopped = (6.0, "trainer", MemberStopped(member="worker"))
    assert liveness(trace(*beats([0, 1]), stopped, later(60.0))) == set()


def test_l4_a_fresh_heartbeat_without_progress_while_the_trainer_waits() -> None:
    """The trainer starves with it: both see a worker that lives and does nothing."""
    assert liveness(trace(STARVED, *beats([7, 7, 7, 7]))) == {"L4", "L5"}
    assert "no progress (count 7)" in str(trace(STARVED, *beats([7] * 4)).check().of("L4").violations)
    assert liveness(trace(*beats([7, 7, 7, 7]))) == set()
    assert liveness(trace(STARVED, PLANNED, *beats([7, 7, 7, 7]))) == set()


# ---- prompts, ends, ranks ---------------------------------------------------------------------------


def test_l8_a_group_is_neither_trained_on_nor_dropped() -> None:
    """Capacity 4 and a bound of 1: due after 4 + 3 + 1 steps."""

    def run(steps: int) -> RolloutTrace:
        made = RolloutTrace(max_staleness=1, staleness_policy="freshest").begin().commit(1, step=0)
        made.admit(0, 1).dispatch(0, 1).complete(0, 1).enqueue(0).take(0)
        for step in range(steps):
            made.generate(step + 1, version=step + 1)
            made.train(step + 1, step=step, version=step + 1, first=step + 1)
            made.commit(step + 2, step=step + 1)
        return made

    assert run(8).violated() == set()
    assert run(8).evaluated("L8") == 17  # nine groups queued, eight trained on
    assert run(9).violated() == {"L8"}


def test_l8_everything_is_stale_for_ever() -> None:
    """Four in the queue, four in flight and one with the trainer can have been too old; the tenth cannot."""
    made = RolloutTrace().begin().commit(1, step=0)
    for number in range(9):
        made.admit(number, 1).drop(number, "stale")
    assert made.violated() == set()
    assert made.admit(9, 1).drop(9, "stale").violated() == {"L8"}


def test_l8_a_reward_that_never_comes() -> None:
    def run() -> RolloutTrace:
        return RolloutTrace(liveness_bound_s=10.0).begin().commit(1, step=0).admit(0, 1).dispatch(0, 1)

    late = run().complete(0, 1)
    late.emit("run", Reached(mark="later"), t=40.0)
    assert late.violated() == {"L8"}
    good = run().complete(0, 1)
    good.emit("worker", GroupScored(term=1, group="t1.g0", rewards=(1.0, 0.0)))
    good.emit("run", Reached(mark="later"), t=40.0)
    assert good.violated() == set()


def test_l9_a_member_is_left_behind() -> None:
    started = (1.0, "trainer", MemberStarted(member="worker", role="worker"))
    stopped = (2.0, "trainer", MemberStopped(member="worker"))
    assert liveness(trace(started, ended(3.0, "clean"))) == {"L9"}
    assert liveness(trace(started, ended(3.0, "interrupted"))) == set()
    good = trace(started, stopped, ended(3.0, "clean"))
    assert liveness(good) == set()
    assert good.evaluated("L9") == 1
    assert trace(ended(3.0, "clean")).check().of("L9").status == "vacuous"


def agreed(t: float, rank: int, ok: bool, phase: str = "transfer") -> tuple[float, str, Event]:
    event = PhaseAgreed(phase=phase, rank=rank, ok=ok, detail="boom", term=1, version=1, attempt=1)
    return (t, f"trainer-r{rank}", event)


def test_l10_ranks_take_different_paths() -> None:
    assert liveness(trace(agreed(1.0, 0, True), agreed(1.1, 1, False))) == {"L10"}
    good = trace(agreed(1.0, 0, False), agreed(1.1, 1, False), agreed(1.2, 2, False), later(60.0))
    assert liveness(good) == set()
    assert good.evaluated("L10") == 3


def test_l10_a_failure_that_another_rank_never_hears_of() -> None:
    first = (agreed(1.0, 0, True, "pause"), agreed(1.1, 1, True, "pause"))
    assert liveness(trace(*first, agreed(2.0, 0, False), later(13.0))) == {"L10"}
    assert liveness(trace(*first, agreed(2.0, 0, False), agreed(2.1, 1, False), later(13.0))) == set()


def test_l10_a_rank_that_died_with_its_term_says_no_more() -> None:
    first = (agreed(1.0, 0, True, "pause"), agreed(1.1, 1, True, "pause"), agreed(2.0, 0, True))
    same, next_one = (
        (3.0, "trainer", TermBegan(term=term, base_version=0, optimizer_step=0)) for term in (1, 2)
    )
    assert "L10" in liveness(trace(*first, same, later(13.0)))
    assert "L10" not in liveness(trace(*first, next_one, later(13.0)))
