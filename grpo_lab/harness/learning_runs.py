"""Real learning in virtual time, as a tidy row: what an experiment over staleness asks of a run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from grpo_lab.events import Evaluated, GroupConsumed, OptimizerStepApplied, Record, StepPlanned
from grpo_lab.harness.experiment import Point, Setting
from grpo_lab.harness.progress import RunProgress
from grpo_lab.harness.recipe import RECIPES, Recipe, recipe_with
from grpo_lab.harness.run_dir import make_run_dir
from grpo_lab.harness.runner import declaration, model_of
from grpo_lab.harness.simulated import simulate, trace_recorder
from grpo_lab.harness.training import EvaluateEvery
from grpo_lab.sim.speeds import Speeds

ESS = "sampling/effective_sample_size"
RATIO = "sampling/importance_sampling_ratio/mean"
MOST_SEQUENCES = 512
LAST_EVALUATIONS = 3
LEARNING = recipe_with(
    {
        "name": "learning",
        "world": "sim",
        "prompts_per_step": 16,
        "num_generations": 8,
        "heldout_prompts": 256,
        "correction": "none",
    },
    RECIPES["quickstart"][1],
)
"""Half the quickstart's batch: staleness shows within 30 steps."""
LAST_SHARE = 0.25
FAST_ENGINES = Speeds(
    engine_step_s=0.03, engine_sequence_s=2e-5, trainer_step_s=0.5, trainer_token_s=1.5e-4, link_s=1e-4
)
"""An engine that is bound by latency: a batch takes about half an optimizer step, four at once little more.

So samples grow as old as the bound lets them, and a trainer that may use stale ones never waits.
"""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One optimizer step. ``at_s`` counts from the first plan; ``staleness`` is a mean over groups.

    ``ess`` and ``ratio``: None in a step whose samples have no signal, so that none was scored.
    """

    at_s: float
    reward: float
    staleness: float
    staleness_max: int
    ess: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """``accuracies``: (optimizer step, virtual seconds since the first plan, greedy held-out accuracy)."""

    steps: tuple[StepFigures, ...]
    accuracies: tuple[tuple[int, float, float], ...]

    def row(self) -> dict[str, Setting]:
        """The figures of a tidy row; ``*_series`` are JSON lists, one entry a step or an evaluation."""
        before = self.accuracies[0][2]
        after = statistics.fmean(value for _, _, value in self.accuracies[-LAST_EVALUATIONS:])
        last = self.steps[-max(1, round(len(self.steps) * LAST_SHARE)) :]
        return {
            "accuracy_before": before,
            "accuracy_after": after,
            "reward_last": statistics.fmean(step.reward for step in last),
            "staleness_mean": statistics.fmean(step.staleness for step in self.steps),
            "staleness_last": statistics.fmean(step.staleness for step in last),
            "staleness_max": max(step.staleness_max for step in self.steps),
            "ess_last": _mean(step.ess for step in last),
            "ratio_last": _mean(step.ratio for step in last),
            "virtual_s": self.steps[-1].at_s,
            "step_s": self.steps[-1].at_s / len(self.steps),
            "at_s_series": _series(step.at_s for step in self.steps),
            "reward_series": _series(step.reward for step in self.steps),
            "staleness_series": _series(step.staleness for step in self.steps),
            "ess_series": _series(step.ess for step in self.steps),
            "ratio_series": _series(step.ratio for step in self.steps),
            "accuracy_step_series": _series(step for step, _, _ in self.accuracies),
            "accuracy_at_s_series": _series(at_s for _, at_s, _ in self.accuracies),
            "accuracy_series": _series(value for _, _, value in self.accuracies),
        }


def run_learning(recipe: Recipe, folder: Path, *, evaluate_every: int, speeds: Speeds) -> LearningCurve:
    """Trains in virtual time on engines that hold as many sequences as the bound lets in.

    Raises what training raised.
    """
    recorder, directory = trace_recorder(), make_run_dir(folder, recipe.name)
    with RunProgress(Console(quiet=True), recipe.steps) as progress:
        simulate(
            recipe,
            directory,
            model_of(recipe, progress),
            declaration(recipe),
            recorder,
            progress.step,
            speeds=speeds,
            max_num_seqs=MOST_SEQUENCES,
            callbacks=lambda trainer: [EvaluateEvery(trainer, recipe, evaluate_every)],
        )
    return read_learning(recorder.records)


def run_point(
    point: Point,
    folder: Path,
    base: Recipe,
    *,
    bound: int,
    fields: Mapping[str, Setting],
    evaluate_every: int,
) -> dict[str, Setting]:
    """The run of a point whose samples may be ``bound`` versions old, as a row.

    ``fields`` are the recipe's that the point decides; all that it leaves open is as ``base`` says.
    """
    own = {"name": point.experiment, "max_staleness": bound, "seed": point.seed}
    room = room_for(bound, base.prompts_per_step, base.num_generations)
    recipe = recipe_with({**own, **fields, **room}, base)
    return run_learning(recipe, folder, evaluate_every=evaluate_every, speeds=FAST_ENGINES).row()


def room_for(bound: int, prompts_per_step: int, num_generations: int) -> dict[str, int]:
    """Recipe fields that let samples grow ``bound`` versions old: all that is admitted is dispatched."""
    groups = (bound + 1) * prompts_per_step
    return {"max_inflight": groups * num_generations, "queue_capacity": groups}


def read_learning(records: Sequence[Record]) -> LearningCurve:
    """What a trace says."""
    began_s = next(record.t for record in records if isinstance(record.event, StepPlanned))
    ages: dict[int, list[int]] = {}
    steps: list[StepFigures] = []
    accuracies: list[tuple[int, float, float]] = []
    for record in records:
        event = record.event
        if isinstance(event, GroupConsumed):
            ages.setdefault(event.optimizer_step, []).append(event.version - min(event.versions_first))
        elif isinstance(event, OptimizerStepApplied):
            steps.append(_step(event, record.t - began_s, ages[event.optimizer_step]))
        elif isinstance(event, Evaluated):
            accuracies.append((event.optimizer_step, max(0.0, record.t - began_s), event.accuracy))
    return LearningCurve(tuple(steps), tuple(accuracies))


def _step(event: OptimizerStepApplied, at_s: float, ages: Sequence[int]) -> StepFigures:
    reward = float("nan") if event.reward_mean is None else event.reward_mean
    scored = ESS in event.metrics
    ess, ratio = (float(event.metrics[name]) if scored else None for name in (ESS, RATIO))
    return StepFigures(at_s, reward, statistics.fmean(ages), max(ages), ess, ratio)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _series(values: Iterable[float | None]) -> str:
    return json.dumps([None if value is None else round(value, 5) for value in values], separators=(",", ":"))


def long_table(table: pd.DataFrame, series: Mapping[str, str], keep: Sequence[str]) -> pd.DataFrame:
    """A row an entry of the series: ``series`` is column of the table -> column of the result.

    ``keep`` are columns of the run that every entry carries; ``place`` counts the entries from 0.
    """
    return pd.DataFrame(_entries(table, series, keep), columns=[*keep, "place", *series.values()])


def _entries(
    table: pd.DataFrame, series: Mapping[str, str], keep: Sequence[str]
) -> Iterator[dict[str, object]]:
    for _, run in table.iterrows():
        columns = [json.loads(run[name]) for name in series]
        for place, values in enumerate(zip(*columns, strict=True)):
            yield {
                **{name: run[name] for name in keep},
                "place": place,
                **dict(zip(series.values(), values, strict=True)),
            }
