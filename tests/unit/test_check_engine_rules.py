"""Rules about tokens and weight switches: what each catches, and on what it stays silent."""

from __future__ import annotations

from typing import Any

import pytest
from sync_trace import SyncTrace
from trace_builder import Trace, declared

from grpo_lab import events as ev

RULES = ("S4", "S5", "S7", "S8", "S17")
SAMPLE = {"term": 1, "sample": "s", "group": "g", "engine": "engine-0"}


def served(**parameters: Any) -> SyncTrace:
    """Steps 1 and 2 ran under version 1, step 3 under version 2."""
    trace = SyncTrace(**parameters)
    trace.sync(1)
    trace.admit("r")
    trace.step()
    trace.step()
    trace.begin(2)
    trace.pause("engine-0", 2, running=1)
    trace.transfer(2)
    trace.commit(2)
    trace.resume("engine-0", 2)
    trace.end(2)
    trace.step()
    return trace


def test_a_clean_run_breaks_nothing() -> None:
    trace = served()
    trace.finish("r", ((1, 1, 0, 2, 1, 2), (1, 2, 2, 3, 3, 3)), kv_version=1)
    trace.run_ended()
    result = trace.check()
    assert result.violations == 0
    for rule in ("S4", "S5", "S7", "S17"):
        assert result.of(rule).evaluations > 0, rule


def test_an_empty_run_is_vacuous() -> None:
    result = Trace(declared()).check()
    assert {result.of(rule).status for rule in RULES} == {"vacuous"}


# -- S4 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (((1, 2, 0, 3, 1, 3),), "tokens 0 to 3 of request r are tagged t1.v2, but at step 1"),
        (((1, 1, 0, 3, 1, 3),), "tokens 0 to 3 of request r are tagged t1.v1, but at step 3"),
        (((1, 1, 0, 1, 1, 1), (1, 2, 2, 3, 3, 3)), "do not join"),
        (((1, 1, 0, 2, 1, 2),), "cover 2 of 3 tokens"),
    ],
)
def test_s4_a_request_names_other_versions_than_its_steps_ran_under(
    spans: tuple[tuple[int, ...], ...], words: str
) -> None:
    trace = served()
    trace.finish("r", spans, tokens=3)
    assert trace.violated() == {"S4"}
    assert words in trace.check().of("S4").violations[0].message


def test_s4_a_step_runs_under_another_version_than_the_active_one() -> None:
    trace = served()
    trace.step(version=1)
    assert trace.violated() == {"S4"}


def sampled(spans: tuple[tuple[int, ...], ...], tokens: int = 3) -> SyncTrace:
    trace = served()
    trace.emit("worker", ev.SampleDispatched(**SAMPLE, version=1, request="r"))
    request = ((1, 1, 0, 2, 1, 2), (1, 2, 2, 3, 3, 3))
    trace.emit("worker", ev.SampleDispatched(**{**SAMPLE, "sample": "r"}, version=1, request="r"))
    trace.finish("r", request)
    done = {**SAMPLE, "sample": "r", "finish_reason": "stop", "logprobs_finite": True}
    trace.emit("worker", ev.SampleCompleted(**done, tokens=tokens, logprobs=tokens, spans=spans))
    return trace


@pytest.mark.parametrize(
    ("spans", "broken"),
    [
        (((1, 1, 0, 2), (1, 2, 2, 3)), False),
        (((1, 2, 0, 3),), True),  # stamped at completion
        (((1, 1, 0, 3),), True),  # stamped at dispatch
        (((1, 1, 0, 1), (1, 2, 1, 3)), True),
    ],
)
def test_s4_a_sample_carries_what_its_requests_said(spans: tuple[tuple[int, ...], ...], broken: bool) -> None:
    assert sampled(spans).violated() == ({"S4"} if broken else set())


def test_s4_a_sample_in_parts() -> None:
    trace = served()
    trace.emit("worker", ev.SampleDispatched(**{**SAMPLE, "sample": "r"}, version=1, request="r"))
    trace.finish("r", ((1, 1, 0, 2, 1, 2),), finish_reason="abort")
    trace.admit("r.c1")
    trace.finish("r.c1", ((1, 2, 0, 1, 3, 3),))
    done = {**SAMPLE, "sample": "r", "finish_reason": "stop", "logprobs_finite": True}
    spans = ((1, 1, 0, 2), (1, 2, 2, 3))
    trace.emit("worker", ev.SampleCompleted(**done, tokens=3, logprobs=3, spans=spans))
    assert (trace.violated(), trace.check().of("S4").violation_count) == (set(), 0)


