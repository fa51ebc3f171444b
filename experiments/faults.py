"""What does a failure cost, and which knob makes it cheap?

Members are killed at random times and started again. Three questions, a small grid each: engines that die
(how often, how long until they are back), trainers that die (how often, how many optimizer steps between two
checkpoints), and a trainer that goes on without dead engines or does not (``min_engines``).

    grpo-lab sweep experiments/faults.py
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from grpo_lab.events import (
    GroupConsumed,
    MemberDied,
    ModelStep,
    OptimizerStepApplied,
    Record,
    SampleCompleted,
)
from grpo_lab.harness.cluster_runs import ABLATION_CLUSTER, records_of, scenario_of
from grpo_lab.harness.experiment import Claim, Experiment, Point, Scale, Setting, grid, points_of
from grpo_lab.harness.plots import curves, new_figure
from grpo_lab.sim.scenario import TRAINER, Fault, Scenario

NAME = "faults"
CLUSTER = dataclasses.replace(
    ABLATION_CLUSTER,
    engines=4,
    slots=16,
    step_s=2.0,
    max_staleness=2,
    clear_cache=False,
    steps=40,
    checkpoint_every_steps=4,
    faults_until_s=3600.0,
)
SHARED: Mapping[str, Setting] = {"restart_s": 10.0, "checkpoint_every_steps": 4, "min_engines": 1}
READING = """
**Engines.** Goodput counts tokens of the steps that the final weights have seen. A dead engine costs its
share of generation until it is back and has the newest weights, and what its samples had said; the trainer
does not notice as long as the others keep up. Recovery is the time to the engine's first step with weights
of a sync.

**Trainer.** A trainer that dies takes along the steps since its checkpoint: they are done again, with new
samples. Recovery is the time until a step is reached that had not been reached before; long intervals
between checkpoints show there and in wasted tokens (decoded, and in no sample that the final weights have
seen). Saving a checkpoint takes no time here, so that nothing speaks against short intervals.

