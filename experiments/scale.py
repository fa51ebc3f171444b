"""How long is a weight sync with 1 to 1,000 engines, and for how long does an engine stand still?

The coordinator syncs all engines at once. The weights go to them from the trainer one by one (``p2p``), down
a binary tree or around a ring; every node has one uplink and passes on what has arrived whole, bucket by
bucket. A ring needs many buckets under way: it is shown with 2 slots, as real runs have them, and with one
for each. ``rolling`` is the other scope: one engine after another is paused, gets its weights and goes on,
while the others generate with what they have. (The first sync of a run has no turns, and is left out.)

**The closed form.** A version of B equal buckets takes w seconds on a wire, so a bucket w / B, and a hop
takes a seconds on top. A bucket reaches the last of n engines after D; the next one can follow r later, the
time that the busiest uplink spends on each:

    p2p     r = n w / B            D = n w / B + a
    tree    r = min(n, 2) w / B    D = the largest sum of (k w / B + a) on a path, k-th child of its node
    ring    r = w / B              D = n (w / B + a)

With S slots bucket j is sent when bucket j - S has arrived everywhere, so that in the mean S / D buckets a
second is the most that goes. All B of them take about

    D (1 + floor((B - 1) / S)) + ((B - 1) mod S) r,    or  D + (B - 1) r where S r > D.

Rolling is n times that of one engine.

    grpo-lab sweep experiments/scale.py
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_lab.events import (
    EnginePaused,
    EngineResumed,
    ModelStep,
    Record,
    SyncEnded,
    VersionCommitted,
    WeightsActivated,
    WeightsPublished,
)
from grpo_lab.harness.cluster_runs import ABLATION_CLUSTER, scenario_of
from grpo_lab.harness.experiment import Claim, Experiment, Point, Scale, Setting, grid, points_of
from grpo_lab.harness.plots import COLOURS, MARKERS, curves, interval, log_axis, new_figure
from grpo_lab.sim.scenario import Scenario
from grpo_lab.sim.world import simulate

NAME = "scale"
FIRST = 1  # version
ROLLING = "rolling"
WAYS: Mapping[str, tuple[str, int]] = {
    "p2p": ("p2p", 2),
    "tree": ("tree", 4),
    "ring": ("ring", 4),
    "ring, 2 slots": ("ring", 2),
    ROLLING: ("p2p", 2),
}
COPY_S = 0.01  # of one version over one link
TOLERANCE = 0.10
SMALL: Mapping[str, Sequence[Setting]] = {"way": list(WAYS), "engines": [1, 8, 64, 1000]}
FULL: Mapping[str, Sequence[Setting]] = {
    "way": list(WAYS),
    "engines": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000],
}
CLUSTER = dataclasses.replace(
    ABLATION_CLUSTER,
    prompts_per_step=4,
    generations=2,
    max_inflight=16,
    mean_tokens=100,
    max_tokens=200,
    steps=3,
    kv_blocks=1000,  # of every engine: a hundred thousand are 6 MB of this process
    step_s=1.0,
    network_s=1e-4,
    bucket_bytes=384,  # one tensor each: equal buckets
)
MODEL_BYTES = 1536
READING = """
**Sync time.** One by one the time grows with the number of engines, down a tree with its logarithm; a ring
is about as good for few engines, and pays a hop for every further one. With two slots the ring's pipeline is
empty most of the time: slots, not links, limit it. Rolling is point to point with the calls of a sync for
each engine on top. Lines are the closed form (docstring), points the simulated wire phase under the same
coordinator that syncs real clusters.

**Standing still.** What an engine pays: from its pause to its resume. All of a sync where engines switch
together; rolling, its own turn alone, whatever the number of the others.

