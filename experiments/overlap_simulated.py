"""How much sooner is an accuracy reached when trainer and engine have a device each?

Question
    Recipe ``quickstart`` as it is (``max_staleness`` 1) against itself with ``max_staleness`` 0, in the
    simulated world: the real trainer, real gradients, tokens and rewards, but seconds that are simulated,
    and a device of its own for everybody. What is the ratio of the virtual seconds until the held-out
    accuracy is reached? (``async_against_sync`` asks the same of this machine's shared cores, measured.)

What is done
    One run of each mode with the same seed. Every ``evaluate_every`` optimizer steps the model's greedy
    held-out accuracy is evaluated; that takes no virtual time. Time counts from the first ``step_planned``:
    the first generation, which both modes wait for, is not in it. Then short runs with a trainer that is
    four times faster and four times slower than the default, for the seconds per step only: they show
    what the ratio owes to the balance of training and generation.

How to read it
    ``ratio`` is synchronous over asynchronous virtual seconds. A step that takes T of training and G of
    generation takes T + G in a synchronous run and max(T, G) in an asynchronous one, so 2 is the most that
    there is, at T = G. The default speeds (``grpo_lab.sim.speeds``) were chosen so that T and G are about
    equal: the ratio says what overlap is worth on such devices, not how often devices are like that.
    Stale samples cost learning; the ratio at equal accuracy has that in it, the ratio per step has not.

Simulated: the same figures on every machine::

    python -m experiments.overlap_simulated --json overlap_simulated.json
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from grpo_lab.errors import ConfigError, GrpoLabError
from grpo_lab.events import Evaluated, OptimizerStepApplied, Record, StepPlanned
from grpo_lab.harness.outcome import Outcome
from grpo_lab.harness.progress import RunProgress
from grpo_lab.harness.recipe import RECIPES, Recipe
from grpo_lab.harness.run_dir import RunDir, environment, make_run_dir
from grpo_lab.harness.runner import declaration, model_of
from grpo_lab.harness.simulated import end_trace, simulate, trace_recorder
from grpo_lab.harness.training import EvaluateEvery
from grpo_lab.sim.speeds import Speeds

RECIPE = "quickstart"
MODES = {"asynchronous": 1, "synchronous": 0}  # max_staleness
TRAINER_FACTORS = (0.25, 4.0)  # of the trainer's seconds


@dataclass(frozen=True, slots=True)
class Curve:
    """One run. ``points`` are (virtual seconds, optimizer step, held-out accuracy)."""

    mode: str
    trainer_factor: float
    step_s: float
    points: tuple[tuple[float, int, float], ...]
    wall_s: float

    def reached(self, accuracy: float) -> tuple[float, int] | None:
        """Virtual seconds and optimizer step of the first evaluation that is as good."""
        return next(((at_s, step) for at_s, step, value in self.points if value >= accuracy), None)


def read_curve(records: Sequence[Record], mode: str, trainer_factor: float, wall_s: float) -> Curve:
    """What a trace says."""
    began_s = next(record.t for record in records if isinstance(record.event, StepPlanned))
    applied = [record.t for record in records if isinstance(record.event, OptimizerStepApplied)]
    points = tuple(
        (record.t - began_s, record.event.optimizer_step, record.event.accuracy)
        for record in records
        if isinstance(record.event, Evaluated) and record.t >= began_s
    )
    return Curve(mode, trainer_factor, (applied[-1] - began_s) / len(applied), points, wall_s)


def run_mode(
    recipe: Recipe, mode: str, evaluate_every: int, console: Console, trainer_factor: float = 1.0
) -> Curve:
    """Simulates one run. Raises ``GrpoLabError`` when it cannot train."""
    recipe = dataclasses.replace(recipe, name=mode, max_staleness=MODES[mode])
    default = Speeds()
    speeds = dataclasses.replace(
        default,
        trainer_step_s=default.trainer_step_s * trainer_factor,
        trainer_token_s=default.trainer_token_s * trainer_factor,
    )
    recorder, directory = trace_recorder(), make_run_dir(recipe.out, recipe.name)
    with RunProgress(console, recipe.steps) as progress:
        simulated = simulate(
            recipe,
            directory,
            model_of(recipe, progress),
            declaration(recipe),
            recorder,
            progress.step,
            speeds=speeds,
            callbacks=lambda trainer: [EvaluateEvery(trainer, recipe, evaluate_every)],
        )
    end_trace(recorder, Outcome("clean", "", 0), directory)
    return read_curve(recorder.records, mode, trainer_factor, simulated.wall_s)


def table(curves: Sequence[Curve], accuracy: float) -> Table:
    result = Table(title=f"simulated: {RECIPE}, a device for the trainer and one for the engine")
    for heading in ("mode", "trainer's time", "virtual s per step", f"until {accuracy:g}", "at step"):
        result.add_column(heading, justify="left" if heading == "mode" else "right")
    for curve in curves:
        at = curve.reached(accuracy)
        until = ("-", "-") if at is None else (f"{at[0]:.1f} virtual s", f"{at[1]}")
        result.add_row(curve.mode, f"x {curve.trainer_factor:g}", f"{curve.step_s:.3f}", *until)
    return result


def ratio_of(curves: Sequence[Curve], trainer_factor: float) -> float:
    """Synchronous over asynchronous virtual seconds per optimizer step."""
    step_s = {curve.mode: curve.step_s for curve in curves if curve.trainer_factor == trainer_factor}
    return step_s["synchronous"] / step_s["asynchronous"]


def ratio_until(curves: Sequence[Curve], accuracy: float) -> float | None:
    """Synchronous over asynchronous virtual seconds until ``accuracy``; None where one never reached it."""
    at = {curve.mode: curve.reached(accuracy) for curve in curves if curve.trainer_factor == 1.0}
    slow, fast = at["synchronous"], at["asynchronous"]
    return None if slow is None or fast is None or fast[0] == 0 else slow[0] / fast[0]


def main(
    steps: int = RECIPES[RECIPE][1].steps,
    accuracy: float = 0.8,
    evaluate_every: int = 2,
    balance_steps: int = 6,
    seed: int = 0,
    json: Path | None = None,
    out: Path = Path("runs/experiments/overlap_simulated"),
) -> None:
    """Simulates both modes, prints a table and the ratios, and writes the curves if asked to.

    Args:
        steps: Optimizer steps of a run.
        accuracy: Held-out accuracy to be reached.
        evaluate_every: Optimizer steps between two evaluations.
        balance_steps: Steps of the short runs with a faster and a slower trainer; 0: none of them.
        seed: Of every run.
        json: File for the curves and the ratios.
        out: Where run directories are made.
    """
    for name, value, least in (("evaluate_every", evaluate_every, 1), ("balance_steps", balance_steps, 0)):
        if value < least:
            raise ConfigError(name, value, f"at least {least}")
    if not 0 < accuracy <= 1:
        raise ConfigError("accuracy", accuracy, "above 0 and at most 1")
    recipe = dataclasses.replace(RECIPES[RECIPE][1], world="sim", steps=steps, seed=seed, out=out)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)  # a bad place is told at once
    console = Console(highlight=False)
    curves = [run_mode(recipe, mode, evaluate_every, console) for mode in MODES]
    factors = TRAINER_FACTORS if balance_steps else ()
    if balance_steps:
        short = dataclasses.replace(recipe, steps=balance_steps, heldout_prompts=0)
        curves += [run_mode(short, mode, steps, console, factor) for factor in factors for mode in MODES]
    console.print(table(curves, accuracy))
    until = ratio_until(curves, accuracy)
    said = "not reached by both" if until is None else f"{until:.2f}"
    console.print(f"simulated: synchronous / asynchronous, until accuracy {accuracy:g} = {said}")
    by_factor = {factor: ratio_of(curves, factor) for factor in (1.0, *factors)}
    for factor, ratio in by_factor.items():
        console.print(f"simulated: per optimizer step, trainer's time x {factor:g} = {ratio:.2f}")
    if json is not None:
        result = {
            "label": "simulated",
            "recipe": RECIPE,
            "steps": steps,
            "seed": seed,
            "accuracy": accuracy,
            "speeds": dataclasses.asdict(Speeds()),
            "ratio_until_accuracy": until,
            "ratio_per_step": {f"{factor:g}": ratio for factor, ratio in by_factor.items()},
            "curves": [dataclasses.asdict(curve) for curve in curves],
            "machine": environment(),
        }
        RunDir(json.parent).write_json(json.name, result)


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m experiments.overlap_simulated", description=__doc__)
    except (GrpoLabError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(getattr(error, "exit_code", 2))
