"""The kill table as a figure: a row for each case, the rules that fired, and the seconds until they did."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from grpo_lab.report.style import BLUE, INK, RED, drawing
from grpo_lab.testing.mutants.campaign import Kill, Result, rule_order

COLUMNS = 3
ROW_IN, COLUMN_IN = 0.19, 4.3
LEAST_S, MOST_S = 0.01, 100.0  # the axis is logarithmic
_TITLE_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """A case with all its variants. ``seconds`` is their median; None where one survived."""

    case: str
    rules: str
    seconds: float | None
    title: str


def rows_of(kills: Sequence[Kill]) -> list[Row]:
    cases: dict[str, list[Kill]] = {}
    for kill in kills:
        cases.setdefault(kill.case, []).append(kill)
    return [_row(case, variants) for case, variants in cases.items()]


def _row(case: str, variants: Sequence[Kill]) -> Row:
    rules = sorted({kill.rule for kill in variants if kill.killed}, key=rule_order)
    killed = all(kill.killed for kill in variants)
    seconds = statistics.median(kill.seconds for kill in variants) if killed else None
    return Row(case, ", ".join(rules), seconds, variants[0].title)


def figure_of(result: Result, headline: str) -> Figure:
    """Bars of seconds on a logarithmic axis, a label of case and rules, and what was planted."""
    rows = rows_of(result.mutants)
    columns = min(COLUMNS, max(1, len(rows)))
    length = math.ceil(len(rows) / columns)
    with drawing():
        figure = Figure(figsize=(COLUMN_IN * columns, ROW_IN * length + 1.1), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)[0]
        for column, place in enumerate(axes):
            _draw(place, rows[column * length : (column + 1) * length], length)
        figure.suptitle(headline, fontsize=10, color=INK)
        figure.supxlabel("seconds until the rule fired (median of a case's variants)", fontsize=8)
    return figure


def _draw(axes: Axes, rows: Sequence[Row], length: int) -> None:
    places = range(len(rows))
    axes.barh(
        places,
        [max(LEAST_S, row.seconds) if row.seconds is not None else MOST_S for row in rows],
        color=[BLUE if row.seconds is not None else RED for row in rows],
        height=0.75,
        alpha=0.45,
    )
    for place, row in zip(places, rows, strict=True):
        words = row.title if len(row.title) <= _TITLE_CHARACTERS else f"{row.title[:_TITLE_CHARACTERS]}..."
        axes.text(LEAST_S * 1.2, place, words, va="center", fontsize=5.5, color=INK)
    labels = [f"{row.case}  {row.rules or 'survived'}" for row in rows]
    axes.set_yticks(places, labels, fontsize=6.5)
    axes.set_ylim(length - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(LEAST_S, MOST_S)
    axes.xaxis.set_major_locator(FixedLocator([0.01, 0.1, 1.0, 10.0, 100.0]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=6.5)
    axes.spines[["top", "right"]].set_visible(False)


def save(result: Result, headline: str, path: Path, ending: str) -> None:
    """As a picture of the kind ``ending`` (.svg, .png, .pdf), whatever the file is called."""
    with drawing():
        figure_of(result, headline).savefig(path, format=ending.removeprefix("."), dpi=150)


def svg(result: Result, headline: str) -> str:
    """For a page: the picture alone."""
    with drawing(), io.StringIO() as text:
        figure_of(result, headline).savefig(text, format="svg")
        whole = text.getvalue()
    return whole[whole.index("<svg") :]
