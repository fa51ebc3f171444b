"""Rules about versions, terms and syncs: what each catches, and on what it stays silent."""

from __future__ import annotations

import pytest
from sync_trace import SyncTrace
from trace_builder import Trace, declared

from grpo_lab import events as ev

TWO = ("engine-0", "engine-1")


def two_syncs(**parameters: object) -> SyncTrace:
    trace = SyncTrace(**parameters)  # type: ignore[arg-type]
    trace.sync(1)
    trace.step()
    trace.sync(2)
    trace.step()
    return trace


def test_a_clean_run_breaks_nothing_and_puts_the_rules_to_the_test() -> None:
    trace = two_syncs()
    trace.run_ended()
    result = trace.check()
    assert result.violations == 0
    for rule in ("S1", "S2", "S3", "S6", "S11", "S13", "S32"):
        assert result.of(rule).evaluations > 0, rule


def test_an_empty_run_is_vacuous() -> None:
    result = Trace(declared()).check()
    for rule in ("S1", "S2", "S3", "S6", "S11", "S12", "S13", "S15", "S32"):
        assert result.of(rule).status == "vacuous", rule


# -- S1 ------------------------------------------------------------------------------------------------


def test_s1_a_version_is_skipped() -> None:
    trace = two_syncs()
    trace.sync(4)
    assert trace.violated() == {"S1"}


def test_s1_a_version_is_announced_without_a_commit() -> None:
    trace = two_syncs()
    trace.emit("trainer", ev.VersionAnnounced(term=1, version=2))
    assert trace.violated() == set()
    trace.emit("trainer", ev.VersionAnnounced(term=1, version=3))
    assert trace.violated() == {"S1"}


def test_s1_a_step_is_planned_under_a_version_that_only_a_counter_knows() -> None:
    trace = two_syncs()
    trace.emit("trainer", ev.StepPlanned(term=1, optimizer_step=2, version=3, groups=()))
    assert "S1" in trace.violated()


@pytest.mark.parametrize(
    ("base", "step", "checkpoint", "broken"),
    [(2, 5, "", set()), (0, 5, "", {"S1"}), (0, 0, "", set())],
)
def test_s1_a_new_term_goes_on_from_the_committed_version(
    base: int, step: int, checkpoint: str, broken: set[str]
) -> None:
    trace = two_syncs()
    trace.begin_term(2, base_version=base, optimizer_step=step, checkpoint=checkpoint)
    trace.sync(base + 1)
    assert trace.violated() & {"S1", "S2", "S3", "S12"} == broken


# -- S2 ------------------------------------------------------------------------------------------------


def test_s2_the_active_version_falls() -> None:
    trace = two_syncs()
    trace.emit("run", ev.FaultInjected(fault="planned"))
    trace.emit("engine-0", ev.EnginePaused(engine="engine-0", mode="keep", clear_cache=True))
    trace.activate("engine-0", 1)
    assert trace.violated() == {"S2"}


def restarted(synced: bool, kind: str) -> SyncTrace:
    trace = two_syncs()
    trace.emit("run", ev.MemberDied(member="engine-0", detail="planned"))
    trace.emit("run", ev.MemberStarted(member="engine-0", role="engine", incarnation=2))
    trace.active["engine-0"] = (0, 0)
    trace.handshake("engine-0")
    if synced:
        trace.sync(3)
    trace.admit("r", request_kind=kind)
    trace.step()
    return trace


def test_s2_a_restarted_engine_serves_rollouts_before_it_is_activated() -> None:
    # S31 looks at the request, S2 at the step.
    assert restarted(synced=False, kind="rollout").violated() == {"S2", "S31"}


def test_s2_a_restarted_engine_serves_after_its_sync_and_answers_canaries_before() -> None:
    assert restarted(synced=True, kind="rollout").violated() == set()
    assert restarted(synced=False, kind="canary").violated() == set()


@pytest.mark.parametrize(("proved", "broken"), [(False, True), (True, False)])
def test_s2_a_restarted_engine_without_events_is_seen_through_its_samples(proved: bool, broken: bool) -> None:
    trace = SyncTrace(without=("events",))
    trace.sync(1)
    trace.emit("run", ev.MemberDied(member="engine-0"))
    trace.emit("run", ev.MemberStarted(member="engine-0", role="engine", incarnation=2))
    if proved:
        trace.prove("engine-0", 1)
    where = {"term": 1, "sample": "s", "group": "g", "engine": "engine-0"}
    trace.emit("worker", ev.SampleDispatched(**where, version=1, request="s"))
    done = ev.SampleCompleted(**where, finish_reason="stop", tokens=2, logprobs=2, logprobs_finite=True)
    trace.emit("worker", done)
    assert ("S2" in trace.violated()) is broken


