"""How charts look: one palette, one type size, inline SVG without a byte from outside."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# The eight colours of Okabe and Ito, "Color Universal Design" (2008): told apart with any colour vision.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, INK = "#CC79A7", "#56B4E9", "#F0E442", "#1d2733"
MUTED, GRID, IDLE = "#5b6875", "#e3e8ed", "#eef1f4"
WAITING, PAUSED, SLATE, REST = "#f7d58b", "#f3cdb6", "#5d6b7a", "#cfd6dd"
WIDE_IN, HALF_IN = 11.0, 5.4  # drawn at the same scale on the page, so type has one size

_FONTS = "'Inter','Helvetica Neue',Arial,sans-serif"
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names come from the run: a dollar sign is a dollar sign
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#9aa5b1",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 1.2,
    "lines.linewidth": 1.5,
    "hatch.linewidth": 0.5,
    "path.simplify": True,
    "path.simplify_threshold": 0.5,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure for the page. ``svg`` is empty where there is nothing to draw; ``words`` then says why."""

    name: str
    title: str
    caption: str
    svg: str = ""
    words: str = ""
    wide: bool = False


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib with this module's looks; the caller's settings come back afterwards."""
    with warnings.catch_warnings(), mpl.rc_context(cast(Any, _RC)):
        # The browser draws the text, with fonts of its own.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def canvas(width_in: float, height_in: float) -> Figure:
    """A figure that belongs to no window and no global state."""
    return Figure(figsize=(width_in, height_in), layout="constrained")


def label(axes: Axes, x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title)


def plain_log(axis: Axis) -> None:
    """Labels 1e-06, 2e-06, 5e-06 on a logarithmic axis, or powers of ten; without mathematical type."""
    low, high = sorted(axis.get_view_interval())
    long = low > 0 and high / low > 100
    axis.set_major_locator(LogLocator(subs=(1.0,) if long else (1.0, 2.0, 5.0), numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def legend_above(axes: Axes, columns: int = 4) -> None:
    """A legend in the strip above the plot, where it can cover no data."""
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        columnspacing=0.9,
        handletextpad=0.4,
    )


def bound_line(axes: Axes, value: float, text: str, *, horizontal: bool = True) -> None:
    """A dashed limit with its name beside it."""
    looks: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "color": RED, "fontsize": 7.5}
    if horizontal:
        axes.axhline(value, color=RED, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(text, (1.0, value), (-3, 2), ("axes fraction", "data"), va="bottom", **looks)
    else:
        axes.axvline(value, color=RED, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(text, (value, 1.0), (-3, 0), ("data", "axes fraction"), va="top", **looks)


def to_svg(figure: Figure, name: str) -> str:
    """Inline SVG: reproducible, without metadata, with ids that no other chart of the page uses."""
    with mpl.rc_context({"svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r"xlink:href=", "href=", svg)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # group names that nothing refers to
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("'DejaVu Sans'", _FONTS)
    svg = re.sub(r' (d|x|y|transform)="[^"]*"', _rounded, svg)
    return re.sub(r"\n\s*", "\n", svg)


def _rounded(attribute: re.Match[str]) -> str:
    """Coordinates to a hundredth of a point: half the bytes, and no eye sees the difference."""
    return re.sub(r"(\d+\.\d\d)\d+", r"\1", attribute[0])


def thinned(points: Sequence[tuple[float, float]], limit: int = 1200) -> Sequence[tuple[float, float]]:
    """At most about ``limit`` points: of each stretch its lowest and its highest, in order."""
    if len(points) <= limit:
        return points
    size = -(-2 * len(points) // limit)
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        stretch = range(begin, min(begin + size, len(points)))
        ends = {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends)]
    return kept
