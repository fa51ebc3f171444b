"""``grpo-lab report``: makes the report of finished, failed or cut-off runs again."""

from __future__ import annotations

from pathlib import Path

import tyro

from grpo_lab.errors import TraceError
from grpo_lab.report.files import write_report

LATEST = Path("runs/latest")


def report(runs: tyro.conf.Positional[tuple[Path, ...]] = ()) -> int:
    """Makes report.html, timeline.pftrace and metrics.parquet of each run again, from its events.jsonl.

    Args:
        runs: run directories; without any, runs/latest.

    Raises ``TraceError`` (exit code 2) for a directory that holds no readable trace.
    """
    for run_dir in runs or (LATEST,):
        if not run_dir.is_dir():
            raise TraceError(f"{run_dir}: no such run directory. Name one that a run wrote, below runs/.")
        print(write_report(run_dir))  # noqa: T201
    return 0
