"""S18 - S25 and S31: each rule on a trace that breaks it, and on its correct twin."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_trace import RolloutTrace

from grpo_lab.check import check_records
from grpo_lab.events import LogprobGapMeasured, RequestAdmitted, RequestFinished


def started(**parameters: Any) -> RolloutTrace:
    return RolloutTrace(**parameters).begin().commit(1, step=0)


def three_versions(**parameters: Any) -> RolloutTrace:
    """Group 0 is generated under version 1; by the end version 3 is committed, after two steps."""
    trace = started(**parameters)
    for number in range(3):
        trace.generate(number, version=1)
    trace.train(1, step=0, version=1, first=1).commit(2, step=1)
    return trace.train(2, step=1, version=2, first=1).commit(3, step=2)


# ---- S18 --------------------------------------------------------------------------------------------


def test_s18_too_old_in_versions() -> None:
    trace = three_versions().train(0, step=2, version=3, first=1)
    trace.end()
    assert trace.violated() == {"S18"}
    message = trace.check().of("S18").violations[0].message
    assert "t1.g0" in message
    assert "2 versions old" in message
    assert "bound is 1" in message
    assert three_versions(max_staleness=2).train(0, step=2, version=3, first=1).violated() == set()


def test_s18_too_old_in_optimizer_steps_although_young_in_versions() -> None:
    def trace(limit: int) -> RolloutTrace:
        run = started(max_staleness=5, max_staleness_steps=limit, weight_sync_steps=4)
        for number in range(3):
            run.generate(number, version=1)
        for step in range(3):
            run.train(step, step=step, version=1, first=1)
        return run

    assert trace(1).violated() == {"S18"}
    assert "2 steps after" in trace(1).check().of("S18").violations[0].message
    assert trace(2).violated() == set()


def test_s18_steps_are_counted_from_what_was_applied_not_from_what_the_sync_says() -> None:
    run = started(max_staleness=5, max_staleness_steps=0)
    for number in range(2):
        run.generate(number, version=1)
    run.train(0, step=0, version=1, first=1)
    run.train(1, step=1, version=1, first=1, optimizer_step_first=1)
    assert run.violated() == {"S18"}


@pytest.mark.parametrize("first", [2, 5])
def test_s18_tokens_from_the_future(first: int) -> None:
    trace = started().admit(0, 1).dispatch(0, 1).complete(0, first).enqueue(0).take(0)
    trace.train(0, step=0, version=1, first=first)
    assert "S18" in trace.violated()
    assert "newer than the trainer's version 1" in str(trace.check().of("S18").violations)


def test_s18_a_last_token_of_a_version_that_is_not_committed() -> None:
    trace = started().generate(0, version=1, last=2).train(0, step=0, version=1, first=1, last=2)
    assert "S18" in trace.violated()


def test_s18_a_version_stamped_at_completion_hides_the_age() -> None:
    """The engine knows better than the trainer when the first token was sampled."""

    def trace(stamped: int) -> RolloutTrace:
        run = started(max_staleness=3).admit(0, 1).dispatch(0, 1)
        for sample in run.samples(0):
            spans = ((1, 1, 0, 2), (1, 2, 2, 4))
            finished = RequestFinished(
                engine="engine-0", request=sample, finish_reason="stop", tokens=4, spans=spans
            )
            run.emit("engine-0", finished)
        run.commit(2, step=0).complete(0, stamped, last=2 if stamped == 1 else None)
        run.enqueue(0).take(0).plan(0, step=0, version=2)
        return run.consume(0, 0, 2, stamped, last=2).apply(0, 2)

    assert trace(1).check().of("S18").status == "passed"
    bad = trace(2).check().of("S18")
    assert bad.status == "violated"
    assert "for one of version 2, but its first token was sampled with version 1" in bad.violations[0].message


def test_s18_a_group_that_ages_between_plan_and_gradient() -> None:
    """Bound 0: the group was fresh when it left the queue, and a prefetched plan used it later."""

    def trace(*, late: bool) -> RolloutTrace:
        run = started(max_staleness=0).generate(0, version=1).plan(0, step=0, version=1)
        run.consume(0, 0, 1, 1)
        if late:
            run.commit(2, step=0)
        return run.micro_batch(0, step=0, version=1).apply(0, 1)

    assert trace(late=False).violated() == set()
    assert "S18" in trace(late=True).violated()


def test_s18_is_not_evaluable_without_its_bound_and_vacuous_without_training() -> None:
    trace = started().generate(0, version=1)
    assert trace.check().of("S18").status == "vacuous"
    records = trace.records
    del records[0].event.parameters["max_staleness"]  # type: ignore[attr-defined]
    assert check_records(records).of("S18").status == "not evaluable"


# ---- S19 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "versions", "limit"),
    [
        ({"max_staleness": 1}, 0, 2),
        ({"max_staleness": 1, "groups_per_step": 3}, 0, 6),
        ({"max_staleness": 0, "weight_sync_steps": 2}, 0, 2),
        ({"max_staleness": 2, "groups_per_step": 2}, 1, 8),
        ({"max_staleness": 9, "max_staleness_steps": 1}, 0, 2),
        ({"max_staleness": 2, "window": 2, "staleness_policy": "window"}, 0, 2),
    ],
)
def test_s19_one_more_than_allowed(parameters: dict[str, Any], versions: int, limit: int) -> None:
    trace = started(**{"staleness_policy": "admission", "num_generations": 2, **parameters})
    for version in range(2, versions + 2):
        trace.commit(version, step=0)
    for number in range(limit):
        trace.admit(number, version=versions + 1)
    assert trace.violated() == set()
    assert trace.evaluated("S19") == limit
    trace.admit(limit, version=versions + 1)
    assert trace.violated() == {"S19"}


def test_s19_a_lost_group_makes_room_and_a_stale_one_does_not() -> None:
    def trace(reason: str) -> RolloutTrace:
        run = started(staleness_policy="admission").admit(0, 1).admit(1, 1)
        return run.drop(0, reason).admit(2, 1)

    assert trace("request_failed").violated() == set()
    assert trace("stale").violated() == {"S19"}


def test_s19_counts_anew_after_a_resume() -> None:
    trace = started(staleness_policy="admission").admit(0, 1).admit(1, 1)
    trace.begin(term=2, base_version=7, step=3, checkpoint="elsewhere").commit(8, step=3)
    trace.admit(0, 8).admit(1, 8)
    assert trace.check().of("S19").status == "passed"
    assert trace.admit(2, 8).check().of("S19").violation_count == 1


def test_s19_a_version_that_is_not_committed_admits_nothing() -> None:
    trace = started(staleness_policy="admission").admit(0, 3)
    assert trace.check().of("S19").violation_count == 1


def test_s19_says_nothing_where_prompts_are_not_held_back() -> None:
    trace = started(staleness_policy="drop")
    for number in range(9):
        trace.admit(number, 1)
    assert trace.check().of("S19").status == "vacuous"


# ---- S20, S21 ---------------------------------------------------------------------------------------


def test_s20_a_sample_that_ends_nowhere() -> None:
    trace = started().generate(0, version=1).train(0, step=0, version=1, first=1).admit(1, 1)
    trace.end()
    assert trace.violated() == {"S20"}
    assert "t1.g1.s0" in trace.check().of("S20").violations[0].message


def test_s20_leftovers_must_be_declared() -> None:
    def trace(in_flight: int, queued: int) -> RolloutTrace:
        run = started().admit(0, 1).admit(1, 1).enqueue(1)
        run.end("interrupted", in_flight=in_flight, queued=queued)
        return run

    assert trace(2, 2).violated() == set()
    assert trace(2, 0).violated() == {"S20"}
    assert trace(2, 2).evaluated("S20") == 1


def test_s20_a_trace_without_an_end_loses_nothing() -> None:
    assert started().admit(0, 1).violated() == set()


def test_s20_ends_twice() -> None:
    trace = started().generate(0, version=1).train(0, step=0, version=1, first=1).drop(0, "stale")
    trace.end()
    assert trace.violated() == {"S20"}
    assert "ended twice" in trace.check().of("S20").violations[0].message


def test_s20_ends_without_having_begun() -> None:
    trace = started().drop(0, "stale")
    trace.end()
    assert trace.violated() == {"S20"}


def test_s20_dropped_without_a_reason() -> None:
    trace = started().admit(0, 1).drop(0, "")
    trace.end()
    assert trace.violated() == {"S20"}


def test_s21_a_group_is_consumed_in_part() -> None:
    trace = started().generate(0, version=1)
    trace.plan(0, step=0, version=1)
    one = {"samples": trace.samples(0)[:1], "versions_first": (1,), "versions_last": (1,)}
    trace.consume(0, 0, 1, 1, **one)
    assert trace.violated() == {"S21"}

    allowed = started(min_group_size=1).generate(0, version=1).plan(0, step=0, version=1)
    assert allowed.consume(0, 0, 1, 1, **one).violated() == set()


def test_s21_a_group_is_dropped_in_part() -> None:
    trace = started().admit(0, 1)
    trace.drop(0, "request_failed", samples=trace.samples(0)[:1])
    assert trace.violated() == {"S21"}


def test_s21_a_sample_that_never_completed_is_trained_on() -> None:
    trace = started().admit(0, 1).dispatch(0, 1).complete(0, 1)
    completed = trace.records.pop()
    assert completed.event.kind == "sample_completed"
    trace.enqueue(0).take(0).train(0, step=0, version=1, first=1)
    assert trace.violated() == {"S21"}


def test_s21_is_vacuous_while_no_group_has_ended() -> None:
    assert started().admit(0, 1).check().of("S21").status == "vacuous"


# ---- S22, S23 ---------------------------------------------------------------------------------------


def overtaking(policy: str, window: int, times: int) -> RolloutTrace:
    """Group 0 waits while the ``times`` groups after it are trained on, one a step."""
    trace = started(max_staleness=8, staleness_policy=policy, window=window)
    trace.admit(0, 1)
    for number in range(1, times + 1):
        trace.generate(number, version=1).train(number, step=number - 1, version=1, first=1)
    trace.dispatch(0, 1).complete(0, 1).enqueue(0).take(0)
    trace.train(0, step=times, version=1, first=1).end()
    return trace


def test_s22_dispatch_order() -> None:
    assert overtaking("admission", 1, times=1).violated() == {"S22"}
    assert overtaking("admission", 1, times=0).violated() == set()
    assert overtaking("admission", 1, times=0).evaluated("S22") == 1


def test_s22_bounded_bypass() -> None:
    assert overtaking("window", 3, times=2).violated() == set()
    bad = overtaking("window", 3, times=3)
    assert bad.violated() == {"S22"}
    assert "overtaken 3 times" in bad.check().of("S22").violations[0].message


def test_s22_groups_of_one_step_do_not_overtake_each_other() -> None:
    trace = started(max_staleness=8, staleness_policy="admission", groups_per_step=2)
    trace.generate(0, version=1).generate(1, version=1).train(1, 0, step=0, version=1, first=1)
    assert trace.violated() == set()


def test_s22_a_lost_group_is_not_waited_for() -> None:
    trace = started(max_staleness=8, staleness_policy="admission").admit(0, 1).drop(0, "request_failed")
    trace.generate(1, version=1).train(1, step=0, version=1, first=1)
    assert trace.violated() == set()


def test_s22_does_not_order_what_is_dropped_at_the_end() -> None:
    assert overtaking("drop", 1, times=3).check().of("S22").status == "vacuous"


def test_s23_capacity() -> None:
    trace = started(queue_capacity=2)
    for number in range(2):
        trace.admit(number, 1).enqueue(number)
    assert trace.violated() == set()
    assert trace.evaluated("S23") == 2
    assert trace.admit(2, 1).enqueue(2).violated() == {"S23"}


def test_s23_a_group_that_vanishes_in_the_queue_is_lost_for_s20_too() -> None:
    trace = started().admit(0, 1).enqueue(0)
    trace.end()
    assert trace.violated() == {"S20", "S23"}


def test_s23_a_group_comes_out_twice() -> None:
    trace = started().admit(0, 1).enqueue(0).take(0)
    trace.queue.append(trace.name(0))
    assert trace.take(0).violated() == {"S23"}


# ---- S24, S25 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"logprobs": 3}, {"logprobs_finite": False}])
def test_s24_one_finite_logprob_a_token(wrong: dict[str, Any]) -> None:
    good = started().admit(0, 1).dispatch(0, 1).complete(0, 1)
    assert good.violated() == set()
    assert good.evaluated("S24") == 2
    assert started().admit(0, 1).dispatch(0, 1).complete(0, 1, **wrong).violated() == {"S24"}


def gap(largest: float, mean: float = 0.0, **parameters: Any) -> RolloutTrace:
    trace = started(**parameters)
    trace.emit("trainer", LogprobGapMeasured(version=1, gap_max=largest, gap_mean=mean, tokens=100))
    return trace


def test_s24_logprobs_of_the_sampling_weights() -> None:
    assert gap(9e-5).violated() == set()
    assert gap(2e-4).violated() == {"S24"}
    assert gap(float("nan")).violated() == {"S24"}
    assert gap(2e-4, clear_cache=False).check().of("S24").status == "vacuous"


def test_s25_a_correction_divides_by_the_stored_versions() -> None:
    def trace(*versions: int) -> RolloutTrace:
        run = started().admit(0, 1).dispatch(0, 1).commit(2, step=0).complete(0, 1, last=2)
        run.enqueue(0).take(0)
        fields = {"last": 2, "correction": "tis", "correction_versions": versions}
        return run.train(0, step=0, version=2, first=1, **fields)

    assert trace(1, 2).violated() == set()
    assert trace(1, 2).evaluated("S25") == 1
    assert trace(2).violated() == {"S25"}
    assert trace().check().of("S25").status == "vacuous"


# ---- S31 --------------------------------------------------------------------------------------------


def test_s31_a_sample_is_dispatched_before_the_initial_commit() -> None:
    trace = RolloutTrace().begin()
    trace.dispatch(0, 0)
    assert "S31" in trace.violated()
    assert "before any weight version of term 1" in trace.check().of("S31").violations[0].message
    assert started().dispatch(0, 1).violated() == set()


def test_s31_a_second_term_needs_its_own_commit() -> None:
    trace = started()
    trace.begin(term=2, base_version=1, step=0).dispatch(0, 1)
    assert "S31" in trace.violated()


@pytest.mark.parametrize(("kind", "violated"), [("rollout", True), ("canary", False), ("evaluation", False)])
def test_s31_only_rollouts_wait_for_the_initial_commit(kind: str, violated: bool) -> None:
    trace = RolloutTrace().begin()
    trace.emit(
        "engine-0",
        RequestAdmitted(
            engine="engine-0",
            request="r",
            request_kind=kind,
            prompt_tokens=3,
            weight_version=0,
            request_term=1,
        ),
    )
    assert ("S31" in trace.violated()) is violated
    assert (trace.check().of("S31").status == "vacuous") is not violated
