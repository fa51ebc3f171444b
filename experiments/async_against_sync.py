"""How much faster does a run end when training overlaps generation?

Question
    Recipe ``quickstart`` as it is (``max_staleness`` 1: the next step's samples are generated while this
    step trains) against the same recipe with ``max_staleness`` 0 (synchronous: the trainer waits for
    every sample, the engine for every step). What is the ratio of their seconds per optimizer step?

What is done
    Each repeat runs both modes at each of the thread settings (trainer, engine) = (1, 1) and (2, 2), one
    after another and every second repeat in the opposite order, so that a machine that gets slower does
    so for all of them. Each run is a process of its own. Times come from its trace: from the first
    ``step_planned`` (the first samples are there) to the last ``optimizer_step_applied``, over the number
    of steps. Making the model, starting processes and evaluation are not in it, and neither is the first
    generation, which both modes wait for. Of each mode the setting with the lower median counts: a
    synchronous run may give both cores to whoever works, an asynchronous one has to share them.

How to read it
    ``ratio`` is synchronous over asynchronous seconds per step: above 1 the overlap pays, below 1 it costs
    more than it saves. ``overlap`` is the share of the time from the first request to the last step in
    which the trainer trained *and* the engine generated; near 0 in synchronous runs, or something is
    wrong with the measurement. A ratio whose range over the repeats contains 1 shows nothing.

What bounds it
    On a machine of two cores trainer and engine share what there is. Let a step take T core-seconds of
    training and G of generation. The synchronous run at one thread each takes T + G, the asynchronous
    one max(T, G): a ratio of 2 at the very best, for T = G. Where two threads speed up training and
    generation perfectly, the synchronous run takes (T + G) / 2 and nothing is left to gain. So the ratio
    says how badly a small model uses a second core, as much as what asynchrony is worth. On separate
    devices (or simulated ones) the engine's time is free, and there the win has to show.

Run it on a machine that does nothing else::

    python -m experiments.async_against_sync --repeats 3 --json async_against_sync.json
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from grpo_lab.errors import ConfigError, GrpoLabError, TraceError
from grpo_lab.events import OptimizerStepApplied, StepPlanned
from grpo_lab.harness.recipe import RECIPES
from grpo_lab.harness.run_dir import RunDir, environment
from grpo_lab.report.digest import Digest
from grpo_lab.report.files import read_trace

RECIPE = "quickstart"
MODES = {"asynchronous": 1, "synchronous": 0}  # max_staleness
THREADS = ((1, 1), (2, 2))  # trainer, engine
RUN_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Setting:
    mode: str
    trainer_threads: int
    engine_threads: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. ``overlap`` is None when nothing was generated or trained."""

    setting: Setting
    repeat: int
    step_s: float
    overlap: float | None
    tokens: int
    load_before: float


SETTINGS = tuple(Setting(mode, *threads) for threads in THREADS for mode in MODES)


def plan(repeats: int) -> list[tuple[int, Setting]]:
    """(repeat, setting) of every run, in order; every second repeat goes backwards."""
    return [(n, one) for n in range(repeats) for one in (SETTINGS if n % 2 == 0 else SETTINGS[::-1])]


