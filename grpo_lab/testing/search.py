"""Searches simulated clusters for runs that break a rule, and makes what it finds small."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings, target
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from grpo_lab.errors import ConfigError, InvariantViolation
from grpo_lab.events import Record
from grpo_lab.sim.explore import shrink
from grpo_lab.sim.light_trainer import CoordinatorType
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import Failure, Scenario
from grpo_lab.sim.tape import Tape
from grpo_lab.sim.world import simulate
from grpo_lab.testing.coordinators import MUTANT, load_coordinator
from grpo_lab.testing.strategies import churn, clusters, faults, tapes

EXAMPLES_PER_ROUND = 200
SHRINK_EXAMPLES, SHRINK_RUNS = 100, 400  # of a failure's scenario, then of its schedule

QUIET = Scenario(engines=2, steps=4, max_staleness=2, canary=True)
PROMPT = dataclasses.replace(
    QUIET, canary=False, network_s=0.0, jitter=0.0, bandwidth_bytes_s=1e15, reward_s=0.0
)
"""Messages take no time: whatever may happen together is ready together, and the schedule decides."""
SCENARIOS: dict[str, tuple[str, st.SearchStrategy[Scenario]]] = {
    "any": ("every cluster, work, delay and fault", clusters()),
    "quiet": ("every cluster, work and delay, no fault", clusters(with_faults=False)),
    "faults": (
        "one small cluster, every fault",
        faults(QUIET.engines).map(lambda drawn: dataclasses.replace(QUIET, faults=drawn)),
    ),
    "churn": ("engines that die and come back, again and again", churn()),
    "schedules": (
        "small clusters without a fault or delay, every schedule",
        st.builds(dataclasses.replace, st.just(PROMPT), engines=st.integers(1, 2), steps=st.integers(1, 4)),
    ),
}


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What became of a failing schedule: its choices, and how many of them are not first in, first out."""

    before: Tape
    after: Tape
    runs: int

    def __str__(self) -> str:
        unusual, left = self.before.unusual, self.after.unusual
        return (
            f"schedule: {unusual} of its {len(self.before.choices)} choices were not first in, first out; "
            f"{left} of {len(self.after.choices)} after {self.runs} runs"
        )


@dataclass(slots=True)
class Search:
    """What a search has seen so far. ``found`` holds the smallest failure of each rule, and ``schedules`` how
    its schedule was made small.
    """

    examples: int = 0
    virtual_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)
    staleness: int = 0
    overlap: int = 0
    queue_depth: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    found: dict[str, Failure] = field(default_factory=dict)
    schedules: dict[str, Shrunk] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def per_minute(self) -> float:
        return 60 * self.examples / max(self.wall_s, 1e-9)

    def __str__(self) -> str:
        return (
            f"{self.examples:,} clusters ({self.per_minute:,.0f} a minute, "
            f"{self.virtual_s / max(self.wall_s, 1e-9):,.0f} virtual seconds a second), at most: staleness "
            f"{self.staleness}, in flight at a sync {self.overlap}, queued {self.queue_depth}; "
            f"{len(self.found)} rules broken"
        )


def run_once(scenario: Scenario, tape: Tape, coordinator: CoordinatorType, name: str = "") -> Failure | None:
    """The failure of this very run, or None. ``name`` is written into it as its protocol."""
    return run_with(scenario, tape, Parts(coordinator=coordinator), name)


def run_with(scenario: Scenario, tape: Tape, parts: Parts, name: str = "") -> Failure | None:
    """The same with other classes for any part of the cluster."""
    failure, _ = _run(scenario, tape, parts, name)
    return failure


def search(
    strategy: st.SearchStrategy[Scenario],
    *,
    minutes: float,
    max_examples: int = 10**9,
    parts: Parts | None = None,
    name: str = "",
    first_seed: int = 0,
    on_example: Callable[[Search], None] = lambda _: None,
) -> Search:
    """Rounds of Hypothesis, each with its own seed, steered to large staleness, overlap and queues.

    A round ends at its first failure, which Hypothesis shrinks, and its schedule is shrunk after that.
    Nothing is raised for a failure: it is in ``found``, the smallest of each rule.
    """
    state = Search()
    parts = parts or Parts()
    deadline_s = state.began_s + 60 * minutes
    number = 0

    def over() -> bool:
        return time.monotonic() >= deadline_s or state.examples >= max_examples

    while not over():
        left = min(EXAMPLES_PER_ROUND, max_examples - state.examples)
        smallest = _round(strategy, first_seed + number, left, state, parts, name, over, on_example)
        number += 1
        if smallest is not None:
            known = state.found.get(smallest.rule)
            smallest, shrunk = with_short_tape(smallest, parts)
            if known is None or size_of(smallest) < size_of(known):
                state.found[smallest.rule] = smallest
                state.schedules[smallest.rule] = shrunk
    return state


