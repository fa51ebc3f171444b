"""Failure files, of whole clusters and of small scopes: written by a search, read by a replay.

Whatever a file holds, reading it gives a case that can be run, or ``TraceError`` with what is wrong.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from grpo_lab.errors import TraceError
from grpo_lab.events import Record
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import FAILURE_SCHEMA, Failure, Fault, Scenario, write_failure
from grpo_lab.sim.tape import Tape
from grpo_lab.sim.world import simulate
from grpo_lab.testing.coordinators import load_coordinator
from grpo_lab.testing.exhaustive import ScopeFailure, shrunk
from grpo_lab.testing.failure_rows import read_row
from grpo_lab.testing.scopes import Scope, run_scope
from grpo_lab.testing.search import load_parts, with_short_tape


class Case(Protocol):
    """What a failure file says, and how to run it again."""

    @property
    def failure(self) -> Failure | ScopeFailure: ...
    @property
    def protocol(self) -> str: ...
    def run(self, records: list[Record]) -> None:
        """Fills ``records``; raises what ended the run, if anything did."""
        ...

    def with_short_tape(self, max_runs: int) -> Case:
        """The same rule broken by a simpler schedule, if one is found in so many runs."""
        ...

    def save(self, path: Path) -> None:
        """Whole or not at all. Raises ``TraceError`` when the place cannot be written to."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterCase:
    """A whole simulated cluster under one schedule."""

    failure: Failure

    @property
    def protocol(self) -> str:
        return self.failure.protocol

    def run(self, records: list[Record]) -> None:
        parts = load_parts(self.protocol)
        # A mutant was searched for one rule, and may have broken others before.
        only = frozenset({self.failure.rule}) if self.protocol.startswith("mutant:") else None
        simulate(self.failure.scenario, self.failure.tape, parts=parts, only=only, records=records)

    def with_short_tape(self, max_runs: int) -> ClusterCase:
        failure, _ = with_short_tape(self.failure, load_parts(self.protocol), max_runs)
        return ClusterCase(failure)

    def save(self, path: Path) -> None:
        self.failure.save(path)


@dataclasses.dataclass(frozen=True, slots=True)
class ScopeCase:
    """A small scope under one schedule."""

    failure: ScopeFailure
    protocol: str = ""

    def run(self, records: list[Record]) -> None:
        parts = Parts(coordinator=load_coordinator(self.protocol))
        run_scope(self.failure.scope, self.failure.tape, parts=parts, records=records)

    def with_short_tape(self, max_runs: int) -> ScopeCase:
        parts = Parts(coordinator=load_coordinator(self.protocol))
        return ScopeCase(shrunk(self.failure, parts, max_runs), self.protocol)

    def save(self, path: Path) -> None:
        failure = self.failure
        row = {
            "schema": FAILURE_SCHEMA,
            "kind": "scope",
            "rule": failure.rule,
            "message": failure.message,
            "event": failure.event,
            "protocol": self.protocol,
            "scope": failure.scope.to_json(),
            "tape": failure.tape.to_json(),
        }
        write_failure(path, row)


def load_case(path: Path) -> ClusterCase | ScopeCase:
    """Raises ``TraceError`` for a file that is missing, damaged, of another schema or with a value that no
    run can have.
    """
    row = read_row(path)
    schema = row["schema"]
    if not 1 <= schema <= FAILURE_SCHEMA:
        raise TraceError(f"{path}: schema {schema}; this version reads up to {FAILURE_SCHEMA}, from 1 on")
    try:
        for name, kind in (("rule", str), ("message", str), ("event", int), ("protocol", str)):
            _require_type(name, row.get(name, kind()), kind)
        if row.get("kind", "cluster") == "scope":
            return _scope_case(row)
        return _cluster_case(row)
    except TraceError as error:
        raise TraceError(f"{path}: damaged: {error}") from error
    except KeyError as error:
        raise TraceError(f"{path}: damaged: it has no {error}") from error


def _cluster_case(row: dict[str, Any]) -> ClusterCase:
    scenario, faults = row["scenario"], row["faults"]
    _require_type("scenario", scenario, dict)
    _require_type("faults", faults, list)
    _check_fields(Scenario, {**scenario, "faults": []})
    for fault in faults:
        _require_type("fault", fault, dict)
        _check_fields(Fault, fault)
    event_ids = row.get("event_ids", [])
    _require_type("event_ids", event_ids, list)
    failure = Failure(
        Scenario.from_json({**scenario, "faults": faults}),
        Tape.from_json(row["tape"]),
        row["rule"],
        row.get("message", ""),
        row.get("event", -1),
        tuple(str(item) for item in event_ids),
        row.get("protocol", ""),
    )
    return ClusterCase(failure)


def _scope_case(row: dict[str, Any]) -> ScopeCase:
    scope = row["scope"]
    _require_type("scope", scope, dict)
    _check_fields(Scope, {**scope, "fault": None})
    if scope.get("fault") is not None:
        _require_type("fault", scope["fault"], dict)
        _check_fields(Fault, scope["fault"])
    failure = ScopeFailure(
        Scope.from_json(scope),
        Tape.from_json(row["tape"]),
        row["rule"],
        row.get("message", ""),
        row.get("event", -1),
    )
    return ScopeCase(failure, row.get("protocol", ""))


def _check_fields(cls: type, row: Mapping[str, Any]) -> None:
    """JSON has no types of its own: a field may hold anything until it is looked at."""
    hints = get_type_hints(cls)
    for name, value in row.items():
        if name in hints:  # an unknown one is refused where the object is made
            _require_type(name, value, hints[name])


def _require_type(name: str, value: object, kind: Any) -> None:
    if not _fits(value, kind):
        raise TraceError(f"{name}={value!r:.80}: expected {getattr(kind, '__name__', kind)}")


def _fits(value: object, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if origin is tuple:
        return isinstance(value, Sequence) and not isinstance(value, str)
    if kind is float:
        return type(value) in (int, float)
    if kind in (int, bool, str):
        return type(value) is kind
    return (kind is type(None) and value is None) or (isinstance(kind, type) and isinstance(value, kind))
