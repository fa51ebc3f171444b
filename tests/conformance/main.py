# ruff: noqa: T201 - a command
"""``make conformance`` and ``make conformance-core``: the contract on all three engines, and what came out.

The last line is ``N passed, M skipped`` (and ``K failed`` where that is so); the exit code is pytest's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]


class Tally:
    """Counts checks by engine and outcome while pytest runs."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self.seconds: Counter[str] = Counter()
        self.slowest: list[tuple[float, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self.outcomes[report.outcome] += 1
        _, _, name = report.nodeid.partition("[")
        kind = next((k for k in ("sim-http", "sim", "vllm", "strict") if name.startswith(f"{k}-")), "tables")
        self.by_kind[kind, report.outcome] += 1
        self.seconds[kind] += report.duration
        self.slowest.append((report.duration, name.rstrip("]")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", action="store_true", help="about ten rows")
    parser.add_argument("--engines", default="sim,sim-http,vllm", help="some of sim, sim-http, vllm")
    parser.add_argument("words", nargs="*", help="more words for pytest")
    arguments = parser.parse_args()
    os.environ["CONFORMANCE_ENGINES"] = arguments.engines
    os.environ["CONFORMANCE_PROGRESS"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.core:
        os.environ["CONFORMANCE_ROWS"] = "core"
    tally, began_s = Tally(), time.monotonic()
    words = [str(HERE / "test_contract.py"), "-o", "addopts=", "-q", "--tb=short", "-p", "no:cacheprovider"]
    code = int(pytest.main([*words, *arguments.words], plugins=[tally]))
    report(tally, arguments.engines.split(","), time.monotonic() - began_s)
    return code


def report(tally: Tally, kinds: list[str], seconds: float) -> None:
    from contract_rows import STRICT, read_differences, read_rows, read_strict

    rows, differences, strict = read_rows(), read_differences(), read_strict()
    chosen = [row for row in rows if row.core or os.environ.get("CONFORMANCE_ROWS") != "core"]
    print(f"\n{len(chosen)} rows of the contract" + ("" if len(chosen) == len(rows) else f" of {len(rows)}"))
    for kind in [*kinds, STRICT] if "sim" in kinds else kinds:
        counts = ", ".join(f"{count} {out}" for (k, out), count in sorted(tally.by_kind.items()) if k == kind)
        known = sum(kind in item.engines for item in (*differences, *strict))
        print(f"  {kind:<9} {counts}; {tally.seconds[kind]:.0f} s; {known} rows in the table of differences")
    for item in differences:
        print(f"  differs: {item.row} ({', '.join(item.engines)}): {item.reason}")
    for reason in dict.fromkeys(item.reason for item in strict):
        print(f"  differs when strict: {reason} ({', '.join(i.row for i in strict if i.reason == reason)})")
    slowest = ", ".join(f"{name} {took:.0f} s" for took, name in sorted(tally.slowest, reverse=True)[:3])
    print(f"slowest: {slowest}")
    print(f"{sum(tally.outcomes.values())} checks in {seconds:.0f} s")
    failed = f", {tally.outcomes['failed']} failed" if tally.outcomes["failed"] else ""
    print(f"{tally.outcomes['passed']} passed, {tally.outcomes['skipped']} skipped{failed}")


if __name__ == "__main__":
    sys.exit(main())