# -- S3 ------------------------------------------------------------------------------------------------


def test_s3_an_engine_loads_what_nobody_published() -> None:
    trace = two_syncs()
    trace.load("engine-0", 3)
    assert trace.violated() == {"S3"}


@pytest.mark.parametrize("committed", [True, False])
def test_s3_an_engine_serves_a_version_before_its_commit(committed: bool) -> None:
    trace = two_syncs()
    trace.begin(3)
    trace.pause("engine-0", 3)
    trace.transfer(3)
    if committed:
        trace.commit(3)
    trace.resume("engine-0", 3)
    trace.step()
    assert trace.violated() == (set() if committed else {"S3"})


def test_s3_probation_is_exempt() -> None:
    trace = two_syncs()
    trace.begin(3)
    trace.pause("engine-0", 3)
    trace.transfer(3)
    place = {"term": 1, "version": 3, "attempt": 1}
    trace.emit("trainer", ev.StateChanged(**place, before="loaded", after="probation"))
    trace.resume("engine-0", 3)
    trace.step()
    trace.commit(3)
    trace.emit("trainer", ev.StateChanged(**place, before="probation", after="running"))
    trace.step()
    trace.end(3)
    assert trace.violated() == set()


@pytest.mark.parametrize(("late", "broken"), [(1, set()), (2, {"S3"})])
def test_s3_rolling_engines_are_at_most_one_version_apart(late: int, broken: set[str]) -> None:
    trace = SyncTrace(TWO, scope="rolling")
    trace.sync(1)
    for version in range(2, 2 + late):
        trace.pack(version)
        trace.publish(version)
        trace.pause("engine-0", version)
        trace.update("engine-0", version)
        trace.resume("engine-0", version)
    assert trace.violated() == broken


# -- S6 ------------------------------------------------------------------------------------------------


def sync_with(trace: SyncTrace, version: int, **received: int) -> None:
    """A whole sync in which the last bucket arrives as ``received`` says."""
    trace.begin(version)
    trace.pause("engine-0", version)
    trace.pack(version)
    trace.publish(version)
    trace.start("engine-0", version)
    trace.receive("engine-0", version, 0)
    trace.receive("engine-0", version, 1, **received)
    trace.load("engine-0", version)
    trace.activate("engine-0", version)
    trace.prove("engine-0", version)
    trace.commit(version)
    trace.resume("engine-0", version)
    trace.end(version)


@pytest.mark.parametrize(
    ("received", "broken"),
    [({}, set()), ({"hash64": 5, "expected_hash64": 5}, {"S6"}), ({"hash64": 5}, {"S6"})],
)
def test_s6_the_bytes_that_landed_are_not_the_published_ones(
    received: dict[str, int], broken: set[str]
) -> None:
    trace = two_syncs()
    sync_with(trace, 3, **received)
    assert trace.violated() == broken


@pytest.mark.parametrize(("other", "broken"), [("weights 1", set()), ("else", {"S6"})])
def test_s6_two_engines_hold_different_weights_under_one_version(other: str, broken: set[str]) -> None:
    trace = SyncTrace(TWO)
    trace.begin(1)
    for engine in TWO:
        trace.pause(engine, 1)
    trace.pack(1)
    trace.publish(1)
    for engine, weights_hash in zip(TWO, ("weights 1", other), strict=True):
        trace.start(engine, 1)
        for bucket in range(2):
            trace.receive(engine, 1, bucket)
        trace.load(engine, 1, weights_hash)
        trace.activate(engine, 1)
        trace.prove(engine, 1)
    trace.commit(1)
    for engine in TWO:
        trace.resume(engine, 1)
    trace.end(1)
    assert trace.violated() == broken


@pytest.mark.parametrize(
    ("first", "final", "broken"), [(None, False, set()), ((1, 2), False, {"S6"}), ((1, 2), True, set())]
)
def test_s6_a_retry_publishes_other_weights(
    first: tuple[int, ...] | None, final: bool, broken: set[str]
) -> None:
    trace = two_syncs()
    trace.begin(3)
    trace.pause("engine-0", 3)
    trace.pack(3)
    trace.publish(3, first)
    trace.abort(3, final=final)
    trace.attempt = 2
    trace.transfer(3)
    trace.commit(3)
    trace.resume("engine-0", 3)
    trace.end(3)
    assert trace.violated() == broken


