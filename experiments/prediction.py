"""Does the simulation predict runs that it has not seen?

Question
    Calibrate the simulation from real runs of a few settings on this machine. What are its errors for
    held-out settings: throughput, time per step, time of a sync, staleness, time to first token and between
    tokens?

What is done
    1. The calibration runs (``CALIBRATION``), and the fit.
    2. The predictions for the held-out settings (``HELD_OUT``, named here before anything is measured),
       written to ``predictions.json`` before the first of their real runs starts.
    3. The real runs of all held-out settings in turns, every second repeat backwards; 5 repeats, or 2 with
       ``--quick``. Each is a process of its own with a seed of its own. Evaluation is off.
    4. Errors of means, beside the real runs' own spread: the expectation is an error of at most 5 % of
       throughput, 0.25 versions of mean staleness and 15 % of the sync's time, or of two standard errors of
       the measured mean where that is more.

How to read it
    An error above its limit is printed as missed, and the exit code is 1. A spread of 5 % and more says that
    the machine was busy, and that the comparison tells little. The calibration knows one machine, one model
    and one task; engine, trainer and worker share cores, and how much they slow each other down is what was
    seen in the calibration runs. A setting that shares them otherwise (more engines or threads) is outside.

Run it on a machine that does nothing else::

    python -m experiments.prediction --quick     4 + 8 real runs of 24 optimizer steps
    python -m experiments.prediction             4 + 20 real runs of 30 optimizer steps

What is finished is kept: with ``--limit-s 300`` it stops in time, and the same command goes on later.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_lab.errors import GrpoLabError
from grpo_lab.harness.calibration import Calibration
from grpo_lab.harness.calibration_runs import calibrate, machine
from grpo_lab.harness.recipe import RECIPES, Recipe
from grpo_lab.harness.refusals import require_place
from grpo_lab.harness.run_dir import RunDir
from grpo_lab.harness.validation import Comparison, Row, compare, predict, recipe_parameters
from grpo_lab.harness.validation_figures import Figures
from grpo_lab.harness.validation_report import calibration_lines, comparison_table, error_words
from grpo_lab.harness.validation_runs import measure, run_real

BASE = dataclasses.replace(RECIPES["quickstart"][1], heldout_prompts=0, learning_rate=1e-6)
"""Hardly learns, so that lengths stay as they are: what is asked is about time."""
CALIBRATION: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {"max_staleness": 0},
    "synchronous-half": {"max_staleness": 0, "prompts_per_step": 16},
    "asynchronous": {},
    "saturated": {"max_staleness": 2, "max_inflight": 384},
}
"""Two in which the trainer computes alone, of two batch sizes, and two in which it shares the cores."""
HELD_OUT: Mapping[str, Mapping[str, Any]] = {
    "stale": {"max_staleness": 3, "max_inflight": 512},
    "seldom-synced": {"weight_sync_steps": 4, "max_staleness": 2},
    "few-in-flight": {"max_inflight": 64},
    "abort": {"pause_mode": "abort", "prompts_per_step": 24},
}
LIMITS = {"tokens_per_s": 0.05, "sync_s": 0.15}  # of the measured mean
STALENESS_LIMIT = 0.25  # versions


@dataclass(frozen=True)
class Options:
    """See the module's documentation."""

    quick: bool = False
    """2 repeats of 24 optimizer steps."""
    repeats: int = 5
    """Real runs of each held-out setting."""
    steps: int = 30
    """Optimizer steps of a run."""
    limit_s: float = float("inf")
    """No real run begins later than this; run the command again to go on."""
    seeds: int = 5
    """Simulated runs of each prediction."""
    out: Path = Path("runs/experiments/prediction")
    """Where the runs and results go."""


def recipe_of(name: str, changes: Mapping[str, Any], steps: int) -> Recipe:
    return dataclasses.replace(BASE, name=name, steps=steps, **changes)


def limit_of(row: Row, repeats: int) -> float | None:
    """The largest error that is expected of the quantity, in its own unit; None: nothing is expected."""
    noise = 2.0 * row.measured_sd / math.sqrt(repeats)
    if row.quantity == "staleness_mean":
        return max(STALENESS_LIMIT, noise)
    if row.quantity not in LIMITS or row.measured is None:
        return None
    return max(LIMITS[row.quantity] * row.measured, noise)


def misses(comparison: Comparison, repeats: int) -> list[str]:
    """The quantities whose error is above its limit, or that could not be compared."""
    found = []
    for row in comparison.rows:
        limit = limit_of(row, repeats)
        if limit is not None and (row.error is None or abs(row.error) > limit):
            found.append(row.quantity)
    return found


