"""`grpo-lab bench sim`: how many virtual seconds of a whole cluster a second of this machine is worth."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lab.cli.console import PipeConsole
from grpo_lab.cli.outputs import output_file, plot_file
from grpo_lab.files import write_whole
from grpo_lab.harness import sim_benchmark_report as report
from grpo_lab.harness.sim_benchmark import LONG, MEDIUM, SHORT, SimRow, cases, measure


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints tables, writes what was asked for. 1 if a goal was missed and --strict is on."""
    parser = argparse.ArgumentParser(prog="grpo-lab bench sim", description=__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write every row and the goals")
    parser.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw speed and cost (.svg, .png or .pdf)"
    )
    parser.add_argument("--quick", action="store_true", help="up to 16 engines (else up to 256)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args(argv)
    load = os.getloadavg()[0]
    console = PipeConsole()
    console.width = max(console.width, 190)
    rows: list[SimRow] = []
    began_s = time.monotonic()
    for case in cases(options.quick):
        row = measure(case)
        rows.append(row)
        done = f"{row.engines} engines x {row.slots}, {row.workload}, {row.mode} mode: {row.speed:,.0f}"
        message = f"[{time.monotonic() - began_s:5.0f} s] {done} virtual seconds a second"
        console.print(message, highlight=False, markup=False)
    goals = report.goals(rows)
    for table in (report.rows_table(rows), report.goals_table(goals)):
        console.print(table)
    console.print(_words(load), highlight=False, markup=False)
    if options.json:
        _write(options.json, load, rows, goals)
    if options.plot:
        report.plot(rows, options.plot)
    return 1 if options.strict and not all(goal.met for goal in goals) else 0


def _words(load: float) -> str:
    lengths = f"{LONG.mean_tokens} (long), {MEDIUM.mean_tokens} or {SHORT.mean_tokens} (short)"
    return (
        f"Completions: log-normal, mean {lengths} tokens, up to four times that; prompts: 1 to 276 tokens; "
        "groups of 8; a batch has as many samples as the cluster has slots, up to three batches are under "
        "way; a weight sync after each optimizer step, pause keep, caches cleared. Step: 15 ms + 0.15 ms a "
        "sequence + 30 us a prompt token + 20 ns a context token, 10 % jitter. "
        f"{os.cpu_count()} cores, load average {load:.1f} before the first run."
    )


def _write(path: Path, load: float, rows: Sequence[SimRow], goals: Sequence[report.Goal]) -> None:
    data: dict[str, Any] = {
        "machine": report.machine(load),
        "workload": _words(load),
        "rows": [dataclasses.asdict(row) for row in rows],
        "goals": [dataclasses.asdict(goal) for goal in goals],
    }
    write_whole(path, json.dumps(data, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
