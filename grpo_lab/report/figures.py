"""The charts of the report: learning, staleness, sync cost, losses. Each takes a ``Digest``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from grpo_lab.report.digest import Digest
from grpo_lab.report.gantt import gantt, utilisation
from grpo_lab.report.style import (
    BLUE,
    GREEN,
    HALF_IN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    REST,
    SKY,
    SLATE,
    WAITING,
    WIDE_IN,
    YELLOW,
    Chart,
    bound_line,
    canvas,
    drawing,
    label,
    legend_above,
    plain_log,
    thinned,
    to_svg,
)
from grpo_lab.report.sync_log import PHASES
from grpo_lab.report.training_log import Evaluation, Step

PHASE_COLOURS = dict(zip(PHASES, (SKY, GREEN, BLUE, PURPLE, YELLOW, ORANGE, SLATE), strict=True))
MAX_BARS = 150


def charts(digest: Digest) -> dict[str, Chart]:
    """All charts of a run, by name, in the order of the page."""
    makers: tuple[Callable[[Digest], Chart], ...] = (
        learning,
        staleness,
        version_lag,
        sync_cost,
        step_time,
        gantt,
        utilisation,
        drops,
        logprob_gap,
    )
    with drawing():
        drawn = [maker(digest) for maker in makers]
    return {chart.name: chart for chart in drawn}


def clock_words(digest: Digest) -> str:
    return "virtual seconds since the run began" if digest.simulated else "seconds since the run began"


def learning(digest: Digest) -> Chart:
    """Reward and accuracy twice: against optimizer steps and against the clock."""
    title = "Reward and held-out accuracy"
    caption = (
        "Above: mean reward of each optimizer step. Below: greedy accuracy on prompts that are never "
        "trained on. Left against optimizer steps, right against the clock."
    )
    steps = [step for step in digest.training.steps if step.reward_mean is not None]
    evaluations = digest.training.evaluations
    if not steps and not evaluations:
        words = "No optimizer step and no evaluation is in the trace."
        return Chart("learning", title, caption, words=words, wide=True)
    figure = canvas(WIDE_IN, 4.6)
    (reward_by_step, reward_by_clock), (accuracy_by_step, accuracy_by_clock) = figure.subplots(
        2, 2, sharex="col", sharey="row"
    )
    _reward_panel(reward_by_step, [(step.step, step.reward_mean or 0.0) for step in steps])
    _reward_panel(reward_by_clock, [(step.t, step.reward_mean or 0.0) for step in steps])
    _accuracy_panel(accuracy_by_step, evaluations, lambda item: item.step)
    _accuracy_panel(accuracy_by_clock, evaluations, lambda item: item.t)
    accuracy_by_step.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    label(reward_by_step, "", "reward")
    label(accuracy_by_step, "optimizer step", "accuracy (fraction)")
    label(accuracy_by_clock, clock_words(digest), "")
    for axes in (reward_by_clock, accuracy_by_clock):
        if axes.has_data():
            legend_above(axes)
    return Chart("learning", title, caption, to_svg(figure, "learning"), wide=True)


def _reward_panel(axes: Axes, rewards: Sequence[tuple[float, float]]) -> None:
    if not rewards:
        axes.text(0.5, 0.5, "no reward in the trace", transform=axes.transAxes, ha="center", color=MUTED)
        return
    values = [value for _, value in rewards]
    around = [values[max(0, i - 2) : i + 3] for i in range(len(values))]
    means = [(x, sum(near) / len(near)) for (x, _), near in zip(rewards, around, strict=True)]
    axes.plot(*zip(*thinned(rewards), strict=True), ".", color=SKY, markersize=4, label="a step")
    axes.plot(*zip(*thinned(means), strict=True), color=BLUE, label="mean of the five steps around it")


def _accuracy_panel(
    axes: Axes, evaluations: Sequence[Evaluation], place: Callable[[Evaluation], float]
) -> None:
    if not evaluations:
        axes.text(0.5, 0.5, "no evaluation in the trace", transform=axes.transAxes, ha="center", color=MUTED)
        return
    axes.set_ylim(-0.03, 1.03)
    splits = sorted({item.split for item in evaluations}, key=lambda split: (split != "heldout", split))
    looks = zip((ORANGE, GREEN, PURPLE, RED, MUTED), "osD^v", strict=True)
    for split, (colour, marker) in zip(splits, looks, strict=False):
        points = [(place(item), item.accuracy) for item in evaluations if item.split == split]
        name = "held-out" if split == "heldout" else split
        axes.plot(
            *zip(*thinned(points), strict=True), color=colour, marker=marker, markersize=4.5, label=name
        )


def staleness(digest: Digest) -> Chart:
    """Histograms of staleness at consumption, with the bound where there is one."""
    title = "Staleness at consumption"
    caption = (
        "How far the trainer had moved on from the weights that sampled a completion's first token, "
        "when its gradient was computed."
    )
    training = digest.training
    if not training.staleness_versions:
        return Chart("staleness", title, caption, words="No sample was consumed.")
    parameters = digest.declared.parameters if digest.declared else {}
    figure = canvas(HALF_IN, 3.1)
    left, right = figure.subplots(1, 2, sharey=True)
    _histogram(left, training.staleness_versions, parameters.get("max_staleness"))
    _histogram(right, training.staleness_steps, parameters.get("max_staleness_steps"))
    label(left, "weight versions", "samples")
    label(right, "optimizer steps", "")
    return Chart("staleness", title, caption, to_svg(figure, "staleness"))


def _histogram(axes: Axes, counts: Counter[int], bound: object) -> None:
    axes.bar(list(counts), list(counts.values()), width=0.82, color=BLUE)
    low, high = min(counts, default=0), max(counts, default=0)
    if isinstance(bound, int | float) and math.isfinite(bound) and bound <= 4 * max(high, 4):
        bound_line(axes, bound + 0.5, f"bound {bound:g}", horizontal=False)
        high = max(high, int(bound))
    axes.set_xlim(min(low, 0) - 0.6, max(high, 2) + 0.75)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.grid(visible=False, axis="x")
    if not counts:
        axes.text(0.5, 0.5, "unknown", transform=axes.transAxes, ha="center", color=MUTED)


def version_lag(digest: Digest) -> Chart:
    """Versions over time: committed, active on engines, and of the tokens that were consumed."""
    title = "Version lag over time"
    caption = (
        "Above: the committed version, each engine's active one, and the versions of the tokens that "
        "each step consumed. Below: how many versions those tokens lag behind the trainer."
    )
    commits = [(t, version) for t, _, version in digest.syncs.commits]
    steps = [step for step in digest.training.steps if step.version_oldest is not None]
    if not commits and not steps:
        return Chart("version_lag", title, caption, words="No version was committed and no sample consumed.")
    figure = canvas(HALF_IN, 3.1)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for index, engine in enumerate(digest.engines[:16]):
        line = thinned([*engine.versions, *((digest.end_t, v) for _, v in engine.versions[-1:])])
        if line:
            upper.step(*zip(*line, strict=True), where="post", color=GREEN, linewidth=2.6, alpha=0.45,
                       label="active on an engine" if index == 0 else None)  # fmt: skip
    if commits:
        line = thinned([*commits, (digest.end_t, commits[-1][1])])
        upper.step(*zip(*line, strict=True), where="post", color=INK, linewidth=1.0, label="committed")
    _consumed_versions(upper, lower, steps)
    bound = digest.declared.parameters.get("max_staleness") if digest.declared else None
    worst = max((step.version - (step.version_oldest or 0) for step in steps), default=0)
    if isinstance(bound, int | float) and bound <= 4 * max(worst, 4):
        bound_line(lower, bound, f"bound {bound:g}")
    lower.set_ylim(bottom=min(-0.3, lower.get_ylim()[0]))
    for axes in (upper, lower):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    label(upper, "", "weight version")
    label(lower, clock_words(digest), "versions behind")
    legend_above(upper, columns=3)
    return Chart("version_lag", title, caption, to_svg(figure, "version_lag"))


def _consumed_versions(upper: Axes, lower: Axes, steps: Sequence[Step]) -> None:
    """A bar a step from its oldest token to its newest; in a long run, a bar for several steps."""
    size = max(1, -(-len(steps) // 200))
    for begin in range(0, len(steps), size):
        stretch = steps[begin : begin + size]
        t = stretch[0].begin_t if stretch[0].begin_t is not None else stretch[0].t
        oldest = min(step.version_oldest or 0 for step in stretch)
        newest = max(step.version_newest or 0 for step in stretch)
        behind = max(step.version - (step.version_oldest or 0) for step in stretch)
        ahead = min(step.version - (step.version_newest or 0) for step in stretch)
        first = "oldest token consumed" if begin == 0 else None
        for axes, end, dot in ((upper, newest, oldest), (lower, ahead, behind)):
            axes.plot([t, t], [end, dot], color=ORANGE, linewidth=1.0)
            axes.plot([t], [dot], ".", color=ORANGE, markersize=4, label=first)


def sync_cost(digest: Digest) -> Chart:
    """Seconds of each sync, by phase; the black tick is its wall time."""
    title = "Cost of a weight sync, by phase"
    caption = (
        "One bar a sync; rest is what no phase covers, such as the canary. Gathering, packing and sending "
        "overlap, so a bar (work) may be higher than its black tick (elapsed time)."
    )
    ended = [sync for sync in digest.syncs.syncs if sync.end_t is not None]
    if not ended:
        return Chart("sync_cost", title, caption, words="No weight sync ended in this trace.")
    size = -(-len(ended) // MAX_BARS)
    if size > 1:
        caption += f" Each bar is the mean of {size} syncs."
    groups = [ended[i : i + size] for i in range(0, len(ended), size)]
    distinct = len({sync.version for sync in ended}) == len(ended)  # not so after an aborted one
    places = [group[0].version if distinct else index * size for index, group in enumerate(groups)]
    figure = canvas(HALF_IN, 3.1)
    axes = figure.subplots()
    totals = [sum(sync.total_s or 0.0 for sync in group) / len(group) for group in groups]
    bases = [0.0] * len(groups)
    heights = {
        phase: [sum(sync.phases_s.get(phase, 0.0) for sync in group) / len(group) for group in groups]
        for phase in PHASES
    }
    # What no phase covers: canary, agreement of ranks, waiting for the loop.
    stacks = [sum(stack) for stack in zip(*heights.values(), strict=True)]
    heights["rest"] = [max(0.0, total - stack) for total, stack in zip(totals, stacks, strict=True)]
    highest = max([*totals, *stacks])
    scale, unit = (1000.0, "milliseconds") if highest < 1 else (1.0, "seconds")
    for phase, values in heights.items():
        scaled = [value * scale for value in values]
        colour = PHASE_COLOURS.get(phase, REST)
        axes.bar(places, scaled, bottom=bases, width=_bar_width(size), color=colour, label=phase)
        bases = [base + value for base, value in zip(bases, scaled, strict=True)]
    axes.plot(places, [total * scale for total in totals], "_", color=INK, markersize=7, label="elapsed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.grid(visible=False, axis="x")
    label(axes, "weight version" if distinct else "sync", unit)
    legend_above(axes, columns=9)
    return Chart("sync_cost", title, caption, to_svg(figure, "sync_cost"))


def _bar_width(size: int) -> float:
    """Bars that stand for one thing stand apart; those that stand for several fill their stretch."""
    return 0.8 if size == 1 else float(size)


def step_time(digest: Digest) -> Chart:
    """What the trainer did with its time, step by step."""
    title = "Where each step's time went"
    caption = "Seconds of each optimizer step: waiting for samples, training, and syncing weights before it."
    steps = digest.training.steps
    if not steps:
        return Chart("step_time", title, caption, words="No optimizer step was applied.")
    size = -(-len(steps) // MAX_BARS)
    if size > 1:
        caption += f" Each bar is the mean of {size} steps."
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    places = [group[0].step for group in groups]
    parts: dict[str, tuple[str, Callable[[Step], float]]] = {
        "training": (BLUE, lambda step: step.duration_s),
        "waiting for samples": (WAITING, lambda step: step.wait_s),
        "weight sync": (PURPLE, lambda step: step.weight_sync_time_s),
    }
    figure = canvas(HALF_IN, 3.1)
    axes = figure.subplots()
    bases = [0.0] * len(groups)
    for name, (colour, seconds) in parts.items():
        values = [sum(seconds(step) for step in group) / len(group) for group in groups]
        axes.bar(places, values, bottom=bases, width=_bar_width(size), color=colour, label=name)
        bases = [base + value for base, value in zip(bases, values, strict=True)]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.grid(visible=False, axis="x")
    label(axes, "optimizer step", "seconds")
    legend_above(axes)
    return Chart("step_time", title, caption, to_svg(figure, "step_time"))


def drops(digest: Digest) -> Chart:
    """Samples that were generated, or asked for, and never trained on."""
    title = "Dropped samples, by reason"
    caption = "Completions that were dispatched and never trained on. A group is dropped as a whole."
    dropped, dispatched = digest.rollouts.dropped, digest.rollouts.dispatched
    if not dropped:
        words = (
            f"No sample was dropped: all {dispatched:,} dispatched samples were consumed or are on the way."
        )
        return Chart("drops", title, caption, words=words if dispatched else "No sample was dispatched.")
    rows = dropped.most_common()
    figure = canvas(HALF_IN, 0.8 + 0.34 * len(rows))
    axes = figure.subplots()
    names = [reason.replace("_", " ") for reason, _ in rows]
    bars = axes.barh(range(len(rows)), [count for _, count in rows], height=0.6, color=RED)
    axes.bar_label(
        bars, [f"{n:,} ({n / max(dispatched, 1):.1%})" for _, n in rows], padding=3, fontsize=7.5, color=INK
    )
    axes.set_yticks(range(len(rows)), names, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(right=max(dropped.values()) * 1.22)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.grid(visible=False, axis="y")
    label(axes, "samples (share of those dispatched)", "")
    return Chart("drops", title, caption, to_svg(figure, "drops"))


def logprob_gap(digest: Digest) -> Chart:
    """The engine's logprobs against the trainer's, for the same weights and tokens."""
    title = "Logprob gap at equal weights"
    caption = (
        "Largest and mean absolute difference between the engine's logprob of a sampled token and the "
        "trainer's, on samples whose weight version is the trainer's own."
    )
    gaps = [gap for gap in digest.training.gaps if math.isfinite(gap[1])]
    lost = len(digest.training.gaps) - len(gaps)
    if lost:
        caption += f" {lost} measurements were not finite and are not drawn."
    if not gaps:
        words = "Every measured gap was not finite." if lost else "The gap was not measured in this run."
        return Chart("logprob_gap", title, caption, words=words)
    figure = canvas(HALF_IN, 2.5)
    axes = figure.subplots()
    for name, column, colour, marker in (("largest", 1, BLUE, "o"), ("mean", 2, SKY, "s")):
        points = thinned([(gap[0], gap[column]) for gap in gaps])
        shown = marker if len(points) <= 100 else ""
        axes.plot(*zip(*points, strict=True), color=colour, marker=shown, markersize=3, label=name)
    tolerance = digest.declared.parameters.get("logprob_tolerance") if digest.declared else None
    if isinstance(tolerance, int | float) and tolerance > 0:
        bound_line(axes, tolerance, f"tolerance {tolerance:g}")
    if any(gap[1] > 0 for gap in gaps):
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    axes.margins(y=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    label(axes, "weight version", "absolute difference (nats)")
    legend_above(axes)
    return Chart("logprob_gap", title, caption, to_svg(figure, "logprob_gap"))