**Two versions at once.** Together, all engines load before any of them goes on, so that none serves another
version than the rest, and between the first that has switched and the last lie only the messages. Rolling,
the first serves a version that is not committed yet for as long as the turns of all others take, while the
trainer, whose weights must not change, waits: with 1,000 engines longer than many of its steps.
"""


def points(scale: Scale) -> list[Point]:
    return points_of(NAME, grid(FULL if scale.full else SMALL), scale)


def scenario_at(point: Point) -> Scenario:
    settings = dict(point.settings)
    topology, slots = WAYS[str(settings.pop("way"))]
    fixed: dict[str, Setting] = {"topology": topology, "ring_slots": slots, "seed": point.seed}
    fixed["sync_scope"] = "rolling" if point.settings["way"] == ROLLING else "global"
    return scenario_of(CLUSTER, {**settings, **fixed, "bandwidth_bytes_s": MODEL_BYTES / COPY_S})


def run(point: Point, folder: Path) -> Mapping[str, Setting]:
    scenario = scenario_at(point)
    records: list[Record] = []
    rolling = point.settings["way"] == ROLLING
    simulate(scenario, records=records, checked=False)
    sizes = next(
        record.event for record in records if isinstance(record.event, WeightsPublished)
    ).bucket_nbytes
    alone = dataclasses.replace(scenario, engines=1) if rolling else scenario
    turns = scenario.engines if rolling else 1
    return {
        **sync_figures(records),
        "wire_s_predicted": turns * predicted_wire_s(alone, sum(sizes), len(sizes)),
    }


def predicted_wire_s(scenario: Scenario, nbytes: int, buckets: int) -> float:
    """The closed form of the module's docstring."""
    engines, slots = scenario.engines, scenario.ring_slots
    bucket_s = nbytes / scenario.bandwidth_bytes_s / buckets
    hop_s = scenario.network_s * (1 + scenario.jitter / 2)
    match scenario.topology:
        case "p2p":
            rate_s, all_s = engines * bucket_s, engines * bucket_s + hop_s
        case "ring":
            rate_s, all_s = bucket_s, engines * (bucket_s + hop_s)
        case _:
            rate_s, all_s = min(engines, 2) * bucket_s, _tree_s(engines, bucket_s, hop_s)
    if slots * rate_s > all_s:
        return all_s + (buckets - 1) * rate_s
    return all_s * (1 + (buckets - 1) // slots) + ((buckets - 1) % slots) * rate_s


def _tree_s(engines: int, bucket_s: float, hop_s: float) -> float:
    """The node n > 0 is the first child of its own for odd n, the second for even n."""

    def path_s(node: int) -> float:
        total_s = 0.0
        while node > 0:
            total_s += (2 - node % 2) * bucket_s + hop_s
            node = (node - 1) // 2
        return total_s

    return max(path_s(node) for node in range(1, engines + 1))


def sync_figures(records: Sequence[Record]) -> dict[str, Setting]:
    """Means over the versions after the first. ``wire_s`` and ``sync_s``: of all turns of a sync.

    ``paused_s``: how long an engine stands still. ``activation_spread_s``: from the first engine that
    switches to a version to the last. ``lag_versions_max``, ``ahead_versions_max``: of any model step, how
    far its weights are behind the newest committed ones, or ahead of them.
    """
    wire_s: dict[int, float] = {}
    total_s: dict[int, float] = {}
    active_s: dict[int, list[float]] = {}
    paused_at_s: dict[str, float] = {}
    paused_s: list[float] = []
    committed = lag = ahead = 0
    for record in records:
        match record.event:
            case SyncEnded(version=version, phases_s=phases_s) if version > FIRST:
                wire_s[version] = phases_s["wire"]
                total_s[version] = phases_s["total"]
            case EnginePaused(engine=engine) if committed >= FIRST:
                paused_at_s[engine] = record.t
            case EngineResumed(engine=engine) if engine in paused_at_s:
                paused_s.append(record.t - paused_at_s.pop(engine))
            case VersionCommitted(version=version):
                committed = version
            case WeightsActivated(shard=0, version=version) if version > FIRST:
                active_s.setdefault(version, []).append(record.t)
            case ModelStep(shard=0, version=version):
                lag, ahead = max(lag, committed - version), max(ahead, version - committed)
    wire_mean_s, total_mean_s = statistics.fmean(wire_s.values()), statistics.fmean(total_s.values())
    return {
        "wire_s": wire_mean_s,
        "sync_s": total_mean_s,
        "rest_s": total_mean_s - wire_mean_s,
        "paused_s": statistics.fmean(paused_s),
        "activation_spread_s": statistics.fmean(max(times) - min(times) for times in active_s.values()),
        "lag_versions_max": lag,
        "ahead_versions_max": ahead,
        "versions": committed,
    }


def figures(table: pd.DataFrame) -> dict[str, Figure]:
    figure = new_figure(3)
    wire, paused, spread = figure.axes
    engines = sorted(table["engines"].unique())
    for axes, column in ((paused, "paused_s"), (spread, "activation_spread_s")):
        curves(axes, table[table[column] > 0], x="engines", y=column, by="way", order=list(WAYS))
    for index, way in enumerate(WAYS):
        rows = table[table["way"] == way]
        line = rows.groupby("engines")["wire_s_predicted"].mean()
        wire.plot(line.index, line.to_numpy(), color=COLOURS[index], linewidth=1.0, linestyle="--")
        found = [interval(rows.loc[rows["engines"] == count, "wire_s"]) for count in line.index]
        means, halves = [mean for mean, _ in found], [half for _, half in found]
        wire.errorbar(
            line.index,
            means,
            yerr=halves,
            color=COLOURS[index],
            marker=MARKERS[index],
            markersize=5,
            linestyle="none",
            capsize=2.5,
            label=way,
        )
    wire.legend(frameon=False, fontsize=8)
    wire.set_ylabel("wire phase of a sync (s); dashed: closed form")
    paused.set_ylabel("an engine stands still (s a sync)")
    spread.set_ylabel("first to last engine that switches (s)")
    for axes, column in ((wire, "wire_s"), (paused, "paused_s"), (spread, "activation_spread_s")):
        _powers_of_ten(axes, table.loc[table[column] > 0, column])
        log_axis(axes, engines, base=10)
        axes.set_xlabel("engines")
    return {NAME: figure}


def _powers_of_ten(axes: Axes, values: pd.Series) -> None:
    least, most = math.floor(math.log10(values.min())), math.ceil(math.log10(values.max()))
    log_axis(axes, [10.0**power for power in range(least, most + 1)], base=10, vertical=True)


def claims(table: pd.DataFrame) -> Sequence[Claim]:
    means = table.groupby(["way", "engines"])[["wire_s", "wire_s_predicted", "rest_s", "paused_s"]].mean()
    error = (means["wire_s"] - means["wire_s_predicted"]).abs() / means["wire_s_predicted"]
    most = table["engines"].max()
    last = means.xs(most, level="engines")
    together, rolling = table[table["way"] != ROLLING], table[table["way"] == ROLLING]
    return [
        Claim(
            f"the closed form is within {TOLERANCE:.0%} of the wire phase",
            bool(error.max() <= TOLERANCE),
            f"{len(means)} settings, largest error {error.max():.1%}",
        ),
        Claim(
            f"with {most:,} engines a tree is faster than a ring, and a ring faster than one by one",
            bool(last.loc["tree", "wire_s"] < last.loc["ring", "wire_s"] < last.loc["p2p", "wire_s"]),
            ", ".join(f"{way}: {last.loc[way, 'wire_s']:.3g} s" for way in last.index),
        ),
        Claim(
            "where engines switch together, none serves any weights but the committed ones",
            bool((together[["lag_versions_max", "ahead_versions_max"]] == 0).all(axis=None)),
            f"{together['versions'].sum()} syncs; all switch within "
            f"{together['activation_spread_s'].max():.2g} s",
        ),
        Claim(
            "rolling, no engine is behind the committed version, and one of several is a version ahead",
            bool(
                (rolling["lag_versions_max"] == 0).all()
                and (rolling["ahead_versions_max"] == (rolling["engines"] > 1)).all()
            ),
            f"{rolling['versions'].sum()} versions; first to last with {most:,} engines "
            f"{rolling.loc[rolling['engines'] == most, 'activation_spread_s'].mean():.3g} s",
        ),
        _rolling_turn(means),
        _calls_hardly_grow(together),
    ]


def _rolling_turn(means: pd.DataFrame) -> Claim:
    """The turn of one of many engines against that of the only one."""
    turns = means.loc[ROLLING, "paused_s"]
    last = means.xs(turns.index.max(), level="engines")["paused_s"]
    return Claim(
        "rolling, an engine stands still as long as the only one of a cluster does (to 5 %)",
        bool((turns / turns.iloc[0] - 1).abs().max() < 0.05),
        f"with {turns.index.max():,} engines " + ", ".join(f"{way}: {s:.3g} s" for way, s in last.items()),
    )


def _calls_hardly_grow(together: pd.DataFrame) -> Claim:
    rest = together.groupby("engines")["rest_s"].mean()
    fewest, most = rest.index.min(), rest.index.max()
    words = "together, calls and barriers grow by less than a half from the fewest engines to the most"
    evidence = f"{1000 * rest[fewest]:.2g} ms with {fewest}, {1000 * rest[most]:.2g} ms with {most:,}"
    return Claim(words, bool(rest[most] < 1.5 * rest[fewest]), evidence)


EXPERIMENT = Experiment(
    NAME,
    "How does the time of a weight sync grow from 1 to 1,000 engines, by the way of the weights, and how far "
    "do engines' versions lag?",
    points,
    run,
    figures,
    claims,
    READING,
    defaults={"copy_s": COPY_S, "bucket_bytes": CLUSTER.bucket_bytes},
)
