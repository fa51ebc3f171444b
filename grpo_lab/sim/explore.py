"""Exhaustive search of all schedules of a small scope, and shrinking of the one that fails.

A schedule is what the loop asked its tape; the number of lanes at every question is known only after
the run. So the search backtracks: run, then raise the last choice that has an untried alternative,
drop everything after it, and run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from grpo_lab.sim.tape import Tape

Run = Callable[[Tape], Hashable]


@dataclass(frozen=True, slots=True)
class FailingSchedule:
    """``tape`` makes the run raise ``error``."""

    tape: Tape
    error: Exception


@dataclass(slots=True)
class Exploration:
    """What a search did.

    Attributes:
        depth: decisions per run that were varied; later ones are first in, first out.
        runs: schedules tried, each different.
        complete: every schedule to ``depth`` was tried.
        deepest: the largest number of decisions (up to ``depth``) in a run. Below ``depth``, every
            schedule of the program at all was tried.
        outcomes: how often each value of the run function was met.
        failures: the first ``keep_failures`` schedules whose run raised.
        failed_runs: how many raised.
    """

    depth: int
    runs: int = 0
    complete: bool = False
    deepest: int = 0
    outcomes: Counter[Hashable] = field(default_factory=Counter)
    failures: list[FailingSchedule] = field(default_factory=list)
    failed_runs: int = 0

    def __str__(self) -> str:
        how = "all" if self.complete else "not all"
        return (
            f"{self.runs} schedules ({how} to a depth of {self.depth} decisions; longest {self.deepest}), "
            f"{len(self.outcomes)} outcomes, {self.failed_runs} failed"
        )


def explore(
    run: Run,
    depth: int,
    *,
    max_runs: int = 100_000,
    stop_at_failure: bool = True,
    keep_failures: int = 10,
) -> Exploration:
    """Runs ``run(tape)`` under every schedule that differs in its first ``depth`` decisions.

    ``run`` must give the tape to one simulation. Its (hashable) value is counted as an outcome, e.g. a
    digest of the trace or a set of covered edges. An ``Exception`` is a failing schedule;
    anything else (``KeyboardInterrupt``) ends the search.
    """
    found = Exploration(depth)
    prefix: list[int] | None = []
    while prefix is not None and found.runs < max_runs:
        tape = Tape(prefix + [0] * (depth - len(prefix)))
        failure: Exception | None = None
        try:
            found.outcomes[run(tape)] += 1
        except Exception as error:
            failure = error
        found.runs += 1
        found.deepest = max(found.deepest, len(tape.asked))
        if failure is not None:
            found.failed_runs += 1
            if len(found.failures) < keep_failures:
                found.failures.append(FailingSchedule(tape.canonical(), failure))
            if stop_at_failure:
                return found
        prefix = _next_prefix(tape.taken, tape.asked)
    found.complete = prefix is None
    return found


def _next_prefix(taken: Sequence[int], asked: Sequence[int]) -> list[int] | None:
    """The next schedule in depth-first order, or None when there is none."""
    for position in range(len(taken) - 1, -1, -1):
        if taken[position] + 1 < asked[position]:
            return [*taken[:position], taken[position] + 1]
    return None


def shrink(tape: Tape, fails: Callable[[Tape], bool], *, max_runs: int = 2_000) -> Tape:
    """A simpler tape that still fails: shorter first, then more zeros, then smaller choices.

    ``fails(tape)`` runs the case and says whether the failure is the same one. Returns ``tape`` in its
    canonical form when it does not fail at all. Deterministic; greedy, so a local minimum.
    """
    budget = [max_runs]

    def still_fails(choices: Sequence[int]) -> bool:
        if budget[0] <= 0:
            return False
        budget[0] -= 1
        return fails(Tape(choices))

    best = list(Tape(tape.choices).choices)
    if not still_fails(best):
        return tape
    while budget[0] > 0:
        before = list(best)
        best = _shorten(best, still_fails)
        best = _zero_chunks(best, still_fails)
        best = _lower(best, still_fails)
        if best == before:
            break
    return Tape(best)


def _shorten(choices: list[int], still_fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """The shortest failing beginning that halving finds (what follows it is first in, first out)."""
    low, high = 0, len(choices)
    while low < high:
        middle = (low + high) // 2
        if still_fails(choices[:middle]):
            high = middle
        else:
            low = middle + 1
    return choices[:high]


def _zero_chunks(choices: list[int], still_fails: Callable[[Sequence[int]], bool]) -> list[int]:
    size = len(choices)
    while size >= 1:
        for start in range(0, len(choices), size):
            chunk = choices[start : start + size]
            if any(chunk):
                trial = [*choices[:start], *([0] * len(chunk)), *choices[start + size :]]
                if still_fails(trial):
                    choices = trial
        size //= 2
    return choices


def _lower(choices: list[int], still_fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Each non-zero choice to the smallest of 1, 2, ..., 8 that still fails; and one decision earlier."""
    for index in range(len(choices)):
        for smaller in range(1, min(choices[index], 9)):
            trial = [*choices[:index], smaller, *choices[index + 1 :]]
            if still_fails(trial):
                choices = trial
                break
    for index in range(len(choices)):
        if choices[index] == 0:
            trial = [*choices[:index], *choices[index + 1 :]]
            if any(choices[index + 1 :]) and still_fails(trial):
                return trial
    return choices
