"""``grpo-lab replay``: runs a failure file again, event for event."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console

from grpo_lab.cli.console import PipeConsole
from grpo_lab.cli.outputs import require_writable
from grpo_lab.errors import ConfigError, InvariantViolation
from grpo_lab.events import Record, field_types
from grpo_lab.files import replacing
from grpo_lab.testing.failure_rows import read_row

if TYPE_CHECKING:
    from grpo_lab.testing.failures import Case

VIOLATED = 1
SHRINK_RUNS = 2_000
SHOWN_EVENTS = 20
SHOWN_CHARACTERS = 200


def replay(
    failure: tyro.conf.Positional[Path],
    until: int | None = None,
    html: Path | None = None,
    trace: Path | None = None,
    shrink: Path | None = None,
    shrink_runs: int | None = None,
) -> int:
    """Runs the case and the schedule of a failure file again and shows what led to the broken rule.

    Exit code 1 when a rule is broken (also when it is another one than the file says), 0 when none is.

    Args:
        failure: the file, as ``grpo-lab fuzz`` writes it.
        until: show the events up to this one (counted from 0); without it, up to the broken rule.
        html: also write the report page of this run to this file.
        trace: also write all events to this file, one line each.
        shrink: look for a simpler schedule that breaks the same rule, with fewer choices other than first in,
            first out; write that failure to this file, and show its run.
        shrink_runs: with --shrink, how many schedules to try at most; without it, 2,000.
    """
    for option, place in (("html", html), ("trace", trace), ("shrink", shrink)):
        require_writable(option, place)
    if shrink is None and shrink_runs is not None:
        raise ConfigError("shrink_runs", shrink_runs, "nothing without --shrink", "Leave it out")
    if shrink_runs is not None and shrink_runs < 1:
        raise ConfigError("shrink_runs", shrink_runs, "an integer of at least 1")
    if until is not None and until < 0:
        raise ConfigError("until", until, "the number of an event, from 0")
    read_row(failure)
    # Imported after the file was looked at: it takes seconds, and --help or a wrong file should not.
    from grpo_lab.testing.failures import load_case  # noqa: PLC0415

    case: Case = load_case(failure)
    if case.protocol:
        sys.path.insert(0, str(Path.cwd()))
    if shrink is not None:
        case = _shrunk(case, shrink, shrink_runs or SHRINK_RUNS)
    records: list[Record] = []
    error: Exception | None = None
    try:
        case.run(records)
    except ConfigError:
        raise
    except Exception as raised:  # whatever ended the run is what is replayed
        error = raised
    _show(records, until, PipeConsole(highlight=False, markup=False))
    _write(records, html, trace)
    return _verdict(case, error, len(records) - 1)


def _shrunk(case: Case, target: Path, max_runs: int) -> Case:
    smaller = case.with_short_tape(max_runs)
    smaller.save(target)
    before, after = (
        f"{tape.unusual} of {len(tape.choices)}" for tape in (case.failure.tape, smaller.failure.tape)
    )
    print(f"choices other than first in, first out: {before}; now {after}: {target}")  # noqa: T201
    return smaller


def _show(records: list[Record], until: int | None, console: Console) -> None:
    last = len(records) - 1 if until is None else min(until, len(records) - 1)
    for index in range(max(0, last + 1 - SHOWN_EVENTS), last + 1):
        console.print(f"{index:>7} {_line(records[index])}", soft_wrap=True)


def _line(record: Record) -> str:
    event = record.event
    fields = " ".join(f"{name}={getattr(event, name)!r}" for name in field_types(type(event)))
    return f"{record.t:12.6f}  {record.id:<14} {event.kind}  {fields}"[:SHOWN_CHARACTERS]


def _write(records: list[Record], html: Path | None, trace: Path | None) -> None:
    lines = "".join(f"{record.to_line()}\n" for record in records)
    if trace is not None:
        with replacing(trace) as temporary:
            temporary.write_text(lines, encoding="utf-8")
    if html is not None:
        with tempfile.TemporaryDirectory(prefix="grpo-lab-replay-") as directory:
            (Path(directory) / "events.jsonl").write_text(lines, encoding="utf-8")
            from grpo_lab.report.files import write_report  # noqa: PLC0415, slow to import

            page = write_report(Path(directory)).read_text(encoding="utf-8")
        with replacing(html) as temporary:
            temporary.write_text(page, encoding="utf-8")


def _verdict(case: Case, error: Exception | None, event: int) -> int:
    file = case.failure
    if error is None:
        print(f"no rule is broken (the file says {file.rule}, at event {file.event})")  # noqa: T201
        return 0
    rule = error.rule if isinstance(error, InvariantViolation) else type(error).__name__
    print(f"{rule} at event {event}: {error}")  # noqa: T201
    if (rule, event, str(error)) == (file.rule, file.event, file.message):
        print("exactly as in the file")  # noqa: T201
    else:
        print(f"not as in the file, which says {file.rule} at event {file.event}: the code differs")  # noqa: T201
    return VIOLATED
