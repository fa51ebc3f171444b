"""What a sweep is going to do: its grid, and about how long it takes, from two of its points run now."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from grpo_lab.harness.executors import Executor
from grpo_lab.harness.experiment import Experiment, Point, Scale

FAILED = 1
SHOWN_VALUES = 12


def dry_run(experiment: Experiment, scale: Scale, executor: Executor, console: Console) -> int:
    """Runs the first and the last point of the grid in a folder that does not stay; returns the exit code.

    What all points are expected to take lies between all being like the faster and all like the slower one,
    which is as much as two points can say.
    """
    points = experiment.distinct_points(scale)
    for name, values in axes_of(points).items():
        more = f", ... ({len(values)})" if len(values) > SHOWN_VALUES else ""
        shown = ", ".join(f"{value}" for value in values[:SHOWN_VALUES])
        console.print(f"  {escape(name)}: {escape(shown)}{more}", soft_wrap=True)
    console.print(f"{len(points)} points, {scale.seeds} seeds, {executor.workers} at a time")
    with tempfile.TemporaryDirectory(prefix="grpo_lab-dry-run-") as folder:
        ends = list({point.hash: point for point in (points[0], points[-1])}.values())
        results = list(executor.run(experiment.run, ends, Path(folder)))
    for result in results:
        said = f"failed: {result.error}" if result.error else f"{result.wall_s:.1f} s"
        console.print(f"  ran {escape(str(result.point))}: {escape(said)}", soft_wrap=True)
    seconds = sorted(result.wall_s * len(points) / executor.workers for result in results)
    console.print(f"all of them: about {_minutes(seconds[0])} to {_minutes(seconds[-1])}; nothing was kept")
    return FAILED if any(result.error for result in results) else 0


def axes_of(points: Sequence[Point]) -> dict[str, list[object]]:
    """The values of every setting, in the order of the grid."""
    values: dict[str, dict[object, None]] = {}
    for point in points:
        for name, value in point.settings.items():
            values.setdefault(name, {})[value] = None
    return {name: list(found) for name, found in values.items()}


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
