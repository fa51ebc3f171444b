"""The end of a run: merge the trace, check it, sum it up, write the report, tell the user."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import grpo_lab
from grpo_lab.check import CheckResult, check_trace, merge_to
from grpo_lab.errors import GrpoLabError
from grpo_lab.events import GroupAdmitted, GroupConsumed, GroupDropped, GroupQueued, MemberDied, Record
from grpo_lab.harness.run_dir import RunDir, source_commit
from grpo_lab.ports import Recorder
from grpo_lab.report.files import read_trace, write_report
from grpo_lab.report.summary import UNCALIBRATED, summarise

VIOLATED = 1
SHOWN_VIOLATIONS = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; ``exit_code`` is 0 for a clean end."""

    ended: Literal["clean", "interrupted", "failed"]
    detail: str
    exit_code: int


def attempt(body: Callable[[], object], log: Path, deaths: Callable[[], Sequence[str]] = tuple) -> Outcome:
    """Does it and says how it ended.

    Args:
        log: where the traceback of what is not of ``grpo_lab.errors`` goes.
        deaths: what is to be told besides a failure.
    """
    try:
        body()
    except KeyboardInterrupt:
        return Outcome("interrupted", "interrupted by the user", 130)
    except GrpoLabError as error:
        kind = f"{type(error).__name__}: "
        words = kind + str(error).removeprefix(kind)  # an error of the worker's process comes with its kind
        return Outcome("failed", "; ".join([words, *deaths()]), error.exit_code)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # what failed may be the disk
            log.write_text(traceback.format_exc(), encoding="utf-8")
            words += f" (traceback in {log})"
        return Outcome("failed", words, 3)
    return Outcome("clean", "", 0)


def unfinished_samples(records: Iterable[Record]) -> tuple[int, int]:
    """Samples that neither were consumed nor dropped: (in flight, queued)."""
    in_flight: dict[str, int] = {}
    queued: dict[str, int] = {}
    for record in records:
        match record.event:
            case GroupAdmitted(group=group, samples=samples):
                in_flight[group] = len(samples)
            case GroupQueued(group=group):
                queued[group] = in_flight.pop(group, 0)
            case GroupConsumed(group=group) | GroupDropped(group=group):
                in_flight.pop(group, None)
                queued.pop(group, None)
    return sum(in_flight.values()), sum(queued.values())


def end_lost_groups(records: Iterable[Record], recorder: Recorder) -> None:
    """Drops the groups that a worker had when it died without a word. What one lost that lived to the end is
    its own to tell (S20).
    """
    open_groups: dict[str, GroupAdmitted] = {}
    admitted_by: dict[str, str] = {}
    newest: dict[str, str] = {}
    dead: set[str] = set()
    for record in records:
        match record.event:
            case GroupAdmitted() as event:
                open_groups[event.group] = event
                admitted_by[event.group] = record.actor
                newest[record.actor] = record.id
            case GroupConsumed(group=group) | GroupDropped(group=group):
                open_groups.pop(group, None)
            case MemberDied(member=member):
                dead.add(member)
    open_groups = {name: group for name, group in open_groups.items() if admitted_by[name] in dead}
    for event_id in newest.values():
        recorder.observe(event_id)
    for lost in open_groups.values():
        recorder.emit(
            GroupDropped(
                term=lost.term,
                group=lost.group,
                prompt_index=lost.prompt_index,
                samples=lost.samples,
                reason="shutdown",
                detail="lost with the rollout worker, which died",
            )
        )


def finish_run(directory: RunDir, outcome: Outcome, wall_s: float, console: Console) -> int:
    """Writes everything that a run leaves behind and says how it went; returns the exit code.

    A step that fails is told and does not keep the others from being done.
    """
    checked: CheckResult | None = None
    summary: dict[str, Any] = {}
    with _told("the trace could not be merged and checked", console):
        merge_to(directory.events, directory.trace)
        checked = check_trace(directory.trace)
        directory.write_json("check.json", checked.to_json())
    with _told("the summary could not be written", console):
        summary = summarise(
            read_trace(directory.trace),
            checked=checked.to_json() if checked else None,
            wall_s=wall_s,
            package_version=grpo_lab.__version__,
            commit=source_commit(),
        )
        directory.write_json("summary.json", summary)
    with _told("the report could not be written", console):
        write_report(directory.path, checked.to_json() if checked else None)
    _tell(directory, outcome, checked, summary, console)
    if outcome.exit_code == 0:
        return VIOLATED if checked is None or checked.violations else 0
    return outcome.exit_code


def _tell(
    directory: RunDir,
    outcome: Outcome,
    checked: CheckResult | None,
    summary: dict[str, Any],
    console: Console,
) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in _headlines(summary):
        table.add_row(name, value)
    console.print(table)
    if checked is not None:
        evaluated = f"{len(checked.evaluated)} of {len(checked.rules)} rules had something to check"
        if checked.violations:
            console.print(f"[bold red]{checked.violations} violations[/] ({evaluated})")
        else:
            console.print(f"[green]no violation[/] ({evaluated})")
        shown = [item for rule in checked.rules for item in rule.violations][:SHOWN_VIOLATIONS]
        for item in shown:
            console.print(f"  {item.rule} {escape(item.message)} [dim]{', '.join(item.event_ids)}[/]")
    if outcome.ended != "clean":
        console.print(f"[bold red]{outcome.ended}[/]: {escape(outcome.detail)}", soft_wrap=True)
    report = directory.path / "report.html"
    if report.exists():
        console.print(f"report: {escape(str(report))}", soft_wrap=True)


def _headlines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a user looks for first; what the run did not measure is left out."""
    before, after = summary.get("heldout_accuracy_before"), summary.get("heldout_accuracy_after")
    if before is not None and after is not None:
        yield "held-out accuracy", f"{before:.3f} -> {after:.3f}"
    second = "s" if summary.get("virtual_s") is None else "virtual s"
    formats = {
        "weight_versions": ("weight versions", "{:,}"),
        "staleness_max_steps": ("oldest sample used", "{} optimizer steps"),
        "logprob_gap_max": ("logprob gap", "{:.1e} at equal weights"),
        "tokens_per_s": ("generated", f"{{:,.0f}} tokens/{second}"),
        "virtual_s": ("virtual clock", f"{{:,.1f}} s (simulated, {UNCALIBRATED})"),
        "wall_s": ("wall clock", "{:.0f} s"),
    }
    for key, (name, form) in formats.items():
        if summary.get(key) is not None:
            yield name, form.format(summary[key])
    if summary.get("dispatched") is not None:
        parts = [f"{summary[key]:,} {key}" for key in ("consumed", "dropped")]
        left = {key: summary.get(key) or 0 for key in ("in_flight", "queued")}
        parts += [f"{count:,} {key.replace('_', ' ')}" for key, count in left.items() if count]
        ended = summary["consumed"] + summary["dropped"] + sum(left.values())
        sign = "=" if ended == summary["dispatched"] else "!="
        yield "samples", f"{summary['dispatched']:,} dispatched {sign} {' + '.join(parts)}"


@contextlib.contextmanager
def _told(words: str, console: Console) -> Iterator[None]:
    try:
        yield
    except (GrpoLabError, OSError, ValueError) as error:
        console.print(f"[bold red]{words}[/]: {escape(str(error))}", soft_wrap=True)
