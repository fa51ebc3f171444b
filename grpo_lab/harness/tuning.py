"""Searches recipe fields in simulation: a Pareto front of objective and staleness, and one recommendation.

Candidates are drawn from a grid, simulated with a calibration for a few optimizer steps, and the better half
of each round goes on to a longer one (successive halving). The best are those on the outer layers of the
front (non-dominated sorting, Deb et al. 2002), so that a candidate with little staleness is not thrown out
by a faster one that has more. Two candidates of one round meet the same seeds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from grpo_lab.errors import ConfigError, GrpoLabError
from grpo_lab.harness.calibration import Calibration
from grpo_lab.harness.experiment import Setting, random_settings, successive_halving
from grpo_lab.harness.recipe import Recipe, recipe_with
from grpo_lab.harness.tuning_constraints import Constraint, Objective
from grpo_lab.harness.validation import predict, recipe_parameters
from grpo_lab.harness.validation_figures import Figures
from grpo_lab.trainer.interrupts import children_born_deaf, children_ended_early

Settings = Mapping[str, Setting]
Evaluate = Callable[[Sequence[Settings], int], Sequence[Figures | None]]
"""Figures of candidates after so many optimizer steps; None for one that cannot run."""

BUDGETS = (6, 12, 24)
KEEP = 1 / 2
STALENESS = "staleness_mean"
SEARCHED = (
    "max_staleness",
    "weight_sync_steps",
    "max_inflight",
    "queue_capacity",
    "pause_mode",
    "sync_scope",
    "clear_cache",
    "staleness_policy",
    "window",
    "prompts_per_step",
    "num_generations",
    "bucket_bytes",
    "engines",
)
"""Fields whose effect on time the simulation knows. Threads and models it does not."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """``figures`` of the longest round that it was in."""

    settings: Settings
    figures: Figures
    feasible: bool
    steps: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """``front`` by staleness, lowest first. ``default`` is the recipe as it is, in the longest round."""

    recipe: Recipe
    objective: Objective
    constraints: tuple[Constraint, ...]
    recommended: Candidate | None
    default: Candidate
    front: tuple[Candidate, ...]
    simulated: int

    def recipe_of(self, candidate: Candidate) -> Recipe:
        return recipe_with(candidate.settings, self.recipe)


def default_space(recipe: Recipe) -> dict[str, list[Setting]]:
    """What is searched unless told otherwise: nothing that changes what is learned from a batch."""
    inflight = recipe.max_inflight
    space: dict[str, set[int]] = {
        "max_staleness": {0, 1, 2, 4, recipe.max_staleness},
        "weight_sync_steps": {1, 2, 4, recipe.weight_sync_steps},
        "max_inflight": {max(recipe.num_generations, inflight // 2), inflight, inflight * 2},
    }
    words: dict[str, list[Setting]] = {"pause_mode": ["keep", "wait", "abort"], "clear_cache": [True, False]}
    return {**{name: [*sorted(values)] for name, values in space.items()}, **words}


def parse_space(words: Sequence[str], recipe: Recipe) -> dict[str, list[Setting]]:
    """``field=value,value`` words. Raises ``ConfigError`` for a field that is not searched or a bad value."""
    space: dict[str, list[Setting]] = {}
    for word in words:
        name, equals, texts = word.partition("=")
        if not equals or name not in SEARCHED:
            raise ConfigError("over", word, f"FIELD=VALUE,VALUE with a field of {', '.join(SEARCHED)}")
        space[name] = [_value(text.strip(), getattr(recipe, name), word) for text in texts.split(",")]
        for value in space[name]:
            recipe_with({name: value}, recipe)  # its own complaint
    return space


def _value(text: str, like: Any, word: str) -> Setting:
    """Of the type that the recipe's own value has."""
    if isinstance(like, bool):
        if text in ("true", "false"):
            return text == "true"
        raise ConfigError("over", word, "true or false")
    if isinstance(like, int):
        try:
            return int(text)
        except ValueError:
            raise ConfigError("over", word, f"integers, like {like}") from None
    return text


def candidates_of(
    recipe: Recipe, space: Mapping[str, Sequence[Setting]], count: int, seed: int
) -> list[Settings]:
    """The recipe itself ({}), and up to ``count`` different recipes from the grid that can exist."""
    found: list[Settings] = [{}]
    for settings in random_settings(space, count, seed):
        changed = {name: value for name, value in settings.items() if value != getattr(recipe, name)}
        try:
            recipe_with(changed, recipe)
        except ConfigError:
            continue  # for example fewer requests in flight than a group has
        if changed not in found:
            found.append(changed)
    return found


@dataclass(frozen=True, slots=True)
class Simulator:
    """An ``Evaluate``: mean figures over ``seeds`` runs of each candidate, in the pool or right here."""

    recipe: Recipe
    calibration: Calibration
    seeds: int = 1
    pool: Executor | None = None

    def __call__(self, candidates: Sequence[Settings], steps: int) -> list[Figures | None]:
        one = functools.partial(_simulated, self.recipe, self.calibration, self.seeds, steps)
        if self.pool is None:
            return list(map(one, candidates))
        with children_born_deaf():
            jobs = [self.pool.submit(one, candidate) for candidate in candidates]
        with children_ended_early():
            return [job.result() for job in jobs]


