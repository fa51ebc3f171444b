"""`grpo-lab bench pack`: the packer against its peers, on this machine, now."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lab.cli.console import PipeConsole
from grpo_lab.cli.outputs import output_file, plot_file
from grpo_lab.files import write_whole
from grpo_lab.packing import benchmark_report as report
from grpo_lab.packing.benchmark import Row, measure

QUICK_S, FULL_S = 80.0, 480.0  # for all rows; the rest of two and ten minutes is for what surrounds them


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints tables, writes what was asked for. 1 if a goal was missed and --strict is on."""
    parser = argparse.ArgumentParser(prog="grpo-lab bench pack", description=__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write every row")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="draw the rates (.svg or .png)")
    parser.add_argument("--quick", action="store_true", help="two models, one bucket size: under two minutes")
    parser.add_argument(
        "--repeats", type=int, default=7, help="rounds of all contenders; medians are reported"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args(argv)
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}; it must be at least 1")

    console = PipeConsole()
    console.width = max(console.width, 170)  # a row of the table is a line, in a log too
    rows: list[Row] = []
    cases = list(report.cases(options.quick))
    budget_s = (QUICK_S if options.quick else FULL_S) / len(cases)
    began = time.monotonic()
    for case in cases:
        row = measure(case, options.repeats, budget_s)
        rows.append(row)
        console.print(
            f"[{time.monotonic() - began:5.0f} s] {report.label(row)}", highlight=False, markup=False
        )
    peaks = report.peak_rss_in_child()
    found = report.goals(rows)
    console.print(report.table(rows))
    console.print(report.goals_table(found))
    growth = peaks[-1] - peaks[1]
    console.print(f"peak memory after 2 syncs {peaks[1]:,} bytes, after {len(peaks)}: {growth:+,} bytes")
    if options.json:
        _write(options.json, rows, found, peaks)
    if options.plot:
        report.plot(rows, options.plot)
    return 1 if options.strict and not all(goal.met for goal in found) else 0


def _write(path: Path, rows: Sequence[Row], found: Sequence[report.Goal], peaks: Sequence[int]) -> None:
    data: dict[str, Any] = {
        "machine": report.machine(),
        "rows": [dataclasses.asdict(row) | report.ratios(row) for row in rows],
        "goals": [dataclasses.asdict(g) | {"met": g.met, "verdict": g.verdict} for g in found],
        "peak_rss_bytes": list(peaks),
    }
    write_whole(path, json.dumps(data, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
