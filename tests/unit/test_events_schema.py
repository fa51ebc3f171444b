"""The form of the trace on disk. ``schema_v1.jsonl`` holds a line of every kind, as schema 1 writes it.

Lines may be added there (a new kind) and fields may be added to a line (a new field with a default). A
test that fails for a line that is there means that old traces are read differently from now on: then
``SCHEMA_VERSION`` must rise, and the file gets a sister for the new version.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_lab.events import SCHEMA_VERSION, Reached, Record, kinds, parse_line

GOLDEN = (Path(__file__).parent / "schema_v1.jsonl").read_text(encoding="utf-8").splitlines()


def kind_of(line: str) -> str:
    return str(json.loads(line)["kind"])


def test_the_version_that_these_lines_are_of() -> None:
    assert SCHEMA_VERSION == 1


def test_every_kind_has_its_line() -> None:
    """A kind without a line: write ``Record(...).to_line()`` of it into the file."""
    assert sorted(map(kind_of, GOLDEN)) == sorted(kinds())


@pytest.mark.parametrize("line", GOLDEN, ids=map(kind_of, GOLDEN))
def test_a_line_keeps_its_meaning(line: str) -> None:
    record = parse_line(line)
    assert record is not None
    assert record.event.kind == kind_of(line)
    written = json.loads(record.to_line())
    for name, value in json.loads(line).items():
        assert written[name] == value, f"{name} of {record.event.kind} is lost or changed"


def test_the_exact_form() -> None:
    record = Record(0.1234567, "engine-0", 3, ("trainer:1", "worker:2"), Reached(mark="größe"))
    assert record.to_line() == (
        '{"t":0.123457,"actor":"engine-0","seq":3,"cause":["trainer:1","worker:2"],'
        '"kind":"reached","mark":"größe"}'
    )


def test_kinds_of_a_newer_program_are_skipped() -> None:
    assert parse_line('{"t":1.0,"actor":"a","seq":0,"kind":"not_invented_yet","x":1}') is None
    newer = '{"t":1.0,"actor":"a","seq":0,"kind":"reached","mark":"m","not_invented_yet":1}'
    record = parse_line(newer)
    assert record is not None
    assert record.event == Reached(mark="m")
