"""What ``bench sim`` measured: a table, goals, a plot against cluster size and batch size."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from grpo_lab.harness.sim_benchmark import SLOTS, SimRow

GOALS = ((16, 400.0, 1000.0), (256, 20.0, None))  # engines, virtual seconds a wall second: wanted, hoped for

MIN_POINTS = 2


@dataclass(frozen=True, slots=True)
class Goal:
    """``met`` goes by the wall clock, ``met_by_cpu`` by this process' own time on a core."""

    name: str
    wanted: str
    measured: str
    met: bool
    met_by_cpu: bool


def goals(rows: Sequence[SimRow]) -> list[Goal]:
    found = []
    for engines, wanted, hoped in GOALS:
        for row in rows:
            size = (row.engines, row.slots, row.mode, row.workload)
            if size == (engines, SLOTS, "event", "long") and not row.checker:
                words = f">= {wanted:g}" + (f" (goal {hoped:g})" if hoped else "")
                measured = f"{row.speed:.0f} by the wall, {row.cpu_speed:.0f} by the core"
                name = f"virtual seconds a second, {engines} engines x {SLOTS} slots"
                found.append(Goal(name, words, measured, row.speed >= wanted, row.cpu_speed >= wanted))
    for mode in ("event", "step"):
        found += _cost_goal(rows, mode)
    return found


def _cost_goal(rows: Sequence[SimRow], mode: str) -> list[Goal]:
    """Batches grow with the slots; the shortest completions show what a step costs besides its tokens."""
    kind = (mode, "short", 1, False)
    mine = [row for row in rows if (row.mode, row.workload, row.engines, row.checker) == kind]
    mine.sort(key=lambda row: row.slots)
    if len(mine) < MIN_POINTS:
        return []
    falls = all(later.token_ns < earlier.token_ns for earlier, later in itertools.pairwise(mine))
    shown = ", ".join(f"{row.slots}: {row.token_ns:,.0f}" for row in mine)
    return [Goal(f"ns a token by slots, {mode} mode, short", "falls", shown, falls, falls)]


def rows_table(rows: Sequence[SimRow]) -> Table:
    shown = Table(title="whole clusters in virtual time")
    columns = (
        "workload",
        "engines",
        "slots",
        "mode",
        "checker",
        "virtual s",
        "wall s",
        "cpu s",
        "virtual / wall",
        "virtual / cpu",
        "tokens",
        "samples",
        "syncs",
        "in a step",
        "ns / token",
        "us / sample",
        "events",
    )
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            f"{row.workload} ({row.mean_tokens})",
            str(row.engines),
            str(row.slots),
            row.mode,
            "on" if row.checker else "off",
            f"{row.virtual_s:,.0f}",
            f"{row.wall_s:.2f}",
            f"{row.cpu_s:.2f}",
            f"{row.speed:,.0f}",
            f"{row.cpu_speed:,.0f}",
            f"{row.tokens:,}",
            f"{row.samples:,}",
            str(row.weight_syncs),
            f"{row.sequences:.1f}",
            f"{row.token_ns:,.0f}",
            f"{row.cpu_s / row.samples * 1e6:,.0f}",
            f"{row.events:,}",
        )
    return shown


def goals_table(found: Sequence[Goal]) -> Table:
    shown = Table(title="goals")
    for column in ("goal", "wanted", "measured", "by the wall", "by the core"):
        shown.add_column(column, justify="left" if column == "goal" else "right", no_wrap=True)
    for goal in found:
        verdicts = ("met" if met else "missed" for met in (goal.met, goal.met_by_cpu))
        shown.add_row(goal.name, goal.wanted, goal.measured, *verdicts)
    return shown


def machine(load: float) -> dict[str, object]:
    return {"cores": os.cpu_count(), "load_average_before": load}


def plot(rows: Sequence[SimRow], path: Path) -> None:
    """Left: speed against cluster size. Right: cost of a token against the batch."""
    import matplotlib  # noqa: PLC0415 - slow to import, needed for the plot only

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (speeds, costs) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for index, (mode, workload, checker) in enumerate(sorted({_kind(row) for row in rows})):
        label = f"{mode} mode, {workload}" + (", checker on" if checker else "")
        mine = [row for row in rows if _kind(row) == (mode, workload, checker)]
        sizes = sorted((row for row in mine if row.slots == SLOTS), key=lambda row: row.engines)
        xs, ys = [row.engines for row in sizes], [row.speed for row in sizes]
        if sizes:
            speeds.plot(xs, ys, "o-", color=f"C{index}", label=label)
        batches = sorted(mine, key=lambda row: row.sequences)
        in_a_step, token_ns = [row.sequences for row in batches], [row.token_ns for row in batches]
        costs.plot(in_a_step, token_ns, "o", color=f"C{index}", label=label)
    speeds.set(
        xscale="log", yscale="log", xlabel=f"engines of {SLOTS} slots", ylabel="virtual / wall seconds"
    )
    costs.set(xscale="log", yscale="log", xlabel="sequences in a step", ylabel="ns of a core / token")
    costs.legend(fontsize=7)
    for axes in (speeds, costs):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _kind(row: SimRow) -> tuple[str, str, bool]:
    return row.mode, row.workload, row.checker
