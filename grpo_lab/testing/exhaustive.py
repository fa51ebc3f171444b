"""Tries all schedules of all small scopes to a depth, and counts what the coordinator went through.

>>> report = explore_scopes([Scope()], depth=1)
>>> report.failures, report.complete, report.schedules
([], True, 3)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from grpo_lab.errors import InvariantViolation
from grpo_lab.events import Record
from grpo_lab.sim.explore import explore, shrink
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import (
    BUCKET_CALL,
    BUCKET_FAULTS,
    CALL_FAULTS,
    CRASHES,
    LINK_FAULTS,
    Fault,
)
from grpo_lab.sim.tape import Tape
from grpo_lab.testing.coverage import Coverage
from grpo_lab.testing.scopes import INTERRUPTIONS, LATER_CANCELS, Abilities, Scope, run_scope
from grpo_lab.types import SyncScope

_SYNC_CALLS = ("pause", "start_update", "update", "finish_update", "resume", "score")
_OTHER_CALLS = ("init_transfer", "health")
_RARE_CALLS = ("abandon_update", "weight_info")
_SHORT_S, _LONG_S = 0.5, 25.0  # within the coordinator's bounds, and beyond them
_SHRINK_RUNS = 200


@dataclass(frozen=True, slots=True)
class ScopeFailure:
    """``tape`` makes ``scope`` break ``rule`` (or end with that exception) at record ``event``."""

    scope: Scope
    tape: Tape
    rule: str
    message: str
    event: int


@dataclass(slots=True)
class ScopeReport:
    """``complete``: every schedule of every scope was tried. ``failures`` holds the first of each rule."""

    depth: int
    scopes: int = 0
    schedules: int = 0
    failed: int = 0
    longest: int = 0
    complete: bool = True
    coverage: Coverage = field(default_factory=Coverage)
    failures: list[ScopeFailure] = field(default_factory=list)

    def __str__(self) -> str:
        how = "all" if self.complete else "not all"
        return (
            f"{self.schedules:,} schedules of {self.scopes:,} scopes ({how}, to a depth of {self.depth} "
            f"decisions), {self.failed:,} broke a rule; coordinator: {self.coverage}"
        )


def explore_scopes(
    scopes: Sequence[Scope],
    depth: int,
    *,
    parts: Parts | None = None,
    on_scope: Callable[[ScopeReport], None] = lambda _: None,
    over: Callable[[], bool] = lambda: False,
) -> ScopeReport:
    """Every schedule that differs in its first ``depth`` decisions of the sync under test.

    A scope whose fault never strikes has the schedules of the one without it, so it is run once.
    ``over()`` ends the search between two scopes.
    """
    report = ScopeReport(depth)
    rules: set[str] = set()
    for scope in scopes:
        if over():
            report.complete = False
            break
        for failure in _explore(scope, depth, parts, report):
            if failure.rule not in rules:
                rules.add(failure.rule)
                report.failures.append(shrunk(failure, parts))
        report.scopes += 1
        on_scope(report)
    return report


def run_once(scope: Scope, tape: Tape, parts: Parts | None = None) -> ScopeFailure | None:
    """The failure of this very run, or None."""
    records: list[Record] = []
    try:
        run_scope(scope, tape, parts=parts, records=records)
    except Exception as error:  # whatever ends a simulation is a finding
        rule = error.rule if isinstance(error, InvariantViolation) else type(error).__name__
        return ScopeFailure(scope, tape.canonical(), rule, str(error), len(records) - 1)
    return None


def _explore(scope: Scope, depth: int, parts: Parts | None, report: ScopeReport) -> list[ScopeFailure]:
    idle = False

    def run(tape: Tape) -> int:
        nonlocal idle
        records: list[Record] = []
        try:
            outcome = run_scope(scope, tape, parts=parts, records=records).value
        finally:
            report.coverage.add(records)
        idle = scope.fault is not None and outcome.struck == 0
        return outcome.committed

    found = explore(run, 0, stop_at_failure=False)
    if depth and not idle:
        found = explore(run, depth, stop_at_failure=False, max_runs=10**9)
    report.schedules += found.runs
    report.failed += found.failed_runs
    report.longest = max(report.longest, found.deepest)
    failures = []
    for failing in found.failures:
        again = run_once(scope, failing.tape, parts)
        if again is not None:
            failures.append(again)
    return failures


def shrunk(failure: ScopeFailure, parts: Parts | None, max_runs: int = _SHRINK_RUNS) -> ScopeFailure:
    """The same rule broken in the same scope by as simple a schedule as is found in so many runs."""
    best = failure

    def same(tape: Tape) -> bool:
        nonlocal best
        again = run_once(failure.scope, tape, parts)
        if again is None or again.rule != failure.rule:
            return False
        best = again
        return True

    if any(failure.tape.choices):
        same(shrink(failure.tape, same, max_runs=max_runs))
    return best


# -- which scopes there are --------------------------------------------------------------------------------


def all_faults(engines: int) -> Iterator[Fault]:
    """Every fault at every call of the first and of the second sync, of every engine."""
    for target in (f"engine-{index}" for index in range(engines)):
        calls = [
            *itertools.product(_SYNC_CALLS, (1, 2)),
            ("resume", 3),
            ("resume", 4),
        ]  # on trial: twice a sync
        calls += itertools.product(_OTHER_CALLS, (1, 2))
        for (call, occurrence), kind in itertools.product(calls, (*CALL_FAULTS, *CRASHES)):
            yield Fault(kind, target, call, occurrence, _LONG_S if kind == "delay" else _SHORT_S)
        for (call, occurrence), kind in itertools.product(calls, (*LINK_FAULTS, "stall")):
            yield Fault(kind, target, call, occurrence, _LONG_S)
        for call, kind in itertools.product(_RARE_CALLS, CALL_FAULTS):
            yield Fault(kind, target, call, 1, _SHORT_S)
        for kind, occurrence in itertools.product(BUCKET_FAULTS, (3, 4)):  # both of the second sync
            yield Fault(kind, target, BUCKET_CALL, occurrence, _SHORT_S)
        yield Fault("oom", target, "finish_update", 2, _SHORT_S)


def single_scopes(engines: Sequence[int] = (1, 2)) -> list[Scope]:
    """A fault or an interruption, or neither: with one attempt for a sync, and with two."""
    return [
        Scope(
            count, abilities, fault=fault, interruption=interruption, sync_attempts=attempts, sync_scope=way
        )
        for count, attempts in itertools.product(engines, (1, 2))
        for way, abilities in itertools.product(_ways(count), get_args(Abilities))
        for fault, interruption in (
            *((fault, "") for fault in (None, *all_faults(count))),
            *((None, interruption) for interruption in _interruptions(way)),
        )
    ]


def paired_scopes(engines: Sequence[int] = (1, 2)) -> list[Scope]:
    """A fault and an interruption."""
    return [
        Scope(count, abilities, fault=fault, interruption=interruption, sync_attempts=2, sync_scope=way)
        for count in engines
        for way, abilities in itertools.product(_ways(count), get_args(Abilities))
        for fault in all_faults(count)
        for interruption in _interruptions(way)
    ]


def _ways(engines: int) -> tuple[SyncScope, ...]:
    return ("global", "rolling") if engines > 1 else ("global",)


def _interruptions(way: SyncScope) -> tuple[str, ...]:
    return (*INTERRUPTIONS[1:], *(LATER_CANCELS if way == "rolling" else ()))


def quick_scopes(engines: Sequence[int] = (1, 2)) -> list[Scope]:
    """A few hundred that between them take every transition."""
    few = ("refuse", "lose_reply", "hang_reply", "crash_before", "stall", "oom", "flip")
    singles = [
        scope
        for scope in single_scopes(engines)
        if scope.fault is None
        or (scope.fault.kind in few and scope.fault.occurrence in (2, 3) and scope.fault.target == "engine-0")
    ]
    pairs = [
        Scope(count, abilities, fault=Fault(kind, "engine-0", call, 2, _LONG_S), interruption=interruption)
        for count in engines
        for abilities, kind, call, interruption in _RARE_PAIRS
    ]
    return singles + pairs


_RARE_PAIRS: tuple[tuple[Abilities, str, str, str], ...] = (
    ("full", "crash_before", "pause", "closed-paused"),
    ("full", "hang_reply", "resume", "closed-paused"),
    ("full", "hang_reply", "resume", "closed-loaded"),
    ("full", "hang_reply", "resume", "cancelled-transferring"),
    ("on-trial", "hang_reply", "score", "cancelled-probation"),
    ("full", "crash_before", "update", "cancelled-aborting"),
)
"""Interruptions after which no engine comes back."""
