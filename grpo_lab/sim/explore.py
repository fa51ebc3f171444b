"""Exhaustive search of all schedules of a small scope, and shrinking of the one that fails.

A schedule is what the loop asked its tape; the number of lanes at every question is known only after
the run. So the search backtracks: run, then raise the last choice that has an untried alternative,
drop everything after it, and run again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from grpo_lab.sim.tape import Tape

Run = Callable[[Tape], Hashable]
_A_HANDFUL = 8  # choices; with more of them each is not looked at by itself
_SAMPLE = 300  # schedules with very few choices


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
    """A simpler tape that still fails: shorter, with fewer and smaller choices besides first in, first out.

    ``fails(tape)`` runs the tape, and says whether it fails in the same way. Returns ``tape`` in its
    canonical form when it does not fail at all. Deterministic, and greedy: a local minimum.

    What a choice means depends on all choices before it, so taking them back one by one gets stuck far from
    the least. Hence schedules with very few choices are tried first (after Emmi, Qadeer, Rakamaric,
    "Delay-bounded scheduling", POPL 2011); a race that needs more of them is left to delta debugging.
    """
    trial = _Trial(fails, max_runs)
    best = _stripped(tape.choices)
    if not trial(best):
        return tape
    best = _few_deviations(_shorten(best, trial), trial, min(_SAMPLE, max_runs // 2))
    before: list[int] | None = None
    while best != before and trial.runs < max_runs:
        before = best
        best = _stripped(_fewer(_shorten(best, trial), trial))
        if sum(map(bool, best)) <= _A_HANDFUL:
            best = _stripped(_earlier(_lower(best, trial), trial))
    return Tape(best)


class _Trial:
    """Whether choices fail, each asked once, up to a number of runs; then nothing fails any more."""

    def __init__(self, fails: Callable[[Tape], bool], max_runs: int) -> None:
        self._fails = fails
        self._max_runs = max_runs
        self._known: dict[tuple[int, ...], bool] = {}
        self.runs = 0
        self.asked: Sequence[int] = ()  # of the last run

    def __call__(self, choices: Sequence[int]) -> bool:
        key = tuple(_stripped(choices))
        if key not in self._known:
            if self.runs >= self._max_runs:
                return False
            self.runs += 1
            tape = Tape(choices)
            self._known[key] = self._fails(tape)
            self.asked = tape.asked
        return self._known[key]


def _stripped(choices: Sequence[int]) -> list[int]:
    """Without the zeros at the end, which change nothing."""
    end = len(choices)
    while end and choices[end - 1] == 0:
        end -= 1
    return list(choices[:end])


def _shorten(choices: list[int], fails: _Trial) -> list[int]:
    """The shortest failing beginning that halving finds (what follows it is first in, first out)."""
    low, high = 0, len(choices)
    while low < high:
        middle = (low + high) // 2
        if fails(choices[:middle]):
            high = middle
        else:
            low = middle + 1
    return choices[:high]


def _few_deviations(choices: list[int], fails: _Trial, max_runs: int) -> list[int]:
    """First in, first out but for one choice among the first ``len(choices)``, or two or three: a sample in
    a fixed order, the single ones to three quarters. ``choices`` when none of these fails.
    """
    if sum(map(bool, choices)) <= 1 or fails([0] * len(choices)):
        return choices
    source = random.Random(0)
    singles = [(place, lane) for place, asked in enumerate(fails.asked) for lane in range(1, asked)]
    source.shuffle(singles)
    alone = [[single] for single in singles[: max_runs * 3 // 4]]
    together = [source.sample(singles, 2 + n % 2) for n in range(max_runs - len(alone)) if len(singles) > 3]
    for deviations in (*alone, *together):
        trial = [0] * len(choices)
        for place, lane in deviations:
            trial[place] = lane
        if fails(trial):
            return _stripped(trial)
    return choices


def _fewer(choices: list[int], fails: _Trial) -> list[int]:
    """As few choices that are not zero as delta debugging finds.

    The non-zero ones are cut into parts; if one part alone fails it is all that is kept, else a part
    without which the rest fails is left out, else the parts are made smaller. Source: Zeller, Hildebrandt,
    "Simplifying and isolating failure-inducing input", IEEE TSE 28 (2002), the algorithm ddmin.
    """
    kept = [index for index, choice in enumerate(choices) if choice]
    count = 2

    def only(places: Sequence[int]) -> list[int]:
        wanted = frozenset(places)
        return [choice if index in wanted else 0 for index, choice in enumerate(choices)]

    while len(kept) > 1:
        count = min(count, len(kept))
        parts = [kept[len(kept) * n // count : len(kept) * (n + 1) // count] for n in range(count)]
        rests = [[place for place in kept if place not in part] for part in parts]
        if (alone := next((part for part in parts if fails(only(part))), None)) is not None:
            kept, count = alone, 2
        elif (rest := next((rest for rest in rests if fails(only(rest))), None)) is not None:
            kept, count = rest, max(count - 1, 2)
        elif count == len(kept):
            break
        else:
            count *= 2
    return only(kept)


def _lower(choices: list[int], fails: _Trial) -> list[int]:
    """Each non-zero choice to the smallest of 1, 2, ..., 8 that still fails."""
    for index in range(len(choices)):
        for smaller in range(1, min(choices[index], 9)):
            trial = [*choices[:index], smaller, *choices[index + 1 :]]
            if fails(trial):
                choices = trial
                break
    return choices


def _earlier(choices: list[int], fails: _Trial) -> list[int]:
    """The first zero before a choice left out that may be: what follows comes one decision earlier."""
    for index in range(len(choices)):
        trial = [*choices[:index], *choices[index + 1 :]]
        if choices[index] == 0 and fails(trial):
            return trial
    return choices
