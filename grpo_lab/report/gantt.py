"""Who was busy when: a window from the middle of the run, and shares over the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from grpo_lab.report.digest import Digest
from grpo_lab.report.engine_log import EngineHistory
from grpo_lab.report.spans import Span, clipped, merged, total_s, without
from grpo_lab.report.style import (
    BLUE,
    GREEN,
    IDLE,
    INK,
    MUTED,
    ORANGE,
    PAUSED,
    PURPLE,
    RED,
    SKY,
    SLATE,
    WAITING,
    WIDE_IN,
    YELLOW,
    Chart,
    canvas,
    thinned,
    to_svg,
)
from grpo_lab.report.sync_log import Sync

MAX_ENGINES = 8
STATE_COLOURS = {
    "pausing": SKY,
    "paused": SKY,
    "transferring": PURPLE,
    "loaded": ORANGE,
    "probation": YELLOW,
    "resuming": SLATE,
    "aborting": RED,
}
LEGEND = (
    ("training", BLUE, ""),
    ("waiting for samples", WAITING, "////"),
    ("generating", GREEN, ""),
    ("paused", PAUSED, "\\\\\\\\"),
    ("sync: pause", SKY, ""),
    ("transfer", PURPLE, ""),
    ("loaded", ORANGE, ""),
    ("probation", YELLOW, ""),
    ("resume", SLATE, ""),
    ("idle", IDLE, ""),
)


def gantt(digest: Digest) -> Chart:
    """Trainer, syncs and engines side by side in the middle of the run, with the worker's load below."""
    title = "Who was busy when"
    if not digest.training.training and not any(engine.busy for engine in digest.engines):
        words = "Neither training nor generation is in the trace."
        return Chart("gantt", title, "", words=words, wide=True)
    window = middle_window(digest)
    caption = (
        f"From {window[0]:.2f} s to {window[1]:.2f} s, in the middle of the run. Grey is idle time. "
        "The whole run is in timeline.pftrace."
    )
    engines = digest.engines[:MAX_ENGINES]
    if len(digest.engines) > MAX_ENGINES:
        caption += f" The first {MAX_ENGINES} of {len(digest.engines)} engines are shown."
    if any(engine.seen_by == "client" for engine in engines):
        caption += " Engines marked * write no events: generating means that a request was in flight."
    rows = 2 + len(engines)
    figure = canvas(WIDE_IN, 1.9 + 0.3 * rows)
    upper, load = figure.subplots(2, 1, sharex=True, height_ratios=(rows, 2.6))
    _bars(upper, digest, engines, window)
    _load(load, digest, window)
    figure.legend(
        handles=[Patch(facecolor=c, hatch=h, edgecolor="#b9a58a" if h else c, label=n) for n, c, h in LEGEND],
        loc="outside upper left",
        ncols=len(LEGEND),
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=1.1,
        handletextpad=0.4,
    )
    load.set_xlim(*window)
    return Chart("gantt", title, caption, to_svg(figure, "gantt"), wide=True)


