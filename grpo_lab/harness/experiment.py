"""What an experiment is: a question, the runs that answer it, its figures, and how to read them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from grpo_lab.errors import ConfigError, DataError

if TYPE_CHECKING:  # slow to import: a sweep says what is wrong with its arguments first
    import pandas as pd
    from matplotlib.figure import Figure

Setting = str | int | float | bool | None
Label = Literal["simulated", "measured", "hybrid"]
"""hybrid: real learning (tokens, rewards, gradients) in virtual time."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep. Equal points have equal hashes, in every process and on every machine.

    Attributes:
        settings: what was chosen; the tidy columns of its row.
        seed: of everything in the run.
        label: how its seconds come about.
    """

    experiment: str
    settings: Mapping[str, Setting]
    seed: int = 0
    label: Label = "simulated"

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of everything that decides what the run does."""
        words = [self.experiment, sorted(self.settings.items()), self.seed, self.label]
        text = json.dumps(words, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        chosen = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{chosen}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run: ``seeds`` of every setting, and the large grid or the small one."""

    seeds: int = 3
    full: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= 1000:
            raise ConfigError("seeds", self.seeds, "from 1 to 1000")


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the reading guide, and whether these results bear it out."""

    words: str
    holds: bool
    evidence: str


@dataclass(frozen=True)
class Experiment:
    """One module of ``experiments/``.

    Attributes:
        question: what is asked, in one or two sentences.
        points: the runs, for a scale.
        run: does one of them in a folder of its own; returns its figures. Called in another process, so it
            is a function of a module.
        figures: matplotlib figures by name, from the tidy table (a row a run).
        claims: what the reading guide says, checked on the table.
        reading: how to read the figures, in two sentences each.
    """

    name: str
    question: str
    points: Callable[[Scale], Sequence[Point]]
    run: Callable[[Point, Path], Mapping[str, Setting]]
    figures: Callable[[pd.DataFrame], Mapping[str, Figure]]
    claims: Callable[[pd.DataFrame], Sequence[Claim]]
    reading: str
    workers: int | None = None
    """Runs at a time at most; 1 where runs measure this machine. None: as many as there are cores."""
    defaults: Mapping[str, Setting] = field(default_factory=lambda: MappingProxyType({}))
    """Settings that all runs share, for the reader of the table."""

    def distinct_points(self, scale: Scale) -> list[Point]:
        """The runs of a scale, each once. Raises ``DataError`` when there is none."""
        points = list({point.hash: point for point in self.points(scale)}.values())
        if not points:
            raise DataError(f"experiment {self.name} has no point at this scale")
        return points


def grid(axes: Mapping[str, Sequence[Setting]]) -> list[dict[str, Setting]]:
    """Every combination, the last axis fastest.

    >>> grid({"a": [1, 2], "b": ["x"]})
    [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]
    """
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def random_settings(axes: Mapping[str, Sequence[Setting]], count: int, seed: int) -> list[dict[str, Setting]]:
    """``count`` different combinations, drawn uniformly; all of them where there are not more."""
    combinations = grid(axes)
    if count >= len(combinations):
        return combinations
    chosen = random.Random(seed).sample(range(len(combinations)), count)
    return [combinations[index] for index in chosen]


def points_of(
    experiment: str, settings: Sequence[Mapping[str, Setting]], scale: Scale, label: Label = "simulated"
) -> list[Point]:
    """A point for every setting and seed, all settings of one seed before the next: halves compare."""
    return [Point(experiment, row, seed, label) for seed in range(scale.seeds) for row in settings]


def successive_halving(
    candidates: Sequence[Mapping[str, Setting]],
    budgets: Sequence[int],
    score: Callable[[Sequence[Mapping[str, Setting]], int], Sequence[float]],
    keep: float = 1 / 3,
) -> list[tuple[Mapping[str, Setting], float]]:
    """The best share of the candidates at each budget goes on to the next, larger one.

    Jamieson and Talwalkar 2016 (arXiv 1502.07943). NaN scores lose.

    Args:
        budgets: rising, for example optimizer steps of a run.
        score: higher is better; gets the settings that are left and the budget.
        keep: share of the candidates that survives a round; at least one does.

    Returns:
        The survivors of the last round with their scores, best first.
    """
    if not candidates:
        raise ConfigError("candidates", candidates, "at least one setting")
    if not budgets or list(budgets) != sorted(set(budgets)):
        raise ConfigError("budgets", budgets, "rising numbers")
    if not 0 < keep < 1:
        raise ConfigError("keep", keep, "between 0 and 1")
    left = list(candidates)
    ranked: list[tuple[Mapping[str, Setting], float]] = []
    for number, budget in enumerate(budgets):
        scores = [-math.inf if math.isnan(value) else value for value in score(left, budget)]
        order = sorted(range(len(left)), key=lambda index: (-scores[index], index))
        last = number == len(budgets) - 1
        kept = order if last else order[: max(1, int(len(order) * keep))]
        ranked = [(left[index], scores[index]) for index in kept]
        left = [settings for settings, _ in ranked]
    return ranked


def row_of(point: Point, result: Mapping[str, Any]) -> dict[str, Any]:
    """A tidy row. A figure may not have the name of a setting."""
    reserved = {"experiment", "config", "seed", "label", *point.settings}
    clash = sorted(reserved & result.keys())
    if clash:
        raise ConfigError("result", clash, "figures with names of their own, not those of settings")
    head = {"experiment": point.experiment, "config": point.hash, "seed": point.seed, "label": point.label}
    return {**head, **point.settings, **result}