def calibrated(options: Options, steps: int, console: Console) -> Calibration:
    path = options.out / "calibration.toml"
    if not path.exists():
        runs = []
        for name, changes in CALIBRATION.items():
            console.print(f"calibration run {name}")
            runs.append(run_real(recipe_of(name, changes, steps), options.out / "calibration" / name))
        calibrate(runs).save(path)
    found = Calibration.load(path)
    for line in calibration_lines(found):
        console.print(escape(line), soft_wrap=True)
    return found


def predicted(options: Options, steps: int, calibration: Calibration) -> dict[str, list[Figures]]:
    """On disk before the first measurement begins."""
    path = options.out / "predictions.json"
    if not path.exists():
        found = {
            name: predict(recipe_parameters(recipe_of(name, changes, steps)), calibration, options.seeds)
            for name, changes in HELD_OUT.items()
        }
        rows = {name: [dataclasses.asdict(figures) for figures in runs] for name, runs in found.items()}
        RunDir(options.out).write_json(path.name, rows)
    return {
        name: [Figures.from_json(row) for row in rows]
        for name, rows in json.loads(path.read_text(encoding="utf-8")).items()
    }


def summary(comparisons: Mapping[str, Comparison], repeats: int) -> Table:
    table = Table(title="errors (measured spread as standard deviation)", title_justify="left")
    for column in ("setting", "throughput", "sync", "mean staleness", "staleness distance", "missed"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for name, comparison in comparisons.items():
        speed, sync = comparison.row("tokens_per_s"), comparison.row("sync_s")
        age = comparison.row("staleness_mean")
        table.add_row(
            name,
            _relative(speed),
            _relative(sync),
            "-" if age.error is None else f"{age.error:+.3f} (± {age.measured_sd:.3f})",
            f"{comparison.wasserstein_versions:.3f}",
            ", ".join(misses(comparison, repeats)) or "none",
        )
    return table


def _relative(row: Row) -> str:
    if row.relative is None or not row.measured:
        return "-"
    return f"{row.relative:+.1%} (± {row.measured_sd / row.measured:.1%})"


def main(options: Options) -> int:
    repeats, steps = (2, 24) if options.quick else (options.repeats, options.steps)
    console = Console(highlight=False)
    deadline_s = time.monotonic() + options.limit_s
    require_place(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    calibration = calibrated(options, steps, console)
    forecasts = predicted(options, steps, calibration)
    recipes = {name: recipe_of(name, changes, steps) for name, changes in HELD_OUT.items()}

    def told(line: str) -> None:
        console.print(escape(line))

    measured = measure(recipes, repeats, options.out / "runs", told, resume=True, deadline_s=deadline_s)
    if any(len(runs) < repeats for runs in measured.values()):
        console.print(f"{options.limit_s:g} s are over: run the same command again to go on")
        return 1
    comparisons = {name: compare(forecasts[name], measured[name]) for name in HELD_OUT}
    for name, comparison in comparisons.items():
        console.print(comparison_table(comparison, f"{name}: {_words(HELD_OUT[name])}"))
    console.print(summary(comparisons, repeats))
    _write(options, comparisons, repeats)
    held_out = {name: comparison.errors() for name, comparison in comparisons.items()}
    calibration = dataclasses.replace(calibration, held_out=held_out)
    calibration.save(options.out / "calibration.toml")
    console.print(escape(error_words(calibration)), soft_wrap=True)
    missed = sum(len(misses(comparison, repeats)) for comparison in comparisons.values())
    console.print(f"{missed} of {3 * len(comparisons)} errors above their limit; written to {options.out}")
    return 1 if missed else 0


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def _write(options: Options, comparisons: Mapping[str, Comparison], repeats: int) -> None:
    rows = {
        name: {
            "settings": dict(HELD_OUT[name]),
            **comparison.to_json(),
            "limits": {row.quantity: limit_of(row, repeats) for row in comparison.rows},
            "missed": misses(comparison, repeats),
        }
        for name, comparison in comparisons.items()
    }
    RunDir(options.out).write_json(
        "results.json", {"machine": machine(), "repeats": repeats, "held_out": rows}
    )


def run(words: Sequence[str] | None = None) -> int:
    try:
        return main(tyro.cli(Options, args=words, prog="python -m experiments.prediction"))
    except GrpoLabError as error:
        Console(stderr=True).print(f"prediction: {escape(str(error))}", soft_wrap=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run())
