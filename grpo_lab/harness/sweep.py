"""Runs an experiment's points, keeps every finished one, and writes table, figures and reading guide.

A finished point is a file, written whole, so a sweep that is killed loses at most the points that ran.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from grpo_lab.harness.executors import Executor, PointResult
from grpo_lab.harness.experiment import Claim, Experiment, Scale, row_of
from grpo_lab.harness.plots import save_figure
from grpo_lab.harness.run_dir import source_commit
from grpo_lab.harness.sweep_folder import SweepFolder
from grpo_lab.report.summary import UNCALIBRATED

MISSED = 1
IN_WORDS = {
    "hybrid": f"hybrid (learning measured, seconds simulated, {UNCALIBRATED})",
    "simulated": f"simulated ({UNCALIBRATED})",
}
PLAIN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class SweepResult:
    """``table`` has a row for every point that ended well; ``failed`` says why the others did not."""

    table: pd.DataFrame
    failed: tuple[PointResult, ...]
    claims: tuple[Claim, ...]
    ran: int
    wall_s: float

    @property
    def exit_code(self) -> int:
        return MISSED if self.failed or not all(claim.holds for claim in self.claims) else 0


def run_sweep(
    experiment: Experiment, scale: Scale, executor: Executor, folder: SweepFolder, console: Console
) -> SweepResult:
    """Runs what is not there yet, then writes everything. The folder is open."""
    points = experiment.distinct_points(scale)
    rows = {point.hash: row for point in points if (row := folder.finished(point)) is not None}
    missing = [point for point in points if point.hash not in rows]
    if rows:
        console.print(f"{len(rows)} of {len(points)} points are there already")
    failed: list[PointResult] = []
    started_s = time.monotonic()
    commit = source_commit()
    with _SweepProgress(console, experiment.name, len(missing)) as progress:
        for result in executor.run(experiment.run, missing, folder.work):
            if result.error:
                failed.append(result)
                console.print(f"[bold red]failed[/] {escape(str(result.point))}: {escape(result.error)}")
            else:
                figures = {**result.figures, "point_wall_s": round(result.wall_s, 3), "commit": commit}
                rows[result.point.hash] = row_of(result.point, figures)
                folder.keep(result.point, rows[result.point.hash])
                shutil.rmtree(folder.work / result.point.hash, ignore_errors=True)
            progress.advance()
    wall_s = time.monotonic() - started_s
    table = pd.DataFrame([rows[point.hash] for point in points if point.hash in rows])
    claims = _publish(experiment, table, folder, scale) if len(table) else ()
    return SweepResult(table, tuple(failed), claims, len(missing), wall_s)


def _publish(
    experiment: Experiment, table: pd.DataFrame, folder: SweepFolder, scale: Scale
) -> tuple[Claim, ...]:
    folder.write_parquet(table)
    for name, figure in experiment.figures(table).items():
        save_figure(figure, folder.path / name, stamp_of(table))
    claims = tuple(experiment.claims(table))
    folder.write("reading.md", reading_guide(experiment, table, claims, scale))
    return claims


def stamp_of(table: pd.DataFrame) -> str:
    """What stands below every figure: how its numbers came about."""
    labels = " and ".join(IN_WORDS.get(label, label) for label in sorted(table["label"].unique()))
    commits = ", ".join(sorted(set(table["commit"]) - {""})) or "unknown"
    digest = pd.util.hash_pandas_object(table["config"].sort_values(), index=False).sum() & 0xFFFFFFFF
    seeds = table["seed"].nunique()
    return f"{labels} · n = {seeds} seed{'s' * (seeds != 1)} · configs {digest:08x} · commit {commits}"


def reading_guide(experiment: Experiment, table: pd.DataFrame, claims: Sequence[Claim], scale: Scale) -> str:
    """The question, how to read the figures, and which claims these results bear out."""
    marks = [
        f"- {'holds' if claim.holds else '**does not hold**'}: {claim.words} ({claim.evidence})"
        for claim in claims
    ]
    shared = ", ".join(f"{name} = {value}" for name, value in experiment.defaults.items())
    parts = [
        f"# {experiment.name}",
        experiment.question,
        f"{len(table)} runs, {stamp_of(table)}, {'full' if scale.full else 'small'} grid."
        + (f" All runs: {shared}." if shared else ""),
        "## How to read it",
        experiment.reading,
        "## What these results say",
        "\n".join(marks) or "No claim is checked.",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def tell(result: SweepResult, folder: SweepFolder, console: Console) -> None:
    """What a user looks for at the end."""
    table = Table(show_header=True, box=None, padding=(0, 2))
    table.add_column("claim")
    table.add_column("holds")
    table.add_column("evidence")
    for claim in result.claims:
        colour, word = ("green", "yes") if claim.holds else ("bold red", "no")
        table.add_row(escape(claim.words), f"[{colour}]{word}[/]", escape(claim.evidence))
    if result.claims:
        console.print(table)
    if result.failed:
        console.print(f"[bold red]{len(result.failed)} points failed[/]; --resume runs them again")
    if len(result.table):
        console.print(escape(stamp_of(result.table)), soft_wrap=True)
    console.print(f"{result.ran} points in {result.wall_s:.1f} s; results in {escape(str(folder.path))}")


class _SweepProgress:
    """A bar with the time that is left on a terminal; a line now and then elsewhere."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        self._console, self._name, self._total = console, name, total
        self._done = 0
        self._started_s = self._told_s = time.monotonic()
        self._bar = (
            Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            if console.is_terminal and total
            else None
        )

    def __enter__(self) -> _SweepProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._total)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
            return
        now_s = time.monotonic()
        if self._done == self._total or now_s - self._told_s >= PLAIN_EVERY_S:
            self._told_s = now_s
            left_s = (now_s - self._started_s) / self._done * (self._total - self._done)
            self._console.print(f"{self._name} {self._done}/{self._total}, about {left_s:.0f} s left")