@pytest.mark.parametrize(("version", "broken"), [(0, True), (1, False), (2, False), (3, True)])
def test_s4_of_engines_without_events_a_range_is_known(version: int, broken: bool) -> None:
    trace = SyncTrace(without=("events",))
    trace.sync(1)
    trace.emit("worker", ev.SampleDispatched(**SAMPLE, version=1, request="s"))
    trace.sync(2)
    done = {**SAMPLE, "finish_reason": "stop", "logprobs_finite": True, "version_source": "pause_windows"}
    spans = ((1, version, 0, 2),)
    trace.emit("worker", ev.SampleCompleted(**done, tokens=2, logprobs=2, spans=spans))
    assert trace.violated() == ({"S4"} if broken else set())


# -- S5 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "broken"),
    [(((1, 2, 0, 1), (1, 1, 1, 2)), {"S5"}), (((1, 9, 0, 1), (2, 3, 1, 2)), set())],
)
def test_s5_versions_of_a_sample_fall(spans: tuple[tuple[int, ...], ...], broken: set[str]) -> None:
    trace = SyncTrace(without=("events",))
    trace.sync(1)
    trace.emit("worker", ev.SampleDispatched(**SAMPLE, version=1, request="s"))
    done = {**SAMPLE, "finish_reason": "stop", "logprobs_finite": True, "version_source": "none"}
    trace.emit("worker", ev.SampleCompleted(**done, tokens=2, logprobs=2, spans=spans))
    assert trace.violated() == broken
    assert trace.evaluated("S5") == 1


# -- S7 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["write in a step", "step in a write", "after", "another shard"])
def test_s7_a_step_overlaps_a_write(how: str) -> None:
    trace = served()
    place = {"engine": "engine-0", "term": 1, "version": 2, "shard": int(how == "another shard")}
    began_seq = trace.next_seq("engine-0")
    trace.emit("engine-0", ev.WeightWriteBegan(**place))
    if how in ("step in a write", "another shard"):
        trace.step()
    trace.emit("engine-0", ev.WeightWriteEnded(**place))
    if how == "write in a step":
        trace.step(began_seq=began_seq)
    if how == "after":
        trace.step()
    assert trace.violated() == (set() if how in ("after", "another shard") else {"S7"})


# -- S8 ------------------------------------------------------------------------------------------------


def two_shards(first_step: int, versions: tuple[int, int]) -> SyncTrace:
    """Shards switch to version 2 at step 4, or at ``first_step``; both then run step 4."""
    trace = served()
    trace.activate("engine-0", 2, shard=1, first_step=3)
    trace.pause("engine-0", 3, running=1)
    trace.begin(3)
    trace.transfer(3)
    if versions[1] == 3:
        trace.activate("engine-0", 3, shard=1, first_step=first_step)
    trace.commit(3)
    trace.resume("engine-0", 3)
    trace.end(3)
    trace.step()
    trace.step(shard=1, version=versions[1], first_step=4, last_step=4)
    return trace


def test_s8_shards_switch_at_the_same_step() -> None:
    trace = two_shards(first_step=4, versions=(3, 3))
    assert (trace.violated(), trace.evaluated("S8") > 2) == (set(), True)


def test_s8_a_shard_switches_a_step_early() -> None:
    assert two_shards(first_step=3, versions=(3, 3)).violated() == {"S8"}


def test_s8_a_shard_never_switches() -> None:
    assert two_shards(first_step=4, versions=(3, 2)).violated() == {"S8"}


# -- S17 -----------------------------------------------------------------------------------------------


def hit(content: int, *, kv: int | None = 2, term: int = 1, **parameters: Any) -> SyncTrace:
    trace = served(**parameters)
    trace.admit("q")
    event = ev.CacheHit(
        engine="engine-0",
        request="q",
        cache="prefix",
        content_version=content,
        version=2,
        tokens=16,
        content_term=term,
        term=1,
    )
    trace.emit("engine-0", event)
    trace.step()
    trace.finish("q", ((1, 2, 0, 1, 4, 4),), kv_version=kv)
    return trace


def test_s17_a_request_reuses_work_of_an_older_version() -> None:
    assert hit(2).violated() == set()
    assert hit(1).violated() == {"S17"}
    assert hit(2, term=0).violated() == {"S17"}


def test_s17_a_cache_that_was_not_cleared_shows_in_the_tokens() -> None:
    assert hit(2, kv=1).violated() == {"S17"}


@pytest.mark.parametrize(
    ("parameters", "kv", "broken"),
    [
        ({"clear_cache": False}, 1, set()),
        ({"clear_cache": False}, 2, {"S17"}),  # the tokens do not say so
        ({"clear_cache": False, "prefix_policy": "versioned"}, 1, {"S17"}),
        ({"prefix_policy": "shared"}, 1, set()),
    ],
)
def test_s17_declared_reuse_is_allowed_if_the_tokens_say_so(
    parameters: dict[str, Any], kv: int, broken: set[str]
) -> None:
    assert hit(1, kv=kv, **parameters).violated() == broken
