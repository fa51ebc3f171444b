"""The canary: does the engine's arithmetic agree with the trainer's own forward pass?

It works on any engine, also on one that cannot check hashes. On fixed token sequences it compares
the engine's logprobs with those of the version that was published, and says how far that version is
from the one before (``separation``): a gap below the tolerance proves nothing when the two versions
are closer to each other than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_lab.errors import ConfigError

Outcome = Literal["holds", "fails", "inconclusive"]
Scores = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Canary:
    """Fixed token sequences and the largest |logprob difference| that is taken for rounding."""

    sequences: tuple[tuple[int, ...], ...]
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if not self.sequences or any(len(sequence) < 2 for sequence in self.sequences):
            raise ConfigError("canary sequences", self.sequences, "at least one, of two tokens or more each")
        if not 0 < self.tolerance < 10:
            raise ConfigError("canary tolerance", self.tolerance, "a logprob difference in (0, 10)")


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """``separation`` is None when there is no version before to compare with."""

    outcome: Outcome
    gap: float
    separation: float | None


def judge(engine: Scores, trainer: Scores, previous: Scores | None, tolerance: float) -> CanaryResult:
    """Fails above the tolerance; holds below it if the versions are 5 tolerances apart.

    >>> judge([[-1.0]], [[-1.0001]], [[-1.2]], tolerance=1e-3).outcome
    'holds'
    >>> judge([[-1.0]], [[-1.0001]], [[-1.0002]], tolerance=1e-3).outcome
    'inconclusive'
    >>> judge([[float("nan")]], [[-1.0]], None, tolerance=1e-3).outcome
    'fails'
    """
    gap = largest_difference(engine, trainer)
    separation = None if previous is None else largest_difference(trainer, previous)
    if not gap <= tolerance:
        return CanaryResult("fails", gap, separation)
    apart = separation is not None and separation >= 5 * tolerance
    return CanaryResult("holds" if apart else "inconclusive", gap, separation)


def largest_difference(left: Scores, right: Scores) -> float:
    """max |left - right|; NaN anywhere gives NaN, which no tolerance accepts.

    Raises:
        ValueError: when the two were not computed over the same tokens.
    """
    if [len(row) for row in left] != [len(row) for row in right]:
        raise ValueError("canary scores of different lengths: they are over different tokens")
    largest = 0.0
    for left_row, right_row in zip(left, right, strict=True):
        for a, b in zip(left_row, right_row, strict=True):
            difference = abs(a - b)
            if not difference <= largest:  # also true for NaN
                largest = difference
            if math.isnan(largest):
                return largest
    return largest
