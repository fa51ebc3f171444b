"""``grpo-lab fuzz --exhaustive``: all schedules of small scopes, and the table of what was covered."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from grpo_lab.protocol.coordinator import Coordinator
from grpo_lab.sim.parts import Parts
from grpo_lab.testing.coverage import TRANSITIONS, Coverage
from grpo_lab.testing.exhaustive import (
    ScopeReport,
    explore_scopes,
    paired_scopes,
    quick_scopes,
    single_scopes,
)
from grpo_lab.testing.failures import ScopeCase
from grpo_lab.testing.scopes import Scope
from grpo_lab.testing.search import next_free

MISSED = 1
SHOWN_CHARACTERS = 400
CASES = {"quick": quick_scopes, "single": single_scopes, "pairs": paired_scopes}


def fuzz_exhaustive(
    console: Console,
    cases: str,
    depth: int,
    minutes: float,
    out: Path,
    coordinator: type[Coordinator],
    protocol: str,
) -> int:
    """Exit code 1: a rule was broken, a transition is in no table, or one of the table was not reached."""
    scopes = CASES[cases]()
    deadline_s = time.monotonic() + 60 * minutes
    report = _explore(console, scopes, depth, Parts(coordinator=coordinator), deadline_s)
    console.print(coverage_table(report.coverage))
    console.print(str(report), soft_wrap=True)
    for failure in report.failures:
        path = next_free(out, failure.rule)
        ScopeCase(failure, protocol).save(path)
        console.print(f"[bold red]{failure.rule}[/] {path}", soft_wrap=True)
        console.print(f"  {failure.scope}", markup=False, soft_wrap=True)
        console.print(f"  {failure.message[:SHOWN_CHARACTERS]}", markup=False, soft_wrap=True)
    if not report.complete:
        console.print(f"time is up after {minutes:g} min: the rest was not tried", style="yellow")
    unreached = report.coverage.missing if cases == "quick" and report.complete else []
    return MISSED if report.failures or unreached else 0


def coverage_table(coverage: Coverage) -> Table:
    """Every declared transition with how often it was taken; then the ones that should not exist."""
    table = Table(title="Transitions of the coordinator", box=None, padding=(0, 1), header_style="bold")
    for name in ("before", "after", "taken", "when"):
        table.add_column(name, justify="right" if name == "taken" else "left", no_wrap=name != "when")
    for (before, after), when in TRANSITIONS.items():
        taken = coverage.edges[before, after]
        style = "" if taken else "bold yellow"
        table.add_row(before.value, after.value, f"{taken:,}" if taken else "never", when, style=style)
    for before, after in coverage.undeclared:
        taken = coverage.edges[before, after]
        table.add_row(before.value, after.value, f"{taken:,}", "in no table", style="bold red")
    return table


def _explore(
    console: Console, scopes: list[Scope], depth: int, parts: Parts, deadline_s: float
) -> ScopeReport:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("scopes", total=len(scopes))

        def show(report: ScopeReport) -> None:
            words = f"{report.schedules:,} schedules, {report.failed:,} broken; scopes"
            progress.update(bar, completed=report.scopes, description=words)

        return explore_scopes(
            scopes, depth, parts=parts, on_scope=show, over=lambda: time.monotonic() >= deadline_s
        )