def run_once(setting: Setting, repeat: int, steps: int, seed: int, out: Path) -> Measured:
    """Runs the recipe in a process of its own and reads its trace.

    Raises ``GrpoLabError``, with what the run said last, when it did not end with exit code 0.
    """
    options = {
        "max-staleness": MODES[setting.mode],
        "trainer-threads": setting.trainer_threads,
        "engine-threads": setting.engine_threads,
        "steps": steps,
        "seed": seed,
        "heldout-prompts": 0,
        "name": f"{setting.mode}-{setting.trainer_threads}-{setting.engine_threads}",
        "out": out,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    load_before = os.getloadavg()[0]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-m", "grpo_lab.cli.main", "run", RECIPE, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=RUN_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise GrpoLabError(f"{setting} did not end within {RUN_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise GrpoLabError(f"{setting} ended with exit code {done.returncode}: {done.stdout[-2000:]}")
    return read_run(out / "latest" / "events.jsonl", setting, repeat, load_before)


def read_run(trace: Path, setting: Setting, repeat: int, load_before: float) -> Measured:
    """What a trace says. Raises ``TraceError`` for one without an optimizer step."""
    records = list(read_trace(trace))
    planned = [record.t for record in records if isinstance(record.event, StepPlanned)]
    applied = [record for record in records if isinstance(record.event, OptimizerStepApplied)]
    if not planned or not applied:
        raise TraceError(f"{trace}: no optimizer step, so there is nothing to measure")
    return Measured(
        setting=setting,
        repeat=repeat,
        step_s=(applied[-1].t - planned[0]) / len(applied),
        overlap=Digest(records).busy_fractions()["both"],
        tokens=sum(record.event.tokens for record in applied),
        load_before=load_before,
    )


def median_s(runs: Sequence[Measured], setting: Setting) -> float:
    return statistics.median(run.step_s for run in runs if run.setting == setting)


def best(runs: Sequence[Measured], mode: str) -> Setting:
    """The thread setting with the lowest median, the one that counts for this mode."""
    return min((one for one in SETTINGS if one.mode == mode), key=lambda one: median_s(runs, one))


def ratios(runs: Sequence[Measured]) -> tuple[float, list[float]]:
    """Synchronous over asynchronous seconds per step, at the best settings: of medians, and per repeat."""
    fast, slow = best(runs, "asynchronous"), best(runs, "synchronous")
    by_repeat = {(run.repeat, run.setting): run.step_s for run in runs}
    repeats = sorted({run.repeat for run in runs})
    each = [by_repeat[repeat, slow] / by_repeat[repeat, fast] for repeat in repeats]
    return median_s(runs, slow) / median_s(runs, fast), each


def table(runs: Sequence[Measured]) -> Table:
    """A row for each mode and thread setting; medians over the repeats."""
    result = Table(title=f"measured: {RECIPE}, asynchronous against synchronous")
    for heading in ("mode", "threads", "s per step", "lowest", "highest", "overlap", ""):
        result.add_column(heading, justify="left" if heading == "mode" else "right")
    for setting in sorted(SETTINGS, key=lambda one: one.mode):
        own = [run for run in runs if run.setting == setting]
        times = [run.step_s for run in own]
        overlaps = [run.overlap for run in own if run.overlap is not None]
        result.add_row(
            setting.mode,
            f"{setting.trainer_threads} + {setting.engine_threads}",
            f"{statistics.median(times):.3f}",
            f"{min(times):.3f}",
            f"{max(times):.3f}",
            f"{statistics.median(overlaps):.1%}" if overlaps else "-",
            "best" if setting == best(runs, setting.mode) else "",
        )
    return result


def main(
    repeats: int = 3,
    steps: int = RECIPES[RECIPE][1].steps,
    seed: int = 0,
    json: Path | None = None,
    out: Path = Path("runs/experiments/async_against_sync"),
) -> None:
    """Measures, prints a table and the ratio, and writes every run if asked to.

    Args:
        repeats: Times that every setting is run.
        steps: Optimizer steps of a run.
        seed: Of every run; repeats differ in nothing but the machine's mood.
        json: File for every run and the ratio.
        out: Where run directories are made.
    """
    if repeats < 1:
        raise ConfigError("repeats", repeats, "at least 1")
    dataclasses.replace(RECIPES[RECIPE][1], steps=steps, seed=seed)  # raises what the runs would
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)  # a bad place is told at once, not after an hour
    console, runs = Console(), list[Measured]()
    order = plan(repeats)
    for number, (repeat, setting) in enumerate(order, start=1):
        runs.append(run_once(setting, repeat, steps, seed, out))
        threads = f"{setting.trainer_threads} + {setting.engine_threads} threads"
        console.print(f"{number}/{len(order)} {setting.mode}, {threads}: {runs[-1].step_s:.3f} s per step")
    ratio, each = ratios(runs)
    console.print(table(runs))
    console.print(
        f"measured: synchronous / asynchronous = {ratio:.2f} "
        f"({min(each):.2f} to {max(each):.2f} over {repeats} repeats, {steps} steps each) "
        f"on {os.cpu_count()} shared CPU cores; load before the first run {runs[0].load_before:.1f}",
        soft_wrap=True,
    )
    if json is not None:
        result = {
            "label": "measured",
            "recipe": RECIPE,
            "steps": steps,
            "machine": environment(),
            "ratio": ratio,
            "ratio_by_repeat": each,
            "best": {mode: dataclasses.asdict(best(runs, mode)) for mode in MODES},
            "runs": [dataclasses.asdict(run) for run in runs],
        }
        RunDir(json.parent).write_json(json.name, result)


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m experiments.async_against_sync", description=__doc__)
    except (GrpoLabError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(getattr(error, "exit_code", 2))
