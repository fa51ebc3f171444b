"""Searches one fixture until a rule fires, and makes the case small."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky, HypothesisWarning, Unsatisfiable

from grpo_lab.testing.mutants.mutant import Finding, Fixture, Only

EXAMPLES_PER_ROUND = 100


@dataclass(slots=True)
class Hunt:
    """``seconds`` and ``examples`` are those until the rule fired first, without what came after to make the
    case small. ``others`` counts findings of rules that were not asked for.
    """

    examples: int = 0
    seconds: float = 0.0
    found: tuple[Any, Finding] | None = None
    others: Counter[str] = field(default_factory=Counter)


def hunt(
    fixture: Fixture[Any],
    planted: Any,
    only: Only,
    *,
    seconds: float,
    shrink_s: float = 0.0,
    max_examples: int = 10**9,
    first_seed: int = 0,
) -> Hunt:
    """Rounds of Hypothesis, each from its own fixed seed: the same call searches the same cases. How far the
    time reaches is all that differs from machine to machine.
    """
    state = Hunt()
    began_s = time.monotonic()
    number = 0
    while state.found is None and not _over(state, began_s, seconds, max_examples):
        left = min(EXAMPLES_PER_ROUND, max_examples - state.examples)
        _round(fixture, planted, only, state, first_seed + number, left, began_s, seconds, shrink_s)
        number += 1
    if state.found is None:
        state.seconds = time.monotonic() - began_s
    elif shrink_s:
        _make_smaller(fixture, planted, state, shrink_s)
    return state


def _over(state: Hunt, began_s: float, seconds: float, max_examples: int) -> bool:
    return time.monotonic() - began_s >= seconds or state.examples >= max_examples


def _round(
    fixture: Fixture[Any],
    planted: Any,
    only: Only,
    state: Hunt,
    round_seed: int,
    examples: int,
    began_s: float,
    seconds: float,
    shrink_s: float,
) -> None:
    until_s = began_s + seconds
    phases = (Phase.generate, Phase.shrink) if shrink_s else (Phase.generate,)

    @seed(round_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(fixture.cases())
    def examine(case: Any) -> None:
        nonlocal until_s
        if time.monotonic() >= until_s:
            return
        wanted = only if state.found is None else frozenset({state.found[1].rule})
        searching = state.found is None
        finding = fixture.run(case, planted, wanted, lambda rule: state.others.update([rule]))
        state.examples += searching
        if finding is None:
            return
        if searching:
            state.seconds = time.monotonic() - began_s
            until_s = time.monotonic() + shrink_s
            state.found = (case, finding)
        elif state.found is not None and fixture.size(case) < fixture.size(state.found[0]):
            state.found = (case, finding)
        raise AssertionError(finding.rule)

    # Flaky: time ran out while the case was being made small.
    with warnings.catch_warnings(), suppress(AssertionError, Flaky, Unsatisfiable):
        warnings.simplefilter("ignore", HypothesisWarning)  # a schedule is long to print
        examine()


def _make_smaller(fixture: Fixture[Any], planted: Any, state: Hunt, shrink_s: float) -> None:
    assert state.found is not None
    rule = state.found[1].rule
    until_s = time.monotonic() + shrink_s

    def fails(case: Any) -> bool:
        if time.monotonic() > until_s:
            return False
        finding = fixture.run(case, planted, frozenset({rule}), lambda _: None)
        if finding is None:
            return False
        state.found = (case, finding)
        return True

    fixture.smaller(state.found[0], fails)