@pytest.mark.parametrize("then", ["commit", "resume", "end", "fence", "retry"])
def test_s6_a_failed_canary_is_followed_by_service(then: str) -> None:
    trace = SyncTrace(TWO)
    trace.sync(1)
    trace.begin(2)
    for engine in TWO:
        trace.pause(engine, 2)
    trace.transfer(2)
    numbers = {"gap": 0.5, "separation": 1.0, "tolerance": 1e-3}
    trace.prove("engine-0", 2, "canary", "fails", **numbers)
    if then == "fence":
        trace.fence("engine-0")
    elif then == "retry":
        trace.prove("engine-0", 2, "canary", "holds", gap=0.0, separation=1.0, tolerance=1e-3)
    if then == "commit":
        trace.commit(2)
        assert trace.violated() == {"S6", "S11"}
        return
    if then == "resume":
        trace.acknowledge("engine-0", "resume", 2)
        assert trace.violated() == {"S6"}
        return
    if then == "end":
        trace.end(2, "aborted")
        assert trace.violated() == {"S6", "S32"}
        return
    trace.commit(2)
    for engine in trace.engines:
        trace.resume(engine, 2)
    trace.end(2)
    assert trace.violated() == set()


@pytest.mark.parametrize(
    ("gap", "separation", "outcome", "broken"),
    [
        (1e-4, 1e-2, "holds", set()),
        (1e-4, 1e-3, "inconclusive", set()),
        (1e-4, None, "inconclusive", set()),
        (1e-4, 1e-3, "holds", {"S6"}),
        (1e-2, 1e-1, "holds", {"S6"}),
        (float("nan"), 1.0, "inconclusive", {"S6"}),
    ],
)
def test_s6_a_canarys_verdict_follows_from_its_numbers(
    gap: float, separation: float | None, outcome: str, broken: set[str]
) -> None:
    trace = two_syncs()
    trace.prove("engine-0", 2, "canary", outcome, gap=gap, separation=separation, tolerance=1e-3)
    assert trace.violated() == broken


# -- S12 -----------------------------------------------------------------------------------------------


def second_term() -> SyncTrace:
    trace = two_syncs()
    trace.begin_term(2, base_version=2)
    trace.sync(3)
    return trace


def test_s12_an_engine_obeys_an_older_term() -> None:
    trace = second_term()
    assert (trace.violated(), trace.evaluated("S12") > 0) == (set(), True)
    trace.emit("engine-0", ev.EngineResumed(engine="engine-0", term=1))
    assert trace.violated() == {"S12"}


def test_s12_an_engine_takes_a_request_of_an_older_term() -> None:
    trace = second_term()
    trace.admit("new", request_term=2)
    trace.emit("engine-0", ev.RequestRefused(engine="engine-0", request="old", status=409, term=1))
    assert trace.violated() == set()
    trace.admit("old", request_term=1)
    assert trace.violated() == {"S12"}


def test_s12_an_engine_that_cannot_fence_is_exempt() -> None:
    trace = two_syncs(without=("term_fencing",))
    trace.begin_term(2, base_version=2)
    trace.sync(3)
    trace.emit("engine-0", ev.EngineResumed(engine="engine-0", term=1))
    assert trace.violated() == set()


def test_s12_an_older_term_announces() -> None:
    trace = second_term()
    trace.emit("zombie", ev.VersionAnnounced(term=1, version=3))
    assert trace.violated() == {"S12"}


# -- S11 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["unproved", "unloaded", "other view", "failed", "nothing"])
def test_s11_a_commit_lacks_a_member(what: str) -> None:
    trace = SyncTrace(TWO)
    trace.begin(1)
    for engine in TWO:
        trace.pause(engine, 1)
    trace.pack(1)
    trace.publish(1)
    for engine in TWO:
        if engine == "engine-0" or what != "unloaded":
            trace.update(engine, 1)
        if engine == "engine-0" or what != "unproved":
            trace.prove(engine, 1, outcome="fails" if what == "failed" and engine == "engine-1" else "holds")
    trace.commit(1, members=("engine-0",) if what == "other view" else TWO)
    if what in ("unproved", "unloaded", "other view", "failed"):
        assert trace.violated() == {"S11"}
    else:
        assert (trace.violated(), trace.evaluated("S11")) == (set(), 1)


@pytest.mark.parametrize("loads_again", [True, False])
def test_s11_what_an_aborted_sync_loaded_does_not_count(loads_again: bool) -> None:
    trace = SyncTrace()
    trace.sync(1)
    trace.begin(2)
    trace.pause("engine-0", 2)
    trace.transfer(2)
    trace.abort(2)
    trace.begin(2)
    trace.pack(2)
    trace.publish(2)
    trace.attempt = 2
    if loads_again:
        trace.update("engine-0", 2)
    trace.prove("engine-0", 2)
    trace.commit(2)
    trace.resume("engine-0", 2)
    trace.end(2)
    assert trace.violated() == (set() if loads_again else {"S11"})


