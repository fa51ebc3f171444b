"""Figures of experiments: colours that anybody can tell apart, error bars over seeds, a stamp of origin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from scipy import stats

from grpo_lab.files import replacing
from grpo_lab.report.style import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SKY, YELLOW, drawing

COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, INK, YELLOW)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
CONFIDENCE = 0.95
PNG_DPI = 110


def new_figure(columns: int = 1, rows: int = 1, width_in: float = 5.0, height_in: float = 3.6) -> Figure:
    """A figure of ``rows`` by ``columns`` axes, ``width_in`` by ``height_in`` inches each."""
    with drawing():
        figure = Figure(figsize=(width_in * columns, height_in * rows))
        figure.subplots(rows, columns, squeeze=False)
    return figure


def interval(values: pd.Series) -> tuple[float, float]:
    """Mean over seeds and the half width of its 95 % interval (Student's t); 0 for one value."""
    known = values.dropna()
    count = len(known)
    if count < 2:
        return (float(known.mean()) if count else float("nan")), 0.0
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1) * known.std(ddof=1) / count**0.5
    return float(known.mean()), float(half)


def curves(
    axes: Axes,
    table: pd.DataFrame,
    *,
    x: str,
    y: str,
    by: str | None = None,
    order: Sequence[object] | None = None,
    names: dict[object, str] | None = None,
) -> None:
    """Mean of ``y`` over seeds against ``x``, a line for each value of ``by``, with 95 % intervals."""
    groups = list(order) if order is not None else (sorted(table[by].unique()) if by else [None])
    for index, value in enumerate(groups):
        rows = table if by is None else table[table[by] == value]
        if rows.empty:
            continue
        places = sorted(rows[x].dropna().unique())
        bars = [interval(rows.loc[rows[x] == place, y]) for place in places]
        axes.errorbar(
            places,
            [mean for mean, _ in bars],
            yerr=[half for _, half in bars],
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            linewidth=1.2,
            capsize=2.5,
            label=None if by is None else (names or {}).get(value, f"{value}"),
        )
    _label(axes, x, y, by)


def bars(
    axes: Axes,
    table: pd.DataFrame,
    *,
    x: str,
    y: str,
    by: str | None = None,
    order: Sequence[object] | None = None,
) -> None:
    """Mean of ``y`` over seeds for each category of ``x``, side by side for each value of ``by``."""
    categories = list(order) if order is not None else sorted(table[x].unique(), key=str)
    groups = sorted(table[by].unique(), key=str) if by else [None]
    width = 0.8 / len(groups)
    for index, value in enumerate(groups):
        rows = table if by is None else table[table[by] == value]
        found = [interval(rows.loc[rows[x] == category, y]) for category in categories]
        axes.bar(
            [place + (index - (len(groups) - 1) / 2) * width for place in range(len(categories))],
            [mean for mean, _ in found],
            width,
            yerr=[half for _, half in found],
            color=COLOURS[index % len(COLOURS)],
            capsize=2.5,
            label=None if by is None else f"{value}",
        )
    axes.set_xticks(range(len(categories)), [f"{category}" for category in categories])
    _label(axes, x, y, by)


def _label(axes: Axes, x: str, y: str, by: str | None) -> None:
    if by is not None:
        axes.legend(frameon=False, fontsize=8, title=by.replace("_", " "), title_fontsize=8)
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))


def save_figure(figure: Figure, stem: Path, stamp: str) -> None:
    """Writes ``stem.svg`` and ``stem.png``, each whole or not at all, with the stamp below."""
    figure.supxlabel(stamp, fontsize=6.5, color="#555555", x=0.99, ha="right")
    with drawing(), mpl.rc_context({"svg.hashsalt": "grpo_lab"}):  # equal data, equal bytes
        for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": PNG_DPI})):
            with replacing(stem.with_suffix(suffix)) as partial:
                figure.savefig(partial, format=suffix[1:], **options)


def log_axis(axes: Axes, values: Sequence[float], base: float = 2, *, vertical: bool = False) -> None:
    """A logarithmic axis whose ticks are these values in plain figures."""
    axis = axes.yaxis if vertical else axes.xaxis
    (axes.set_yscale if vertical else axes.set_xscale)("log", base=base)
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