def middle_window(digest: Digest) -> Span:
    """About six optimizer steps and at least two syncs around the middle of the run."""
    begin, end = digest.window
    steps, syncs = digest.training.steps, digest.syncs.syncs
    periods = [later.t - earlier.t for earlier, later in pairwise(steps)]
    between = [b.begin_t - a.begin_t for a, b in pairwise(syncs)]
    length = max(6 * median(periods) if periods else 0.0, 2.2 * median(between) if between else 0.0)
    length = min(length or end - begin, end - begin)
    if length <= 0:
        return (0.0, max(digest.end_t, 1e-3))
    middle = steps[len(steps) // 2].t if steps else (begin + end) / 2
    start = min(max(middle - length / 2, begin), end - length)
    return (start, start + length)


def sync_slices(sync: Sync, end_t: float) -> list[tuple[str, Span]]:
    """The coordinator's states during one sync, each with its time."""
    stop = sync.end_t if sync.end_t is not None else end_t
    times = [t for t, _ in sync.states[1:]] + [stop]
    slices = [(state, (t, min(until, stop))) for (t, state), until in zip(sync.states, times, strict=False)]
    known = [(state, span) for state, span in slices if span[1] > span[0] and state != "running"]
    return known or [("transferring", (sync.begin_t, stop))]


def _bars(axes: Axes, digest: Digest, engines: Sequence[EngineHistory], window: Span) -> None:
    names = ["trainer", "weight sync", *(e.name + ("*" if e.seen_by == "client" else "") for e in engines)]
    for row in range(len(names)):
        _row(axes, row, [window], IDLE)
    _row(axes, 0, clipped(merged(digest.training.waiting), window), WAITING, "////")
    _row(axes, 0, clipped(digest.training.training, window), BLUE, edge="white")
    for sync in digest.syncs.syncs:
        for state, span in sync_slices(sync, digest.end_t):
            for row in (0, 1):
                colour = STATE_COLOURS.get(state, MUTED)
                _row(axes, row, clipped([span], window), colour)
    for row, engine in enumerate(engines, start=2):
        _row(axes, row, clipped(engine.busy, window), GREEN)
        _row(axes, row, clipped(engine.paused, window), PAUSED, "\\\\\\\\")
    axes.set_yticks(range(len(names)), [_short(name) for name in names], color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="both", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(visible=False)


def _short(name: str) -> str:
    return name if len(name) <= 26 else f"{name[:24]}\u2026"  # an ellipsis


def _row(
    axes: Axes, row: int, spans: Sequence[Span], colour: str, hatch: str = "", edge: str = "none"
) -> None:
    if spans:
        bars = [(start, end - start) for start, end in spans]
        axes.broken_barh(
            bars,
            (row - 0.36, 0.72),
            facecolor=colour,
            hatch=hatch or None,
            edgecolor="#b9a58a" if hatch else edge,
            linewidth=0.0 if edge == "none" else 0.8,
        )


def _load(axes: Axes, digest: Digest, window: Span) -> None:
    """Samples in flight as an area, groups queued as a line on the same axis."""
    in_flight = _within(digest.rollouts.in_flight_series, window)
    queued = _within(digest.rollouts.queue_series, window)
    if in_flight:
        times, counts = zip(*in_flight, strict=True)
        axes.fill_between(times, counts, step="post", color=SKY, alpha=0.55, lw=0, label="samples in flight")
    if queued:
        axes.step(*zip(*queued, strict=True), where="post", color=INK, linewidth=1.1, label="groups queued")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.set_ylabel("worker")
    clock = "virtual seconds" if digest.simulated else "seconds"
    axes.set_xlabel(f"{clock} since the run began")
    if in_flight or queued:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.1)


def _within(series: Sequence[tuple[float, int]], window: Span) -> list[tuple[float, float]]:
    """The part of a step function inside ``window``, with its value carried to both edges."""
    ordered = sorted(series, key=lambda point: point[0])
    before = [value for t, value in ordered if t <= window[0]]
    inside = [(t, float(value)) for t, value in ordered if window[0] < t <= window[1]]
    first = float(before[-1]) if before else 0.0
    if not ordered:
        return []
    points = thinned([(window[0], first), *inside])
    return [*points, (window[1], points[-1][1])]


def utilisation(digest: Digest) -> Chart:
    """Shares of time over the whole run, from the first dispatch to the last optimizer step."""
    title = "How the whole run's time was spent"
    begin, end = digest.window
    if end <= begin or not digest.training.training:
        words = "The trace holds no time between a first dispatch and an optimizer step."
        return Chart("utilisation", title, "", words=words, wide=True)
    caption = f"From the first dispatch at {begin:.1f} s to the last optimizer step at {end:.1f} s."
    rows = [("trainer", _trainer_shares(digest))]
    rows += [
        (_short(engine.name), _engine_shares(engine, digest.window))
        for engine in digest.engines[:MAX_ENGINES]
    ]
    both = digest.busy_fractions()["both"] or 0.0
    rows.append(("both at once", [("training and generating", both, SLATE), ("not both", 1 - both, IDLE)]))
    figure = canvas(WIDE_IN, 0.95 + 0.32 * len(rows))
    axes = figure.subplots()
    for row, (_, shares) in enumerate(rows):
        left = 0.0
        for name, share, colour in shares:
            axes.barh(row, share * 100, left=left * 100, height=0.7, color=colour)
            text = f"{name} {share:.0%}"
            if share * 100 > 0.65 * len(text):
                axes.text((left + share / 2) * 100, row, text, ha="center", va="center", fontsize=7.5,
                          color="white" if colour in (BLUE, GREEN, SLATE) else INK)  # fmt: skip
            left += share
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.set_xlabel("percent of the time")
    colours = {name: colour for _, shares in rows[:-1] for name, share, colour in shares if share > 0}
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(colours),
        handlelength=1.1,
        handletextpad=0.4,
    )
    return Chart("utilisation", title, caption, to_svg(figure, "utilisation"), wide=True)


def _trainer_shares(digest: Digest) -> list[tuple[str, float, str]]:
    window = digest.window
    training = clipped(digest.trainer_busy, window)
    ended = ((sync.begin_t, sync.end_t or digest.end_t) for sync in digest.syncs.syncs)
    syncing = without(clipped(merged(ended), window), training)
    waiting = without(clipped(merged(digest.training.waiting), window), merged([*training, *syncing]))
    return _shares(
        window,
        ("training", training, BLUE),
        ("weight sync", syncing, PURPLE),
        ("waiting for samples", waiting, WAITING),
    )


def _engine_shares(engine: EngineHistory, window: Span) -> list[tuple[str, float, str]]:
    paused = clipped(engine.paused, window)
    busy = without(clipped(engine.busy, window), paused)
    return _shares(window, ("generating", busy, GREEN), ("paused", paused, PAUSED))


def _shares(window: Span, *parts: tuple[str, list[Span], str]) -> list[tuple[str, float, str]]:
    length = window[1] - window[0]
    shares = [(name, total_s(spans) / length, colour) for name, spans, colour in parts]
    return [*shares, ("idle", max(0.0, 1 - sum(share for _, share, _ in shares)), IDLE)]
