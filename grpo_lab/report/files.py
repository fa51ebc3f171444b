"""A run directory's files: the trace that is read, and the page, timeline and table that are written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grpo_lab.errors import TraceError
from grpo_lab.events import Record, parse_line
from grpo_lab.files import replacing
from grpo_lab.report.digest import Digest
from grpo_lab.report.html import page
from grpo_lab.report.summary import metrics_table, summarise
from grpo_lab.report.timeline import timeline


def read_trace(path: Path) -> Iterator[Record]:
    """Records of a ``.jsonl`` trace in file order. Kinds of a newer schema are skipped.

    An unfinished last line, as a killed process leaves it, is ignored.

    Raises:
        TraceError: the file cannot be read, or a whole line is no record.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = parse_line(line) if line.strip() else None
                except ValueError as error:
                    if line.endswith("\n"):
                        raise TraceError(
                            f"{path}, line {number}: {str(error)[:200]}. The trace is damaged there: remove "
                            "that line, or make the report of another run"
                        ) from error
                    return
                if record is not None:
                    yield record
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}. Name a directory that a run wrote.") from error


def write_report(run_dir: Path, checked: Mapping[str, Any] | None = None) -> Path:
    """Builds the report, the timeline and the metrics of a run directory, also of a run cut short.

    Args:
        run_dir: a directory with ``events.jsonl`` and, if there, ``config.json``, ``env.json`` and
            ``summary.json`` (for what the trace does not say: real time of a simulation, commit).
        checked: the checker's result as JSON data; without it ``check.json`` in the directory is read,
            and without that the page says that no rule was checked.

    Returns the path of ``report.html``. Raises ``TraceError`` if there is no readable trace.
    """
    trace = run_dir / "events.jsonl"
    if not trace.is_file():
        raise TraceError(f"{run_dir}: there is no events.jsonl. Name a directory that a run wrote.")
    digest = Digest(read_trace(trace))
    if digest.records == 0:
        raise TraceError(f"{trace}: it holds no event, so there is nothing to report.")
    checked = checked or _check_result(run_dir / "check.json")
    summary = summarise(digest, checked=checked)
    for name, value in _json_object(run_dir / "summary.json").items():
        if summary.get(name) in (None, ""):
            summary[name] = value
    html = page(
        name=run_dir.resolve().name,
        digest=digest,
        summary=summary,
        checked=checked,
        config=_json_object(run_dir / "config.json"),
        environment=_json_object(run_dir / "env.json"),
    )
    with replacing(run_dir / "metrics.parquet") as temporary:
        pq.write_table(metrics_table(digest), temporary)
    with replacing(run_dir / "timeline.pftrace") as temporary:
        temporary.write_bytes(timeline(digest))
    with replacing(run_dir / "report.html") as temporary:
        temporary.write_bytes(html.encode("utf-8", "replace"))
    return run_dir / "report.html"


def _check_result(path: Path) -> dict[str, Any] | None:
    """What ``grpo-lab check --json`` wrote, or None where it was not asked to."""
    result = _json_object(path)
    if not result:
        return None
    if not isinstance(result.get("rules"), list) or "violations" not in result:
        raise TraceError(f"{path}: it has no rules and violations, so it is no result of grpo-lab check.")
    return result


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {error}. Remove or repair it, then make the report again.") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value
