"""Which bucket size, how many buffers, which transport: what does a weight sync cost, and where?

Whole syncs between two processes of this machine (a sender and one receiver, as in `grpo-lab bench sync`),
measured. Rounds of all settings take turns, so that what else the machine does hits all alike.

    grpo-lab sweep experiments/buckets.py
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from grpo_lab.harness.experiment import Claim, Experiment, Point, Scale, Setting, grid, points_of
from grpo_lab.harness.plots import COLOURS, MARKERS, new_figure
from grpo_lab.harness.sync_benchmark import (
    KINDS,
    MB,
    PHASES,
    SLOTS,
    Kind,
    SyncCase,
    SyncRow,
    measure_ways,
    receiver_processes,
)
from grpo_lab.harness.sync_benchmark_report import PIPELINE_BUCKETS, Fit, fit

NAME = "buckets"
SMALL = {"model_mb": (100,), "bucket_kib": (256, 1024, 4096, 16384), "buffers": (1, 2), "transport": KINDS}
FULL = {
    "model_mb": (10, 100, 500),
    "bucket_kib": (256, 1024, 4096, 16384, 65536),
    "buffers": (1, 2, 4),
    "transport": KINDS,
}
REPEATS = 15
THREADS = 1
FIT_WITHIN = 0.3
SETTINGS = list(SMALL)
PHASE_COLUMNS = tuple(f"{phase}_s" for phase in PHASES)


def points(scale: Scale) -> list[Point]:
    return points_of(NAME, grid(FULL if scale.full else SMALL), scale, "measured")


def run(point: Point, folder: Path) -> Mapping[str, Setting]:
    return run_with(point, REPEATS)


def run_with(point: Point, repeats: int) -> Mapping[str, Setting]:
    """The fastest of ``repeats`` syncs after one that warms up; phases are sums over the buckets."""
    chosen = point.settings
    case = SyncCase(1, round(float(chosen["model_mb"] or 0) * MB), int(chosen["bucket_kib"] or 0) << 10)
    kind: Kind = "shm" if chosen["transport"] == "shm" else "gloo"
    load = os.getloadavg()[0]
    with receiver_processes(case.receivers, THREADS) as processes:
        ways = [(kind, int(chosen["buffers"] or 0))]
        (row,) = asyncio.run(
            measure_ways(case, ways, processes, repeats=repeats, num_threads=THREADS, fastest=True)
        )
    return {
        "buckets": row.buckets,
        "bytes": row.model_bytes,
        "total_s": row.total_s,
        "gb_per_s": row.model_bytes / row.total_s / 1e9,
        **{f"{name}_s": seconds for name, seconds in row.phases_s.items()},
        "load_average": load,
    }


def fastest(table: pd.DataFrame) -> pd.DataFrame:
    """The fastest round of every setting: other work on the machine can only have added to the others."""
    return table.sort_values("total_s").groupby(SETTINGS, as_index=False).first()


def fits(table: pd.DataFrame) -> dict[tuple[str, int], Fit]:
    """The two costs of every transport and number of buffers, from the fastest rounds."""
    found = {}
    for (transport, buffers), rows in fastest(table).groupby(["transport", "buffers"]):
        found[transport, int(buffers)] = fit([_sync_row(row) for _, row in rows.iterrows()])
    return found


def _sync_row(row: pd.Series) -> SyncRow:
    return SyncRow(
        receivers=1,
        model_bytes=int(row["bytes"]),
        bucket_bytes=int(row["bucket_kib"]) << 10,
        transport=row["transport"],
        mode="sequential" if row["buffers"] == SLOTS["sequential"] else "pipelined",
        buckets=int(row["buckets"]),
        total_s=float(row["total_s"]),
        phases_s={},
        repeats=REPEATS,
    )


def figures(table: pd.DataFrame) -> Mapping[str, Figure]:
    largest = table[table["model_mb"] == table["model_mb"].max()]
    return {"sync_time": _sync_time(table, largest), "phases": _phases(largest)}


def _sync_time(table: pd.DataFrame, largest: pd.DataFrame) -> Figure:
    """Markers: the median round, with whiskers to the fastest and the slowest. Lines: the fits."""
    figure = new_figure(width_in=6.0, height_in=4.2)
    (axes,) = figure.axes
    found = fits(table)
    for index, ((transport, buffers), rows) in enumerate(largest.groupby(["transport", "buffers"])):
        rounds = rows.groupby("bucket_kib")["total_s"].agg(["min", "median", "max"]) * 1e3
        places = [size * 1.06 ** (index - 1.5) for size in rounds.index]  # side by side
        costs = found[transport, int(buffers)]
        counts = rows.groupby("bucket_kib")["buckets"].median()
        fitted = counts * costs.overhead_s + rows["bytes"].median() / costs.bytes_per_s
        colour = COLOURS[index % len(COLOURS)]
        axes.errorbar(
            places,
            rounds["median"],
            yerr=[rounds["median"] - rounds["min"], rounds["max"] - rounds["median"]],
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            color=colour,
            markersize=4,
            capsize=2.5,
            label=f"{_way(transport, buffers)}: {_costs(costs)}",
        )
        axes.plot(places, fitted * 1e3, linewidth=0.8, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(rounds.index), [_size(size) for size in rounds.index])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bucket size")
    axes.set_ylabel(f"one sync of {largest['model_mb'].iloc[0]} MB (ms)")
    axes.legend(frameon=False, fontsize=7)
    return figure


def _phases(largest: pd.DataFrame) -> Figure:
    """Bars of the phases for each bucket size, an axes for each transport and number of buffers."""
    ways = list(fastest(largest).groupby(["transport", "buffers"]))
    figure = new_figure(min(2, len(ways)), -(-len(ways) // 2), height_in=2.8)
    for axes, ((transport, buffers), rows) in zip(figure.axes, ways, strict=False):
        _stack(axes, rows.sort_values("bucket_kib"))
        axes.set_title(_way(transport, buffers), fontsize=8)
    figure.axes[0].legend(frameon=False, fontsize=7, ncols=3)
    return figure


def _stack(axes: Axes, rows: pd.DataFrame) -> None:
    places, below = range(len(rows)), pd.Series(0.0, index=rows.index)
    for index, (phase, column) in enumerate(zip(PHASES, PHASE_COLUMNS, strict=True)):
        axes.bar(places, rows[column] * 1e3, bottom=below, color=COLOURS[index], label=phase, width=0.7)
        below += rows[column] * 1e3
    axes.plot(places, rows["total_s"] * 1e3, "_", color=COLOURS[6], markersize=26, label="total")
    axes.set_xticks(places, [_size(size) for size in rows["bucket_kib"]])
    axes.set_xlabel("bucket size")
    axes.set_ylabel("ms, sum over buckets")


def _way(transport: str, buffers: int) -> str:
    return f"{transport}, {buffers} buffer{'s' if buffers > 1 else ''}"


def _costs(found: Fit) -> str:
    return f"{found.overhead_s * 1e6:.0f} us a bucket, {found.bytes_per_s / 1e9:.2f} GB/s"


def _size(kib: int) -> str:
    return f"{kib >> 10} MiB" if kib >= 1 << 10 else f"{kib} KiB"


def claims(table: pd.DataFrame) -> list[Claim]:
    return [
        _two_terms(table),
        _buckets_cost(table),
        _nothing_hides(table),
        _memory_beats_sockets(table),
        _second_buffer(table),
    ]


def _two_terms(table: pd.DataFrame) -> Claim:
    found = fits(table)
    words = "; ".join(f"{_way(*key)}: {_costs(f)}, off by {f.worst_error:.0%}" for key, f in found.items())
    return Claim(
        f"buckets x overhead + bytes / bandwidth gives every setting's time within {FIT_WITHIN:.0%}",
        max(f.worst_error for f in found.values()) <= FIT_WITHIN,
        f"at a load average of {table['load_average'].mean():.1f}, worst error of each fit: {words}",
    )


def _buckets_cost(table: pd.DataFrame) -> Claim:
    """With one buffer nothing hides the cost of a bucket."""
    one = table[(table["buffers"] == 1) & (table["model_mb"] == table["model_mb"].max())]
    times = fastest(one).pivot_table(index="bucket_kib", columns="transport", values="total_s")
    smallest, ratios = times.index.min(), times.iloc[0] / times.min()
    evidence = ", ".join(f"{name}: {ratio:.2f} times the best size" for name, ratio in ratios.items())
    return Claim(
        f"with one buffer, buckets of {_size(smallest)} are not the best choice",
        bool((ratios > 1).all()),
        evidence,
    )


def _nothing_hides(table: pd.DataFrame) -> Claim:
    one = fastest(table[table["buffers"] == 1])
    shares = one[list(PHASE_COLUMNS)].sum(axis=1) / one["total_s"]
    return Claim(
        "with one buffer the phases add up to the sync: their sum is 70 to 110 % of its time",
        bool(shares.between(0.7, 1.1).all()),
        f"from {shares.min():.0%} to {shares.max():.0%}",
    )


def _memory_beats_sockets(table: pd.DataFrame) -> Claim:
    keys = ["model_mb", "bucket_kib", "buffers"]
    times = fastest(table).pivot_table(index=keys, columns="transport", values="total_s")
    ratio = times["gloo"] / times["shm"]
    return Claim(
        "shared memory is faster than gloo over loopback, median over settings",
        bool(ratio.median() > 1),
        f"gloo takes {ratio.min():.2f} to {ratio.max():.2f} times as long, median {ratio.median():.2f}",
    )


def _second_buffer(table: pd.DataFrame) -> Claim:
    """Packing overlaps the transfer: of one bucket there is nothing to overlap."""
    several = fastest(table[table["buckets"] >= PIPELINE_BUCKETS])
    keys = ["transport", "model_mb", "bucket_kib"]
    times = several.pivot_table(index=keys, columns="buffers", values="total_s")
    ratio = (times[1] / times[2]).dropna()
    return Claim(
        f"a second buffer makes a sync of {PIPELINE_BUCKETS} buckets or more faster, median over settings",
        bool(ratio.median() > 1),
        f"{ratio.min():.2f} to {ratio.max():.2f} times as fast, median {ratio.median():.2f}",
    )


READING = """
**sync_time**: one whole sync (bind, pack, transfer, verify, load), the fastest of a round, against bucket
size: the median round, with whiskers to the fastest and the slowest. Lines are the fits of `t = buckets x
overhead + bytes / bandwidth` to the fastest rounds; the legend names the two costs. To the left the
overhead of many buckets decides, to the right the bytes; with large buckets the first pack and the last
load overlap nothing.

**phases**: each phase of the fastest round, summed over the buckets. With one buffer they follow each other
and add up to the total (the mark); with two they overlap, `wire` includes waiting for the receiver, and the
bar is higher than the mark.

Measured on the machine that ran it, with one thread a side: with fewer than two free cores the two
processes take turns, and a second buffer can gain nothing. `load_average` is in every row: above the number
of cores no figure here is one to quote. NCCL is not in the grid: it needs a transport for GPUs.
"""

EXPERIMENT = Experiment(
    name=NAME,
    question=(
        "What does a weight sync cost by bucket size, number of buffers and transport, and in which phase?"
    ),
    points=points,
    run=run,
    figures=figures,
    claims=claims,
    reading=READING,
    workers=1,
    defaults={"receivers": 1, "repeats": REPEATS, "threads": THREADS},
)
