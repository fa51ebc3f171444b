"""Rules about pauses: what each catches, and on what it stays silent."""

from __future__ import annotations

import pytest
from sync_trace import SyncTrace
from trace_builder import Trace, declared

from grpo_lab import events as ev


def paused(mode: str = "keep", running: int = 1, **fields: object) -> SyncTrace:
    """A run whose second sync has just paused an engine with one request in flight."""
    trace = SyncTrace()
    trace.sync(1)
    trace.admit("r")
    trace.step()
    trace.begin(2, pause_mode=mode)
    trace.pause("engine-0", 2, mode, running=running, **fields)
    return trace


def go_on(trace: SyncTrace, version: int = 2) -> None:
    trace.transfer(version)
    trace.commit(version)
    trace.resume("engine-0", version)
    trace.end(version)


def test_an_empty_run_is_vacuous() -> None:
    result = Trace(declared()).check()
    assert [result.of(rule).status for rule in ("S16", "S32")] == ["vacuous", "vacuous"]


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_s16_a_step_in_a_pause(when: str) -> None:
    trace = SyncTrace()
    trace.sync(1)
    trace.begin(2)
    if when == "before":
        trace.step()
    trace.pause("engine-0", 2)
    if when == "during":
        trace.step()
    go_on(trace)
    if when == "after":
        trace.step()
    assert trace.violated() == ({"S16"} if when == "during" else set())
    assert trace.evaluated("S16") >= 2


@pytest.mark.parametrize(("running", "broken"), [(1, set()), (-1, set()), (0, {"S16"}), (2, {"S16"})])
def test_s16_a_keep_loses_a_request(running: int, broken: set[str]) -> None:
    trace = paused(running=running)
    go_on(trace)
    trace.step()
    trace.finish("r", ((1, 1, 0, 1, 1, 1), (1, 2, 1, 2, 2, 2)))
    assert trace.violated() == broken


@pytest.mark.parametrize(("returned", "broken"), [(True, set()), (False, {"S16"})])
def test_s16_a_kept_request_never_comes_back(returned: bool, broken: set[str]) -> None:
    trace = paused()
    go_on(trace)
    if returned:
        trace.finish("r", ((1, 1, 0, 1, 1, 1),))
    trace.run_ended()
    assert trace.violated() == broken


@pytest.mark.parametrize("how", ["once", "twice", "never"])
def test_s16_an_abort_returns_each_request_once(how: str) -> None:
    trace = SyncTrace()
    trace.sync(1)
    trace.admit("r")
    trace.step()
    trace.begin(2, pause_mode="abort")
    if how != "never":
        trace.finish("r", ((1, 1, 0, 1, 1, 1),), finish_reason="abort")
    trace.pause("engine-0", 2, "abort", aborted=("r",))
    if how == "twice":
        trace.finish("r", ((1, 1, 0, 1, 1, 1),), finish_reason="abort")
    go_on(trace)
    assert trace.violated() == (set() if how == "once" else {"S16"})


def test_s16_another_mode_than_the_sync_asked_for() -> None:
    trace = SyncTrace()
    trace.sync(1)
    trace.begin(2, pause_mode="keep")
    trace.pause("engine-0", 2, "abort")
    go_on(trace)
    assert trace.violated() == {"S16"}


def test_s16_a_retry_under_the_same_name_is_a_request_of_its_own() -> None:
    trace = SyncTrace()
    trace.sync(1)
    trace.admit("r")
    trace.admit("r")
    trace.step()
    trace.begin(2)
    trace.pause("engine-0", 2, running=2)
    go_on(trace)
    trace.finish("r", ((1, 1, 0, 1, 1, 1),))
    trace.finish("r", ())
    assert trace.violated() == set()


@pytest.mark.parametrize("how", ["resumed", "fenced", "died", "forgotten"])
@pytest.mark.parametrize("without", [(), ("events",)])
def test_s32_a_pause_without_an_end(how: str, without: tuple[str, ...]) -> None:
    trace = SyncTrace(("engine-0", "engine-1"), without=without)
    trace.sync(1)
    trace.begin(2)
    for engine in ("engine-0", "engine-1"):
        trace.pause(engine, 2)
    if how == "fenced":
        trace.fence("engine-1")
    elif how == "died":
        trace.emit("run", ev.MemberDied(member="engine-1"))
        trace.fence("engine-1")
    trace.transfer(2)
    trace.commit(2)
    trace.resume("engine-0", 2)
    if how == "resumed":
        trace.resume("engine-1", 2)
    trace.end(2)
    assert trace.violated() == ({"S32"} if how == "forgotten" else set())


def test_s32_an_engine_is_stopped_while_paused() -> None:
    trace = SyncTrace()
    trace.sync(1)
    trace.begin(2)
    trace.pause("engine-0", 2)
    trace.run_ended("failed")
    assert trace.violated() == {"S32"}


@pytest.mark.parametrize(("before", "broken"), [("aborting", {"S32"}), ("disconnected", set())])
def test_s32_the_coordinator_is_at_rest(before: str, broken: set[str]) -> None:
    """A new trainer finds engines paused that its predecessor left: it owes them the resume of its sync."""
    trace = SyncTrace()
    trace.sync(1)
    trace.begin(2)
    trace.pause("engine-0", 2)
    place = {"term": 1, "version": 2, "attempt": 1}
    trace.emit("trainer", ev.StateChanged(**place, before=before, after="running"))
    assert trace.violated() == broken