def size_of(failure: Failure) -> tuple[int, int, int, int, int]:
    """What counts as small: faults, engines, steps, choices that are not first in first out, samples."""
    scenario = failure.scenario
    samples = scenario.prompts_per_step * scenario.generations
    return (len(scenario.faults), scenario.engines, scenario.steps, failure.tape.unusual, samples)


def load_parts(protocol: str) -> Parts:
    """What a failure file's protocol stands for: "", a coordinator, or ``mutant:`` and the id of one.

    Raises ``ConfigError`` for what is neither.
    """
    if not protocol.startswith(MUTANT):
        return Parts(coordinator=load_coordinator(protocol))
    from grpo_lab.testing.mutants.catalogue import find  # noqa: PLC0415 - it loads every mutant
    from grpo_lab.testing.mutants.clusters import Clusters  # noqa: PLC0415

    mutant = find(protocol.removeprefix(MUTANT), real=False)  # the real trainer takes seconds
    if not isinstance(mutant.fixture, Clusters):
        raise ConfigError(
            "coordinator", protocol, f"one of a whole cluster, and it is one of {mutant.fixture.name}"
        )
    return Parts(**{**mutant.fixture.environment, **mutant.planted})


def save_all(found: dict[str, Failure], directory: Path) -> list[Path]:
    """A file for each rule; an older file of the same rule is kept under its own name."""
    paths = []
    for rule, failure in sorted(found.items()):
        path = next_free(directory, rule)
        failure.save(path)
        paths.append(path)
    return paths


def next_free(directory: Path, rule: str) -> Path:
    """Where a failure of ``rule`` goes."""
    number = 1
    while (path := directory / f"{rule}-{number}.json").exists():
        number += 1
    return path


def _round(
    strategy: st.SearchStrategy[Scenario],
    round_seed: int,
    examples: int,
    state: Search,
    parts: Parts,
    name: str,
    over: Callable[[], bool],
    on_example: Callable[[Search], None],
) -> Failure | None:
    failures: list[Failure] = []
    left = math.inf

    @seed(round_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=(Phase.generate, Phase.target, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy, tapes())
    def examine(scenario: Scenario, tape: Tape) -> None:
        nonlocal left
        left -= 1
        if left < 0 or (over() and not failures):
            return
        failure, measures = _run(scenario, tape, parts, name, state)
        on_example(state)
        if failure is not None:
            if not failures:
                left = SHRINK_EXAMPLES
            failures.append(failure)
            raise AssertionError(failure.rule)
        for label, value in measures.items():
            target(value, label=label)

    with suppress(AssertionError, Flaky):  # Flaky: it was not shrunk any further
        examine()
    return min(failures, key=size_of, default=None)


def _run(
    scenario: Scenario, tape: Tape, parts: Parts, name: str, state: Search | None = None
) -> tuple[Failure | None, dict[str, float]]:
    records: list[Record] = []
    measures: dict[str, float] = {}
    error: Exception | None = None
    try:
        result = simulate(scenario, tape, parts=parts, records=records)
        seen = result.value.measures
        measures = {"staleness": seen.staleness, "overlap": seen.overlap, "queue depth": seen.queue_depth}
        if state is not None:
            state.marks.update(result.value.marks.keys())
            state.staleness = max(state.staleness, seen.staleness)
            state.overlap = max(state.overlap, seen.overlap)
            state.queue_depth = max(state.queue_depth, seen.queue_depth)
    except Exception as raised:  # whatever ends a simulation is a finding
        error = raised
    if state is not None:
        state.examples += 1
        state.virtual_s += records[-1].t if records else 0.0
    if error is None:
        return None, measures
    violation = error if isinstance(error, InvariantViolation) else None
    rule = violation.rule if violation is not None else type(error).__name__
    event_ids = violation.event_ids if violation is not None else ()
    return (
        Failure(scenario, tape.canonical(), rule, str(error), len(records) - 1, event_ids, name),
        measures,
    )


def with_short_tape(failure: Failure, parts: Parts, max_runs: int = SHRINK_RUNS) -> tuple[Failure, Shrunk]:
    """The same rule broken under a schedule as close to first in, first out as can be found quickly."""
    best, runs = failure, 0

    def same(tape: Tape) -> bool:
        nonlocal best, runs
        runs += 1
        again = run_with(failure.scenario, tape, parts, failure.protocol)
        if again is None or again.rule != failure.rule:
            return False
        best = again
        return True

    if any(failure.tape.choices):
        same(shrink(failure.tape, same, max_runs=max_runs))
    return best, Shrunk(failure.tape, best.tape, runs)
