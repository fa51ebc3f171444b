"""Rules about transfers: what each catches, and on what it stays silent."""

from __future__ import annotations

from typing import Any

import pytest
from sync_trace import SyncTrace
from trace_builder import Trace, declared

from grpo_lab import events as ev

RULES = ("H1", "S9", "S10", "S14", "S28", "S29", "S30")


def begun(version: int = 1, **parameters: Any) -> SyncTrace:
    """A run in the middle of a sync: the engine is paused."""
    trace = SyncTrace(**parameters)
    trace.begin(version)
    trace.pause("engine-0", version)
    return trace


def end(trace: SyncTrace, version: int = 1) -> None:
    trace.prove("engine-0", version)
    trace.commit(version)
    trace.resume("engine-0", version)
    trace.end(version)


def test_a_clean_run_breaks_nothing() -> None:
    trace = SyncTrace()
    trace.emit("trainer", ev.ResourceOpened(resource="ring"))
    trace.sync(1)
    trace.sync(2)
    trace.emit("trainer", ev.ResourceClosed(resource="ring"))
    trace.run_ended()
    result = trace.check()
    assert result.violations == 0
    for rule in ("H1", "S9", "S10", "S14", "S30"):
        assert result.of(rule).evaluations > 0, rule


def test_an_empty_run_is_vacuous() -> None:
    result = Trace(declared()).check()
    assert {result.of(rule).status for rule in RULES} == {"vacuous"}


# -- H1 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["agrees", "differs", "digests differ", "mended", "none"])
@pytest.mark.parametrize("without", [(), ("events",)])
def test_h1_weights_move_without_an_agreement(how: str, without: tuple[str, ...]) -> None:
    trace = SyncTrace(without=without)
    if how == "none":
        trace.emit("run", ev.MemberStarted(member="engine-0", role="engine", incarnation=2))
    elif how != "agrees":
        difference = "" if how == "digests differ" else "missing: lm_head.weight"
        trace.handshake("engine-0", difference, theirs="other")
    if how == "mended":
        trace.handshake("engine-0")
    trace.sync(1)
    assert trace.violated() == (set() if how in ("agrees", "mended") else {"H1"})


# -- S9 ------------------------------------------------------------------------------------------------


def loaded_after(*buckets: dict[str, Any]) -> SyncTrace:
    trace = begun()
    trace.pack(1)
    trace.publish(1)
    trace.start("engine-0", 1)
    for bucket in buckets:
        trace.receive("engine-0", 1, **bucket)
    trace.load("engine-0", 1)
    trace.activate("engine-0", 1)
    end(trace)
    return trace


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ([{"bucket": 0}], "buckets 1 never came"),
        ([], "buckets 0, 1 never came"),
        ([{"bucket": 0}, {"bucket": 1, "accepted": False}], "buckets 1 had been rejected"),
        ([{"bucket": 0}, {"bucket": 1}, {"bucket": 1}], "bucket 1 was taken twice"),
        ([{"bucket": 0}, {"bucket": 1}, {"bucket": 2}], "bucket 2 is not of the manifest"),
        ([{"bucket": 0}, {"bucket": 1, "nbytes": 31}], "bucket 1 had 31 bytes instead of 32"),
        ([{"bucket": 0}, {"bucket": 1}, {"bucket": 1, "attempt": 2}], "bucket 1 was of t1.v1.a2"),
    ],
)
def test_s9_what_was_loaded_is_not_the_manifest(buckets: list[dict[str, Any]], words: str) -> None:
    trace = loaded_after(*buckets)
    result = trace.check()
    assert trace.violated() == {"S9"}
    assert words in result.of("S9").violations[0].message


def test_s9_a_rejected_bucket_may_come_again() -> None:
    assert loaded_after({"bucket": 0}, {"bucket": 1, "accepted": False}, {"bucket": 1}).violated() == set()


def test_s9_the_last_bucket_lands_after_the_load() -> None:
    trace = SyncTrace()
    trace.sync(1)
    trace.receive("engine-0", 1, 1)
    assert trace.violated() == {"S9"}


# -- S14 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempt", "broken"), [(1, {"S14"}), (2, set())])
def test_s14_an_identity_is_applied_twice(attempt: int, broken: set[str]) -> None:
    trace = begun()
    trace.pack(1)
    trace.publish(1)
    trace.update("engine-0", 1)
    trace.attempt = attempt
    trace.update("engine-0", 1)
    end(trace)
    assert trace.violated() == broken


# -- S10 and S30 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "changed", "broken"),
    [("during", True, {"S10"}), ("during", False, set()), ("after", True, set())],
)
def test_s10_the_source_changes_while_it_is_read(when: str, changed: bool, broken: set[str]) -> None:
    applied = ev.OptimizerStepApplied(term=1, optimizer_step=0, version=1, loss=0.0, changed=changed)
    trace = SyncTrace()
    trace.sync(1)
    trace.begin(2)
    trace.pause("engine-0", 2)
    trace.pack(2)
    if when == "during":
        trace.emit("trainer", applied)
    trace.publish(2)
    if when == "after":
        trace.emit("trainer", applied)
    trace.update("engine-0", 2)
    end(trace, 2)
    assert trace.violated() & {"S10"} == broken
    # Rules about training know that no step was planned here.
    assert trace.violated() <= {"S10", "S26"}


