"""``grpo-lab calibrate``: fits the simulation's times to a real run's trace."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich.markup import escape

from grpo_lab.cli.console import PipeConsole
from grpo_lab.harness.refusals import require_output, require_trace


def calibrate(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path = Path("runs/calibration.toml"),
) -> int:
    """Fits engine and optimizer steps, requests, rewards, sync phases and lengths to real runs.

    Writes a TOML file for validate, tune and predictions. Several runs with different batch sizes tell more
    than one: for example calibrate runs/a runs/b.

    Args:
        runs: run directories, for example runs/latest.
        out: the file that is written.
    """
    require_output("out", out)
    for run in runs:
        require_trace(run)
    from grpo_lab.harness import calibration_runs, validation_report  # noqa: PLC0415 - --help needs no torch

    found = calibration_runs.calibrate(runs)
    found.save(out)
    console = PipeConsole(highlight=False)
    for line in validation_report.calibration_lines(found):
        console.print(escape(line), soft_wrap=True)
    console.print(
        f"written to {escape(str(out))}; {escape(validation_report.error_words(found))}", soft_wrap=True
    )
    return 0
