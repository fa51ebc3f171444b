"""How often to sync, and how stale may samples be?

A sync stops generation and training for a while, and every version of the weights that comes later makes
samples younger in versions and older in optimizer steps. ``weight_sync_steps`` k times ``max_staleness`` s,
in a simulated cluster whose trainer is somewhat slower than its engines.

    grpo-lab sweep experiments/sync_interval.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from grpo_lab.harness.cluster_runs import ABLATION_CLUSTER, run_cluster, scenario_at
from grpo_lab.harness.experiment import Claim, Experiment, Point, Scale, Setting, grid, points_of
from grpo_lab.harness.plots import curves, log_axis, new_figure

NAME = "sync_interval"
SMALL: Mapping[str, Sequence[Setting]] = {"max_staleness": [0, 1, 2, 4], "weight_sync_steps": [1, 2, 4, 8]}
FULL: Mapping[str, Sequence[Setting]] = {
    "max_staleness": [0, 1, 2, 3, 4, 8],
    "weight_sync_steps": [1, 2, 3, 4, 6, 8, 16],
}
PANELS = {
    "tokens_per_s": "tokens trained on per second",
    "trainer_idle_share": "share of time the trainer waits",
    "staleness_versions_mean": "mean staleness (versions)",
    "staleness_steps_mean": "mean staleness (optimizer steps)",
}
READING = """
**Throughput, waiting.** With bound 0 the engines wait for the trainer and the trainer for the longest sample,
once a sync; that bubble is what a larger interval or a bound above 0 removes. Once it is gone, only the sync
itself is left to save, and k steps share it.

**Staleness.** The same samples look young in versions and old in optimizer steps when syncs are rare: a bound
s on versions is a bound of k s + k - 1 on steps (less where the limit on samples in flight holds first).
Compare settings by steps, which is what learning feels: the upper left of `trade_off` is the cheapest way.
"""


def points(scale: Scale) -> list[Point]:
    return points_of(NAME, grid(FULL if scale.full else SMALL), scale)


def run(point: Point, folder: Path) -> Mapping[str, Setting]:
    return run_cluster(scenario_at(point))


def figures(table: pd.DataFrame) -> dict[str, Figure]:
    bounds = sorted(table["max_staleness"].unique())
    panels = new_figure(2, 2)
    for axes, (column, words) in zip(panels.axes, PANELS.items(), strict=True):
        curves(axes, table, x="weight_sync_steps", y=column, by="max_staleness", order=bounds)
        log_axis(axes, sorted(table["weight_sync_steps"].unique()))
        axes.set_ylabel(words)
    trade = new_figure()
    means = table.groupby(["max_staleness", "weight_sync_steps"], as_index=False).mean(numeric_only=True)
    curves(trade.axes[0], means, x="staleness_steps_mean", y="tokens_per_s", by="max_staleness", order=bounds)
    trade.axes[0].set_xlabel("mean staleness (optimizer steps), means over seeds")
    trade.axes[0].set_ylabel(PANELS["tokens_per_s"])
    return {"sync_interval": panels, "trade_off": trade}


def claims(table: pd.DataFrame) -> Sequence[Claim]:
    interval, bound = table["weight_sync_steps"], table["max_staleness"]
    spare = (interval * bound + interval - 1 - table["staleness_steps_max"]).min()
    within = bool((table["staleness_versions_max"] <= bound).all() and spare >= 0)
    return [
        Claim(
            "no sample is older than s versions, or than k s + k - 1 optimizer steps",
            within,
            f"{len(table)} runs; the closest is {spare:.0f} steps below",
        ),
        _rises(table, 0, "tokens_per_s", "with bound 0 a longer interval buys throughput"),
        _amortised(table),
        *(
            _rises(table, bound, "staleness_steps_mean", f"with bound {bound} it is paid for in steps of age")
            for bound in sorted(bound.unique())
        ),
    ]


def _rises(table: pd.DataFrame, bound: int, column: str, words: str) -> Claim:
    means = table[table["max_staleness"] == bound].groupby("weight_sync_steps")[column].mean()
    text = ", ".join(f"k={interval}: {value:.3g}" for interval, value in means.items())
    return Claim(words, bool(means.is_monotonic_increasing), text)


def _amortised(table: pd.DataFrame) -> Claim:
    """Where the trainer hardly waits, a step takes step_s + sync_s / k."""
    busy = table[(table["trainer_idle_share"] < 0.01) & (table["max_staleness"] > 0)]
    expected_s = ABLATION_CLUSTER.step_s + busy["sync_s_mean"] / busy["weight_sync_steps"]
    error = ((busy["step_s"] - expected_s) / expected_s).abs()
    worst = float(error.max()) if len(busy) else float("nan")
    words = (
        "where the trainer waits for less than 1 %, a step takes its own time and a k-th of a sync (to 3 %)"
    )
    return Claim(words, bool(worst < 0.03), f"{len(busy)} runs, largest error {worst:.1%}")


EXPERIMENT = Experiment(
    NAME,
    "What do rare weight syncs buy in throughput, and what do they cost in staleness, at each bound?",
    points,
    run,
    figures,
    claims,
    READING,
    defaults={
        "staleness_policy": "admission",
        "step_s": ABLATION_CLUSTER.step_s,
        "steps": ABLATION_CLUSTER.steps,
    },
)
