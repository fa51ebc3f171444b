"""Which samples are trained on, when generation runs ahead of the trainer?

``admission`` holds prompts back until the bound lets them in and consumes in dispatch order; ``window`` lets
finished groups overtake unfinished ones by a bounded number; ``drop`` admits freely and throws away what has
become too old; ``freshest`` also takes the youngest first. The more samples may be in flight, the further
generation runs ahead.

    grpo-lab sweep experiments/admission.py
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from grpo_lab.events import GroupAdmitted, GroupConsumed, GroupDropped, Record, SampleCompleted
from grpo_lab.harness.cluster_runs import ABLATION_CLUSTER, cluster_figures, records_of, scenario_at
from grpo_lab.harness.experiment import Claim, Experiment, Point, Scale, Setting, grid, points_of
from grpo_lab.harness.plots import curves, new_figure

NAME = "admission"
POLICIES = ("admission", "window", "freshest", "drop")
SMALL: Mapping[str, Sequence[Setting]] = {
    "staleness_policy": list(POLICIES),
    "max_staleness": [1, 2, 4],
    "max_inflight": [32, 128],
}
FULL: Mapping[str, Sequence[Setting]] = {
    "staleness_policy": list(POLICIES),
    "max_staleness": [1, 2, 3, 4, 6, 8],
    "max_inflight": [32, 64, 128, 256],
}
CLUSTER = dataclasses.replace(ABLATION_CLUSTER, engines=4, queue_capacity=16, length_sigma=1.0)
PANELS = {
    "starved_share": "share of prompts that are never trained on",
    "length_bias": "mean length trained on / of these prompts",
    "staleness_versions_mean": "mean staleness (versions)",
    "tokens_per_s": "tokens trained on per second",
}
READING = """
**Starvation and bias.** A prompt whose group was dropped is never trained on in this pass over the data.
Which ones are dropped is not chance: long completions are finished late and are too old first, so `drop` and
`freshest` train on shorter samples than the model makes (a ratio below 1) and starve hard prompts. The
further generation runs ahead of the trainer, the more.