def test_s10_a_slot_is_packed_again_while_it_is_read() -> None:
    trace = begun()
    trace.pack(1, release=False)
    place = {"term": 1, "version": 1, "attempt": 1, "bucket": 2, "slot": 0}
    assert trace.violated() == set()
    trace.emit("trainer", ev.BucketPackBegan(**place))
    assert trace.violated() == {"S10"}


@pytest.mark.parametrize(("release", "broken"), [(True, set()), (False, {"S30"})])
def test_s30_a_committed_sync_leaves_a_slot_in_use(release: bool, broken: set[str]) -> None:
    trace = begun()
    trace.pack(1, release=release)
    trace.publish(1)
    trace.update("engine-0", 1)
    end(trace)
    assert trace.violated() == broken


def test_s10_an_aborted_attempt_frees_its_slots() -> None:
    trace = begun()
    trace.pack(1, release=False)
    trace.abort(1, final=False)
    trace.attempt = 2
    trace.transfer(1)
    end(trace)
    assert trace.violated() == set()


@pytest.mark.parametrize("ended", [True, False])
def test_s10_a_bucket_is_packed_before_its_gather_ended(ended: bool) -> None:
    trace = begun()
    where = {"term": 1, "version": 1, "attempt": 1, "bucket": 0, "rank": 1}
    trace.emit("trainer", ev.GatherBegan(**where))
    if ended:
        trace.emit("trainer", ev.GatherEnded(**where))
    trace.transfer(1)
    end(trace)
    assert trace.violated() == (set() if ended else {"S10"})


@pytest.mark.parametrize("how", ["closed", "left open", "opened twice", "its owner died"])
def test_s30_a_resource_is_not_closed(how: str) -> None:
    trace = SyncTrace()
    trace.emit("helper", ev.ResourceOpened(resource="shared_memory:ring", nbytes=64))
    if how == "opened twice":
        trace.emit("helper", ev.ResourceOpened(resource="shared_memory:ring", nbytes=64))
    if how in ("closed", "opened twice"):
        trace.emit("helper", ev.ResourceClosed(resource="shared_memory:ring"))
    if how == "its owner died":
        trace.emit("run", ev.MemberDied(member="helper"))
    trace.sync(1)
    trace.run_ended()
    assert trace.violated() == ({"S30"} if how in ("left open", "opened twice") else set())


# -- S28 and S29 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [True, False])
def test_s28_a_dead_member_acts(restarted: bool) -> None:
    trace = SyncTrace()
    trace.sync(1)
    trace.emit("run", ev.MemberDied(member="engine-0", detail="no heartbeat"))
    if restarted:
        trace.emit("run", ev.MemberStarted(member="engine-0", role="engine", incarnation=2))
    trace.admit("r")
    result = trace.check()
    assert trace.violated() == (set() if restarted else {"S28"})
    assert result.of("S28").evaluations == 1


def collectives(*entered: tuple[int, str, int, str, int]) -> Trace:
    trace = Trace(declared())
    for rank, group, index, operation, view in entered:
        event = ev.CollectiveEntered(group=group, rank=rank, index=index, operation=operation, view=view)
        trace.emit(f"trainer-{rank}", event)
    return trace


@pytest.mark.parametrize(
    ("entered", "broken"),
    [
        ([(0, "a", 0, "gather", 0), (1, "a", 0, "gather", 0), (0, "a", 1, "barrier", 0)], set()),
        ([(0, "a", 0, "gather", 0), (1, "a", 0, "barrier", 0)], {"S29"}),
        ([(0, "a", 0, "gather", 0), (0, "b", 0, "gather", 0), (1, "b", 0, "gather", 0)], {"S29"}),
        ([(0, "a", 0, "gather", 1), (0, "a", 1, "gather", 2), (1, "a", 0, "gather", 1)], {"S29"}),
        # Of two ranks that die together one has entered nothing yet; the next view goes its own way.
        (
            [
                (1, "a", 0, "agree", 1),
                (1, "a", 0, "agree", 2),
                (0, "a", 0, "agree", 2),
                (0, "a", 0, "gather", 3),
                (1, "a", 0, "gather", 3),
            ],
            set(),
        ),
        ([(1, "a", 0, "agree", 1), (0, "a", 0, "gather", 2), (1, "a", 0, "agree", 2)], {"S29"}),
        # Both ranks start again.
        (
            [
                (0, "a", 0, "gather", 0),
                (1, "a", 0, "gather", 0),
                (0, "a", 0, "barrier", 0),
                (1, "a", 0, "barrier", 0),
            ],
            set(),
        ),
    ],
)
def test_s29_ranks_join_collectives_in_one_order(
    entered: list[tuple[int, str, int, str, int]], broken: set[str]
) -> None:
    trace = collectives(*entered)
    assert trace.violated() == broken
    assert trace.evaluated("S29") > 0