**min_engines.** A trainer that insists on all its engines gives up when one is dead at a sync, and starts
again until that one is back: every engine's restart is then everybody's.
"""


def points(scale: Scale) -> list[Point]:
    deaths: list[Setting] = [0, 2, 4, 8] if scale.full else [0, 2, 6]
    restarts: list[Setting] = [5.0, 20.0, 60.0] if scale.full else [5.0, 40.0]
    intervals: list[Setting] = [1, 2, 4, 8, 16] if scale.full else [1, 4, 16]
    insisting: dict[str, Sequence[Setting]] = {"restart_s": restarts, "min_engines": [1, CLUSTER.engines]}
    rows = [
        *(_row("engine", **row) for row in grid({"deaths": deaths, "restart_s": restarts})),
        *(_row("trainer", **row) for row in grid({"deaths": deaths, "checkpoint_every_steps": intervals})),
        *(_row("min_engines", deaths=deaths[1], **row) for row in grid(insisting)),
    ]
    return points_of(NAME, rows, scale)


def _row(who: str, **settings: Setting) -> dict[str, Setting]:
    return {"who": who, **SHARED, **settings}


def run(point: Point, folder: Path) -> Mapping[str, Setting]:
    return fault_figures(records_of(scenario_at(point)))


def scenario_at(point: Point) -> Scenario:
    """Deaths are spread over the middle of the run: one in each of as many equal parts, anywhere in it."""
    settings = dict(point.settings)
    who, deaths, restart_s = settings.pop("who"), settings.pop("deaths"), settings.pop("restart_s")
    assert isinstance(deaths, int)
    assert isinstance(restart_s, float)
    source = random.Random(f"{NAME} {point.seed} {who}")
    first, last = 3, CLUSTER.steps - 4
    syncs = [round(first + (last - first) * (part + source.random()) / deaths) for part in range(deaths)]
    faults = []
    for number, sync in enumerate(syncs):
        if who == "trainer":  # before it pauses an engine; the count goes on over all its lives
            faults.append(Fault("crash_before", TRAINER, "pause", sync * CLUSTER.engines + 1, restart_s))
        else:
            engine = f"engine-{number % CLUSTER.engines}"
            samples = CLUSTER.prompts_per_step * CLUSTER.generations // CLUSTER.engines
            request = sync * samples + source.randrange(samples)
            faults.append(Fault("crash_before", engine, "generate", request, restart_s))
    return dataclasses.replace(scenario_of(CLUSTER, {**settings, "seed": point.seed}), faults=tuple(faults))


def fault_figures(records: Sequence[Record]) -> dict[str, Setting]:
    """``goodput_tokens_per_s``: of samples that the final weights have seen, over the whole run.
    ``recovery_s_mean``: from a death to the first step of the restarted engine with weights of a sync, or to
    the trainer's first optimizer step that is a new one.
    """
    tokens: dict[str, int] = {}
    consumed: dict[int, list[str]] = {}  # by optimizer step; a step that is done again has other samples
    term_of: dict[int, int] = {}
    died_s: dict[str, float] = {}
    recovered: list[float] = []
    decoded, newest, steps, ended_s = 0, -1, 0, 0.0
    deaths = {"engine": 0, TRAINER: 0}
    for record in records:
        match record.event:
            case SampleCompleted(sample=sample, tokens=count):
                tokens[sample] = count
            case GroupConsumed(optimizer_step=step, term=term, samples=samples):
                if term_of.get(step) != term:
                    term_of[step], consumed[step] = term, []
                consumed[step].extend(samples)
            case ModelStep(shard=0) as model_step:
                decoded += model_step.decode_tokens
                if model_step.version and model_step.engine in died_s:
                    recovered.append(record.t - died_s.pop(model_step.engine))
            case OptimizerStepApplied(optimizer_step=step):
                steps, ended_s = steps + 1, record.t
                if step > newest:
                    newest = step
                    if TRAINER in died_s:
                        recovered.append(record.t - died_s.pop(TRAINER))
            case MemberDied(member=member) if member == TRAINER or member.startswith("engine-"):
                died_s.setdefault(member, record.t)
                deaths[TRAINER if member == TRAINER else "engine"] += 1
    seen = sum(tokens[sample] for samples in consumed.values() for sample in samples)
    return {
        "steps_done": len(consumed),
        "virtual_s": ended_s,
        "goodput_tokens_per_s": seen / ended_s,
        "recovery_s_mean": sum(recovered) / len(recovered) if recovered else None,
        "recoveries": len(recovered),
        "engine_deaths": deaths["engine"],
        "trainer_deaths": deaths[TRAINER],
        "steps_repeated": steps - len(consumed),
        "wasted_tokens": decoded - seen,
        "wasted_share": (decoded - seen) / decoded,
    }


def figures(table: pd.DataFrame) -> dict[str, Figure]:
    figure = new_figure(3, 3, width_in=4.4, height_in=3.0)
    columns = (("engine", "deaths", "restart_s"), ("trainer", "deaths", "checkpoint_every_steps"))
    rows = ("goodput_tokens_per_s", "recovery_s_mean", "wasted_share")
    words = ("goodput (tokens/s)", "recovery (s)", "share of decoded tokens wasted")
    for row, (column, label) in enumerate(zip(rows, words, strict=True)):
        for place, (who, x, by) in enumerate((*columns, ("min_engines", "restart_s", "min_engines"))):
            axes = figure.axes[3 * row + place]
            curves(axes, table[table["who"] == who], x=x, y=column, by=by)
            axes.set_ylabel(label)
            axes.set_xlabel(
                {"deaths": f"deaths of a{'n' if who == 'engine' else ''} {who}"}.get(x, "restart (s)")
            )
            axes.set_ylim(bottom=0)
    return {NAME: figure}


def claims(table: pd.DataFrame) -> Sequence[Claim]:
    engine, trainer = table[table["who"] == "engine"], table[table["who"] == "trainer"]
    spare = trainer["trainer_deaths"] * trainer["checkpoint_every_steps"] - trainer["steps_repeated"]
    dead = trainer[trainer["deaths"] == trainer["deaths"].max()]
    repeated = dead.groupby("checkpoint_every_steps")["steps_repeated"].mean()
    insist = table[table["who"] == "min_engines"].groupby(["restart_s", "min_engines"])[
        "goodput_tokens_per_s"
    ]
    goodput = insist.mean().unstack("min_engines")
    return [
        Claim(
            "every run comes to its end, whatever died",
            bool((table["steps_done"] == CLUSTER.steps).all()),
            f"{len(table)} runs, {table['engine_deaths'].sum() + table['trainer_deaths'].sum()} deaths",
        ),
        Claim(
            "a trainer's death repeats no more steps than lie between two checkpoints",
            bool((spare >= 0).all()),
            ", ".join(f"every {every} steps: {steps:.1f} repeated" for every, steps in repeated.items())
            + f", at {dead['deaths'].max()} deaths",
        ),
        _engines_cost_little(engine),
        Claim(
            "going on without dead engines beats waiting for them",
            bool((goodput[goodput.columns.min()] > goodput[goodput.columns.max()]).all()),
            ", ".join(
                f"{restart_s:g} s: {row.iloc[0]:,.0f} against {row.iloc[-1]:,.0f} tokens/s"
                for restart_s, row in goodput.iterrows()
            ),
        ),
    ]


def _engines_cost_little(engine: pd.DataFrame) -> Claim:
    """Fewest deaths, shortest restart, against none."""
    few = sorted(engine["deaths"].unique())[1]
    calm = engine[engine["deaths"] == 0]["goodput_tokens_per_s"].mean()
    rows = engine[(engine["deaths"] == few) & (engine["restart_s"] == engine["restart_s"].min())]
    lost = 1 - rows["goodput_tokens_per_s"].mean() / calm
    words = f"{few} engine deaths in {CLUSTER.steps} steps and short restarts cost less than 10 % of goodput"
    return Claim(words, bool(lost < 0.10), f"{lost:.1%}")


EXPERIMENT = Experiment(
    NAME,
    "What do failures cost in goodput, recovery time and wasted tokens, and what do restart time, checkpoint "
    "interval and min_engines change?",
    points,
    run,
    figures,
    claims,
    READING,
    defaults={"engines": CLUSTER.engines, "steps": CLUSTER.steps, "checkpoint_s": 0},
)