**Staleness and throughput.** Under a tight bound `admission` lets the trainer wait; `drop` and `freshest`
pay with tokens that nobody trains on, which also costs throughput. A window of one step's groups takes its
room from the bound: at equal bounds `window` is younger and slower than `admission`, so compare it one bound
higher.
"""


def points(scale: Scale) -> list[Point]:
    return points_of(NAME, grid(FULL if scale.full else SMALL), scale)


def run(point: Point, folder: Path) -> Mapping[str, Setting]:
    scenario = scenario_at(point, CLUSTER)
    if scenario.staleness_policy == "window":
        scenario = dataclasses.replace(scenario, window=scenario.prompts_per_step)
    records = records_of(scenario)
    return {**cluster_figures(records), **fairness_figures(records)}


def fairness_figures(records: Iterable[Record]) -> dict[str, Setting]:
    """Of the prompts whose groups were admitted before the last one that was trained on was.

    Later ones had no chance yet, and are left out; of the others, those that are neither trained on nor
    dropped were still under way. ``length_bias`` compares the samples trained on with all finished ones of
    these prompts. ``overtaken_max`` counts, for a group that was trained on, those admitted later and trained
    on in an earlier step.
    """
    admitted: dict[str, int] = {}
    step_of: dict[str, int] = {}
    dropped: set[str] = set()
    tokens: dict[str, list[int]] = {}
    for event in (record.event for record in records):
        match event:
            case GroupAdmitted():
                admitted[event.group] = event.number
            case GroupConsumed():
                step_of[event.group] = event.optimizer_step
            case GroupDropped(reason="stale"):
                dropped.add(event.group)
            case SampleCompleted():
                tokens.setdefault(event.group, []).append(event.tokens)
    last = max(admitted[group] for group in step_of)
    counted = [group for group, number in admitted.items() if number <= last]
    ended = [group for group in counted if group in step_of or group in dropped]
    made = [size for group in ended for size in tokens[group]]
    used = [size for group in ended if group in step_of for size in tokens[group]]
    lost = [size for group in ended if group in dropped for size in tokens[group]]
    return {
        "prompts_counted": len(counted),
        "prompts_starved": sum(group in dropped for group in counted),
        "prompts_under_way": len(counted) - len(ended),
        "starved_share": sum(group in dropped for group in counted) / len(counted),
        "length_bias": statistics.fmean(used) / statistics.fmean(made),
        "dropped_length_mean": statistics.fmean(lost) if lost else None,
        "overtaken_max": _overtaken(admitted, step_of),
    }


def _overtaken(admitted: Mapping[str, int], step_of: Mapping[str, int]) -> int:
    order = sorted(step_of, key=admitted.__getitem__)
    steps = [step_of[group] for group in order]
    return max(sum(later < step for later in steps[index:]) for index, step in enumerate(steps))


def figures(table: pd.DataFrame) -> dict[str, Figure]:
    found = {}
    for inflight, rows in table.groupby("max_inflight"):
        figure = new_figure(2, 2)
        for axes, (column, words) in zip(figure.axes, PANELS.items(), strict=True):
            curves(axes, rows, x="max_staleness", y=column, by="staleness_policy", order=POLICIES)
            axes.set_ylabel(words)
            axes.set_xlabel(f"bound (versions), {inflight} samples in flight")
        found[f"admission_{inflight}"] = figure
    return found


def claims(table: pd.DataFrame) -> Sequence[Claim]:
    policy = table["staleness_policy"]
    held = table[policy.isin(["admission", "window"])]
    free = table[policy.isin(["drop", "freshest"])]
    window, bias = table[policy == "window"], table.groupby("staleness_policy")["length_bias"].mean()
    order = table[policy == "admission"]["overtaken_max"].max()
    return [
        Claim(
            "admission starves no prompt, and window neither",
            bool((held["prompts_starved"] == 0).all() and (held["samples_dropped_stale"] == 0).all()),
            f"{held['prompts_starved'].sum()} of {held['prompts_counted'].sum():,} in {len(held)} runs",
        ),
        Claim(
            "drop and freshest do starve prompts when generation runs ahead",
            bool((free[free["max_inflight"] == table["max_inflight"].max()]["prompts_starved"] > 0).any()),
            f"{free['prompts_starved'].sum():,} of {free['prompts_counted'].sum():,} in {len(free)} runs",
        ),
        Claim(
            "admission consumes in dispatch order, window within its window",
            bool(order == 0 and window["overtaken_max"].max() < CLUSTER.prompts_per_step),
            f"overtaken at most {order:.0f} and {window['overtaken_max'].max():.0f} times",
        ),
        Claim(
            "admission and window train on lengths as they are made; drop prefers short ones",
            bool(
                abs(bias["admission"] - 1) < 1e-9 and abs(bias["window"] - 1) < 0.03 and bias["drop"] < 0.99
            ),
            ", ".join(f"{name}: {bias[name]:.3f}" for name in POLICIES),
        ),
        _waste(table),
        Claim(
            "every policy keeps the bound",
            bool((table["staleness_versions_max"] <= table["max_staleness"]).all()),
            f"{len(table)} runs",
        ),
    ]


def _waste(table: pd.DataFrame) -> Claim:
    """At the tightest bound and with most in flight."""
    hard = table[table["max_inflight"] == table["max_inflight"].max()]
    hard = hard[hard["max_staleness"] == hard["max_staleness"].min()]
    speed = hard.groupby("staleness_policy")["tokens_per_s"].mean()
    return Claim(
        "under the tightest bound, with most in flight, admission trains on more tokens per second than drop",
        bool(speed["admission"] > speed["drop"]),
        ", ".join(f"{name}: {speed[name]:,.0f}" for name in POLICIES),
    )


EXPERIMENT = Experiment(
    NAME,
    "What does each staleness policy do to prompts, to lengths, to staleness and to throughput?",
    points,
    run,
    figures,
    claims,
    READING,
    defaults={"engines": CLUSTER.engines, "window": CLUSTER.prompts_per_step, "steps": CLUSTER.steps},
)