def _simulated(
    recipe: Recipe, calibration: Calibration, seeds: int, steps: int, settings: Settings
) -> Figures | None:
    """None for a candidate whose simulation fails: it may starve, or never fill its batch."""
    parameters = recipe_parameters(recipe_with(settings, recipe))
    try:
        return merged_figures(predict(parameters, calibration, seeds, steps))
    except GrpoLabError:
        return None


def merged_figures(runs: Sequence[Figures]) -> Figures:
    """Means over runs; counts of staleness added up."""
    if len(runs) == 1:
        return runs[0]
    values: dict[str, Any] = {}
    for name in Figures.__dataclass_fields__:
        known = [value for run in runs if (value := getattr(run, name)) is not None]
        if name == "staleness":
            ages = sorted({age for counts in known for age in counts})
            values[name] = {age: sum(counts.get(age, 0) for counts in known) for age in ages}
        elif name == "staleness_max":
            values[name] = max(known)
        else:
            values[name] = sum(known) / len(known) if known else None
    return Figures(**values)


def tune(
    recipe: Recipe,
    candidates: Sequence[Settings],
    evaluate: Evaluate,
    objective: Objective,
    constraints: Sequence[Constraint],
    budgets: Sequence[int] = BUDGETS,
) -> Tuned:
    """Raises ``ConfigError`` when not even the recipe as it is can be simulated."""
    search = _Search(evaluate, objective, tuple(constraints))
    successive_halving(candidates, budgets, search.score, keep=KEEP)
    last = [one for one in search.seen.values() if one.steps == budgets[-1]]
    default = search.seen.get(_key({}))
    if default is None or default.steps != budgets[-1]:
        search.score([{}], budgets[-1])
        default = search.seen.get(_key({}))
    if default is None:
        raise ConfigError("recipe", recipe.name, "a recipe that can be simulated to its end")
    feasible = [one for one in (*last, default) if one.feasible]
    best = max(feasible, key=lambda one: objective.score(one.figures), default=None)
    return Tuned(
        recipe,
        objective,
        tuple(constraints),
        best,
        default,
        tuple(front_of([*last, default], objective)),
        search.simulated,
    )


@dataclass(slots=True)
class _Search:
    """Scores rounds and remembers what each candidate was like in its longest one."""

    evaluate: Evaluate
    objective: Objective
    constraints: tuple[Constraint, ...]
    seen: dict[Any, Candidate] = field(default_factory=dict)
    simulated: int = 0

    def score(self, candidates: Sequence[Settings], steps: int) -> list[float]:
        """Feasible ones by layer of the front and then by objective; others by how far they miss."""
        self.simulated += len(candidates)
        found = self.evaluate(candidates, steps)
        rows: list[Candidate | None] = []
        for settings, figures in zip(candidates, found, strict=True):
            if figures is None:
                rows.append(None)
                continue
            feasible = all(constraint.holds(figures) for constraint in self.constraints)
            rows.append(Candidate(settings, figures, feasible, steps))
            self.seen[_key(settings)] = rows[-1]  # type: ignore[assignment]
        layers = _layers([row for row in rows if row is not None and row.feasible], self.objective)
        return [self._score(row, layers) for row in rows]

    def _score(self, row: Candidate | None, layers: Mapping[Any, float]) -> float:
        if row is None:
            return -math.inf
        if row.feasible:
            return -layers[_key(row.settings)]
        return -1e6 - sum(constraint.excess(row.figures) for constraint in self.constraints)


def _layers(rows: Sequence[Candidate], objective: Objective) -> dict[Any, float]:
    """Number of the front that each is on, and a fraction by its objective."""
    found: dict[Any, float] = {}
    left = list(rows)
    order = sorted(rows, key=lambda row: -objective.score(row.figures))
    rank = {_key(row.settings): number / (len(rows) + 1) for number, row in enumerate(order)}
    layer = 0
    while left:
        front = front_of(left, objective)
        found.update({_key(row.settings): layer + rank[_key(row.settings)] for row in front})
        keys = {_key(row.settings) for row in front}
        left = [row for row in left if _key(row.settings) not in keys]
        layer += 1
    return found


def front_of(rows: Sequence[Candidate], objective: Objective) -> list[Candidate]:
    """Those that no other one beats in objective and mean staleness both; lowest staleness first."""
    order = sorted(rows, key=lambda row: (getattr(row.figures, STALENESS), -objective.score(row.figures)))
    front: list[Candidate] = []
    best = -math.inf
    for row in order:
        if (value := objective.score(row.figures)) > best:
            front.append(row)
            best = value
    return front


def _key(settings: Settings) -> tuple[tuple[str, Setting], ...]:
    return tuple(sorted(settings.items()))
