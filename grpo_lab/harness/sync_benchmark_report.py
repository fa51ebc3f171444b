"""What ``bench sync`` measured: tables, the fitted costs of a bucket and of a byte, goals, a plot."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from grpo_lab.harness.sync_benchmark import KINDS, MB, MODES, PHASES, Kind, Mode, SyncRow

PIPELINE_LIMIT = 1.15
PIPELINE_BUCKETS = 8
SHM_OVER_GLOO = 2.0


@dataclass(frozen=True, slots=True)
class Fit:
    """``t = n * overhead_s + bytes / bytes_per_s`` for n buckets, by least squares of relative errors."""

    transport: Kind
    receivers: int
    mode: Mode
    overhead_s: float
    bytes_per_s: float
    worst_error: float  # the largest relative error of the rows
    rows: int


@dataclass(frozen=True, slots=True)
class Goal:
    """``met`` is None where this machine cannot tell."""

    name: str
    wanted: str
    measured: str
    met: bool | None


def fit(rows: Sequence[SyncRow]) -> Fit:
    """Of the rows of one transport, mode and number of receivers. Neither cost may be negative."""
    total = np.array([row.total_s for row in rows])
    terms = np.array([(row.buckets, row.model_bytes) for row in rows], dtype=float) / total[:, None]
    costs = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)[0]
    if costs.min() < 0:  # then the other term alone explains the rows best
        kept = int(costs.argmax())
        column = terms[:, kept]
        costs = np.zeros(2)
        costs[kept] = column.sum() / (column @ column)
    error = float(np.abs(terms @ costs - 1).max())
    rate = 1 / costs[1] if costs[1] > 0 else float("inf")
    first = rows[0]
    return Fit(first.transport, first.receivers, first.mode, float(costs[0]), float(rate), error, len(rows))


def fits(rows: Sequence[SyncRow]) -> list[Fit]:
    found = []
    for receivers in sorted({row.receivers for row in rows}):
        for kind in KINDS:
            for mode in MODES:
                chosen = [r for r in rows if (r.receivers, r.transport, r.mode) == (receivers, kind, mode)]
                if len(chosen) > 1:
                    found.append(fit(chosen))
    return found


def pairs(rows: Sequence[SyncRow]) -> list[tuple[SyncRow, SyncRow]]:
    """Each pipelined row with the sequential row of the same case."""
    key = {
        (r.transport, r.receivers, r.model_bytes, r.bucket_bytes): r for r in rows if r.mode == "sequential"
    }
    found = []
    for row in rows:
        other = key.get((row.transport, row.receivers, row.model_bytes, row.bucket_bytes))
        if row.mode == "pipelined" and other is not None:
            found.append((row, other))
    return found


def longest_phase_s(row: SyncRow) -> float:
    return max(row.phases_s.values())


def longest_stage_s(row: SyncRow) -> float:
    """What one side does in a row: no pipeline of these processes is faster than its slowest stage."""
    phases = row.phases_s
    return max(phases["gather"] + phases["pack"], phases["wire"], phases["verify"] + phases["load"])


def goals(rows: Sequence[SyncRow], cores: int, load: float) -> list[Goal]:
    """`load`: how many other processes wanted a core when the benchmark began."""
    found = []
    bounds = {"single phase": longest_phase_s, "stage (verify + load is one)": longest_stage_s}
    for kind in KINDS:
        for receivers in sorted({row.receivers for row in rows}):
            chosen = [
                (p, s)
                for p, s in pairs(rows)
                # The first pack and the last load overlap with nothing: it takes some buckets.
                if (p.transport, p.receivers) == (kind, receivers) and p.buckets >= PIPELINE_BUCKETS
            ]
            enough = cores - load >= receivers + 0.5
            note = "" if enough else f"; {receivers + 1} processes, {cores} cores, load {load:.1f}"
            for name, bound_s in bounds.items():
                ratios = [p.total_s / bound_s(s) for p, s in chosen]
                if ratios:
                    ratio = statistics.median(ratios)
                    met = True if ratio <= PIPELINE_LIMIT else (False if enough else None)
                    goal = f"pipelined / longest {name}, {kind}, {receivers + 1} processes"
                    found.append(Goal(goal, f"<= {PIPELINE_LIMIT}", f"{ratio:.2f}{note}", met))
    for receivers in sorted({row.receivers for row in rows}):
        ratios = _shm_over_gloo([r for r in rows if r.receivers == receivers and r.mode == "pipelined"])
        if ratios:
            ratio = statistics.median(ratios)
            name = f"rate of shm / rate of gloo, {receivers + 1} processes"
            found.append(Goal(name, f">= {SHM_OVER_GLOO}", f"{ratio:.2f}", ratio >= SHM_OVER_GLOO))
    return found


def _shm_over_gloo(rows: Sequence[SyncRow]) -> list[float]:
    gloo_s = {(r.model_bytes, r.bucket_bytes): r.total_s for r in rows if r.transport == "gloo"}
    cases = [(r.total_s, gloo_s.get((r.model_bytes, r.bucket_bytes))) for r in rows if r.transport == "shm"]
    return [other_s / shm_s for shm_s, other_s in cases if other_s is not None]


def rows_table(rows: Sequence[SyncRow]) -> Table:
    shown = Table(title="one weight sync; phases in ms")
    columns = (
        "model MB",
        "bucket MiB",
        "receivers",
        "transport",
        "mode",
        "buckets",
        "total ms",
        "GB/s",
        *PHASES,
    )
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            f"{row.model_bytes / MB:.0f}",
            f"{row.bucket_bytes >> 20}",
            str(row.receivers),
            row.transport,
            row.mode,
            str(row.buckets),
            f"{row.total_s * 1e3:.1f}",
            f"{row.model_bytes / row.total_s / 1e9:.2f}",
            *(f"{row.phases_s[name] * 1e3:.1f}" for name in PHASES),
        )
    return shown


def fits_table(found: Sequence[Fit]) -> Table:
    shown = Table(title="t = buckets x overhead + bytes / bandwidth")
    for column in ("transport", "receivers", "mode", "overhead ms", "bandwidth GB/s", "worst error", "rows"):
        shown.add_column(column, justify="right", no_wrap=True)
    for f in found:
        shown.add_row(
            f.transport,
            str(f.receivers),
            f.mode,
            f"{f.overhead_s * 1e3:.2f}",
            f"{f.bytes_per_s / 1e9:.2f}",
            f"{f.worst_error:.0%}",
            str(f.rows),
        )
    return shown


def goals_table(found: Sequence[Goal]) -> Table:
    shown = Table(title="goals")
    for column in ("goal", "wanted", "measured", ""):
        shown.add_column(column, justify="left" if column == "goal" else "right", no_wrap=True)
    verdicts = {True: "met", False: "missed", None: "not judged"}
    for goal in found:
        shown.add_row(goal.name, goal.wanted, goal.measured, verdicts[goal.met])
    return shown


def machine(load: float) -> dict[str, object]:
    return {"cores": os.cpu_count(), "load_average_before": load}


def plot(rows: Sequence[SyncRow], found: Sequence[Fit], path: Path) -> None:
    """Left: time against size with the fits. Right: the phases of the largest model's sequential syncs."""
    import matplotlib  # noqa: PLC0415 - slow to import, needed for the plot only

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (times, phases) = pyplot.subplots(1, 2, figsize=(13, 5))
    for index, f in enumerate(found):
        chosen = [r for r in rows if (r.transport, r.receivers, r.mode) == (f.transport, f.receivers, f.mode)]
        bucket = max(r.bucket_bytes for r in chosen)
        chosen = sorted((r for r in chosen if r.bucket_bytes == bucket), key=lambda r: r.model_bytes)
        sizes = [r.model_bytes / MB for r in chosen]
        label = f"{f.transport}, {f.receivers + 1} processes, {f.mode}"
        times.plot(sizes, [r.total_s for r in chosen], "o", color=f"C{index}", label=label)
        fitted = [r.buckets * f.overhead_s + r.model_bytes / f.bytes_per_s for r in chosen]
        times.plot(sizes, fitted, "-", color=f"C{index}", linewidth=0.8)
    times.set(
        xscale="log", yscale="log", xlabel="model MB", ylabel="seconds", title="points: medians; lines: fits"
    )
    times.legend(fontsize=7)
    largest = max(r.model_bytes for r in rows)
    shown = [r for r in rows if r.model_bytes == largest]
    left = np.zeros(len(shown))
    for name in PHASES:
        widths = np.array([r.phases_s[name] for r in shown])
        phases.barh(range(len(shown)), widths, left=left, label=name)
        left += widths
    phases.plot([r.total_s for r in shown], range(len(shown)), "k|", markersize=14, label="total")
    labels = [
        f"{r.transport} {r.mode}, {r.receivers + 1} processes, {r.bucket_bytes >> 20} MiB" for r in shown
    ]
    phases.set_yticks(range(len(shown)), labels, fontsize=7)
    phases.invert_yaxis()
    phases.set(xlabel="seconds", title=f"phases of {largest / MB:.0f} MB")
    phases.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