@pytest.mark.parametrize("fenced", [True, False])
def test_s11_who_is_left_out_serves(fenced: bool) -> None:
    trace = SyncTrace(TWO)
    trace.sync(1)
    trace.begin(2)
    for engine in TWO:
        trace.pause(engine, 2)
    if fenced:
        trace.fence("engine-1")
    else:
        trace.change_view(("engine-0",))
    trace.transfer(2)
    trace.commit(2)
    trace.resume("engine-0", 2)
    trace.end(2)
    left_out = trace.violated()
    assert left_out == (set() if fenced else {"S32"})
    trace.resume("engine-1", 2)
    assert trace.violated() == left_out | ({"S11"} if fenced else {"S11", "S3"})


@pytest.mark.parametrize("resumes", [1, 2])
def test_s11_a_resume_that_was_under_way_at_the_fence_may_still_take_effect_once(resumes: int) -> None:
    trace = SyncTrace(TWO)
    trace.sync(1)
    trace.begin(2)
    for engine in TWO:
        trace.pause(engine, 2)
    trace.transfer(2)
    trace.commit(2)
    trace.resume("engine-0", 2)
    trace.emit("trainer", ev.EngineFailed(engine="engine-1", call="resume", detail="no answer within 10 s"))
    trace.fence("engine-1")
    trace.end(2)
    for _ in range(resumes):
        trace.engine_emit("engine-1", ev.EngineResumed(engine="engine-1", term=1))
    assert trace.violated() == (set() if resumes == 1 else {"S11"})


# -- S13 -----------------------------------------------------------------------------------------------


def test_s13_a_sync_begins_during_another() -> None:
    trace = two_syncs()
    trace.begin(3)
    assert trace.violated() == set()
    trace.begin(3)
    assert trace.violated() == {"S13"}


@pytest.mark.parametrize("how", ["failed", "restarted", "open"])
def test_s13_an_update_starts_during_another(how: str) -> None:
    trace = two_syncs()
    trace.emit("run", ev.FaultInjected(fault="planned"))
    trace.start("engine-0", 3)
    if how == "failed":
        failed = ev.UpdateFailed(engine="engine-0", **trace.of(3), reason="planned")
        trace.emit("engine-0", failed)
    elif how == "restarted":
        trace.emit("run", ev.MemberStarted(member="engine-0", role="engine", incarnation=2))
    trace.attempt = 2
    trace.start("engine-0", 3)
    assert trace.violated() == ({"S13"} if how == "open" else set())


# -- S15 -----------------------------------------------------------------------------------------------


def aborted(loads: bool, fences: bool) -> SyncTrace:
    """A sync of two engines that is given up after engine-1 may have loaded."""
    trace = SyncTrace(TWO)
    trace.sync(1)
    trace.begin(2)
    for engine in TWO:
        trace.pause(engine, 2)
    trace.pack(2)
    trace.publish(2)
    if loads:
        trace.update("engine-1", 2)
    trace.abort(2)
    if fences:
        trace.fence("engine-1")
    for engine in trace.engines:
        trace.resume(engine, 2)
    trace.end(2, "aborted")
    return trace


def test_s15_after_an_abort_the_previous_version_serves_or_nothing() -> None:
    trace = aborted(loads=False, fences=False)
    assert (trace.violated(), trace.evaluated("S15")) == (set(), 2)
    assert aborted(loads=True, fences=True).violated() == set()


def test_s15_an_aborted_version_serves() -> None:
    # In global scope that is another version than the committed one, too.
    assert aborted(loads=True, fences=False).violated() == {"S15", "S3"}


@pytest.mark.parametrize("how", ["update", "write", "mended"])
def test_s15_torn_weights_serve(how: str) -> None:
    trace = two_syncs()
    trace.pause("engine-0", 3)
    trace.start("engine-0", 3)
    if how == "write":
        trace.write("engine-0", 3, complete=False)
    else:
        failed = ev.UpdateFailed(engine="engine-0", **trace.of(3), reason="planned", weights="torn")
        trace.emit("engine-0", failed)
    if how == "mended":
        trace.activate("engine-0", 2)
    trace.resume("engine-0", 3)
    trace.step()
    assert trace.violated() == (set() if how == "mended" else {"S15"})
