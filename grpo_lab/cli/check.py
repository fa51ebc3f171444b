"""``grpo-lab check``: checks a trace against the rules of the protocol and says in words what was broken."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_lab.check import Checker, CheckResult, RuleResult, Violation, check_trace, read_parts
from grpo_lab.check.follow import FIRST_FILE_S, await_parts, parts_directory
from grpo_lab.check.follow import follow as follow_trace
from grpo_lab.cli.console import PipeConsole
from grpo_lab.cli.outputs import require_writable
from grpo_lab.errors import TraceError, UserError
from grpo_lab.events import (
    EngineAdmitted,
    EngineFailed,
    EngineFenced,
    EnginePaused,
    EngineResumed,
    FaultInjected,
    FaultsEnded,
    MemberDied,
    MemberStarted,
    Record,
    SyncAborted,
    SyncBegan,
    SyncEnded,
    TermBegan,
    VersionCommitted,
    WeightsActivated,
    field_types,
)
from grpo_lab.files import write_whole
from grpo_lab.report.strict_json import strict_json

VIOLATED = 1
SHOWN_PER_RULE = 5
SHOWN_SYNC_EVENTS = 16
SHOWN_CHARACTERS = 240
COLOURS = {
    "passed": "green",
    "violated": "bold red",
    "vacuous": "yellow",
    "not evaluable": "yellow",
    "n.a.": "dim",
}
TIMELINE = (
    TermBegan,
    SyncBegan,
    EnginePaused,
    WeightsActivated,
    VersionCommitted,
    SyncAborted,
    EngineResumed,
    SyncEnded,
    EngineAdmitted,
    EngineFailed,
    EngineFenced,
    MemberStarted,
    MemberDied,
    FaultInjected,
    FaultsEnded,
)


def check(path: tyro.conf.Positional[Path], json: Path | None = None, follow: bool = False) -> int:
    """Checks a trace against every rule; the rules are described in docs/rules.md.

    Exit code 1 when a rule was violated, 2 when there is no readable trace.

    Args:
        path: a run directory, a directory of events/*.jsonl parts, or one trace file.
        json: also write the result to this file.
        follow: the run still goes on: show violations as they happen, until it ends or Ctrl-C.
    """
    require_writable("json", json)
    if follow:
        _follow(path)
    result = check_trace(path)
    if not result.records:
        raise TraceError(
            f"{path}: the trace holds no event, so it shows nothing. Name a directory that a run wrote"
        )
    console = PipeConsole(highlight=False)
    console.print(_table(result))
    broken = [rule for rule in result.rules if rule.violations]
    if broken:
        _show_violations(broken, path, console)
    _show_total(result, console)
    if json is not None:
        _write_json(json, strict_json(result.to_json()))
    return VIOLATED if result.violations else 0


def _follow(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"--follow {path}: expected the directory of a run that goes on")
    console = PipeConsole(highlight=False)
    if parts_directory(path) is None:
        place = escape(str(path))
        console.print(
            f"there is no event file in {place} yet: waiting up to {FIRST_FILE_S:g} s for the first",
            soft_wrap=True,
        )
    directory = await_parts(path)
    with contextlib.suppress(KeyboardInterrupt):
        console.print(
            f"following {escape(str(directory))} until the run ends; Ctrl-C to stop", soft_wrap=True
        )
        for item in follow_trace(directory, Checker()):
            console.print(
                f"[bold red]{item.rule}[/] at {item.t:.3f} s: {escape(item.message)}", soft_wrap=True
            )


def _table(result: CheckResult) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("rule", no_wrap=True)
    table.add_column("words", ratio=1)
    table.add_column("status", no_wrap=True)
    table.add_column("evaluated", justify="right", no_wrap=True)
    table.add_column("note", max_width=36)
    for rule in result.rules:
        colour = COLOURS[rule.status]
        status = f"[{colour}]{rule.status}[/]" + (
            f" ({rule.violation_count})" if rule.violation_count else ""
        )
        table.add_row(rule.id, escape(rule.words), status, f"{rule.evaluations:,}", escape(rule.note))
    return table


def _show_total(result: CheckResult, console: Console) -> None:
    evaluated = f"{len(result.evaluated)} of {len(result.rules)} rules had something to check"
    records = f"{result.records:,} records"
    if result.violations:
        console.print(f"[bold red]{result.violations:,} violations[/] in {records}; {evaluated}")
    else:
        console.print(f"[green]no violation[/] in {records}; {evaluated}")


@dataclass(slots=True)
class _Proof:
    """The events that the shown violations name, and what the syncs did before the newest of each."""

    records: dict[str, Record] = field(default_factory=dict)
    timelines: dict[str, Sequence[Record]] = field(default_factory=dict)  # by the last event of a violation


def _show_violations(broken: Iterable[RuleResult], path: Path, console: Console) -> None:
    shown = {rule.id: rule.violations[:SHOWN_PER_RULE] for rule in broken}
    proof = _look_up([item for items in shown.values() for item in items], path)
    for rule in broken:
        console.print(f"\n[bold red]{rule.id}[/] {escape(rule.words)}")
        for item in shown[rule.id]:
            console.print(f"  [bold]{escape(item.message)}[/]", soft_wrap=True)
            for event_id in item.event_ids:
                record = proof.records.get(event_id)
                text = f"{event_id} (not in the trace)" if record is None else _line(record)
                console.print(f"    {escape(text)}", soft_wrap=True)
        first = shown[rule.id][0]
        if timeline := proof.timelines.get(_moment(first)):
            console.print("  syncs up to the first of these:")
            for record in timeline:
                console.print(f"    [dim]{escape(_line(record))}[/]", soft_wrap=True)
        if rule.violation_count > len(shown[rule.id]):
            console.print(f"  and {rule.violation_count - len(shown[rule.id]):,} more")
    console.print()


def _look_up(shown: Sequence[Violation], path: Path) -> _Proof:
    """Reads the trace a second time: the first pass keeps nothing of what it has checked."""
    wanted = {event_id for item in shown for event_id in item.event_ids}
    moments = {_moment(item) for item in shown}
    proof = _Proof()
    recent: deque[Record] = deque(maxlen=SHOWN_SYNC_EVENTS)
    for record in read_parts(path):
        if isinstance(record.event, TIMELINE):
            recent.append(record)
        if record.id in wanted:
            proof.records[record.id] = record
            if record.id in moments:
                proof.timelines[record.id] = tuple(recent)
    return proof


def _moment(item: Violation) -> str:
    """The newest event that the violation names."""
    return item.event_ids[-1] if item.event_ids else ""


def _line(record: Record) -> str:
    """One event in one line, shortened."""
    event = record.event
    fields = " ".join(f"{name}={getattr(event, name)!r}" for name in field_types(type(event)))
    text = f"{record.t:12.6f}  {record.id}  {event.kind}  {fields}"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 4] + " ..."


def _write_json(target: Path, text: str) -> None:
    try:
        write_whole(target, text)
    except OSError as error:
        raise UserError(f"--json {target}: {error.strerror or error}. Name a file in a directory") from error
