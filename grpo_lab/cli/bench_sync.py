"""`grpo-lab bench sync`: whole weight syncs between processes of this machine, by shared memory and gloo."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_lab.cli.console import PipeConsole
from grpo_lab.cli.outputs import output_file, plot_file
from grpo_lab.files import write_whole
from grpo_lab.harness import sync_benchmark_report as report
from grpo_lab.harness.sync_benchmark import SyncRow, cases, measure, receiver_processes

MOST = {"repeats": 1000, "threads": 256}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints tables, writes what was asked for. 1 if a goal was missed and --strict is on."""
    parser = argparse.ArgumentParser(prog="grpo-lab bench sync", description=__doc__)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write every row, the fits and the goals"
    )
    parser.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw times, fits and phases (.svg or .png)"
    )
    parser.add_argument("--quick", action="store_true", help="10 and 100 MB only (else up to 2 GB)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of all ways; medians are reported")
    parser.add_argument("--threads", type=int, default=1, help="threads that pack, and that unpack")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args(argv)
    for name, most in MOST.items():
        if not 1 <= getattr(options, name) <= most:
            parser.error(f"--{name} is {getattr(options, name)}; it must be from 1 to {most:,}")
    load = os.getloadavg()[0]
    console = PipeConsole()
    console.width = max(console.width, 150)
    rows = asyncio.run(_run(options, console))
    found = report.fits(rows)
    goals = report.goals(rows, os.cpu_count() or 1, load)
    for table in (report.rows_table(rows), report.fits_table(found), report.goals_table(goals)):
        console.print(table)
    if options.json:
        _write(options.json, load, rows, found, goals)
    if options.plot:
        report.plot(rows, found, options.plot)
    return 1 if options.strict and any(goal.met is False for goal in goals) else 0


async def _run(options: argparse.Namespace, console: Console) -> list[SyncRow]:
    rows: list[SyncRow] = []
    began_s = time.monotonic()
    with receiver_processes(2, options.threads) as processes:
        for case in cases(options.quick):
            rows += await measure(case, processes, repeats=options.repeats, num_threads=options.threads)
            done = f"{rows[-1].model_bytes / 1e6:.0f} MB, {case.bucket_bytes >> 20} MiB buckets"
            message = f"[{time.monotonic() - began_s:5.0f} s] {done}, {case.receivers + 1} processes"
            console.print(message, highlight=False, markup=False)
    return rows


def _write(
    path: Path,
    load: float,
    rows: Sequence[SyncRow],
    fits: Sequence[report.Fit],
    goals: Sequence[report.Goal],
) -> None:
    data: dict[str, Any] = {
        "machine": report.machine(load),
        "rows": [dataclasses.asdict(row) for row in rows],
        "fits": [dataclasses.asdict(fit) for fit in fits],
        "goals": [dataclasses.asdict(goal) for goal in goals],
    }
    write_whole(path, json.dumps(data, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
