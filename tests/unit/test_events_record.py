"""A record's line on disk: what is written comes back, and what is damaged is refused by name."""

from __future__ import annotations

import dataclasses
import gzip
import json
import types
import typing
from typing import Any

import pytest

from grpo_lab.events import (
    Reached,
    Record,
    RunDeclared,
    VersionCommitted,
    field_types,
    kinds,
    make_record,
    parse_line,
    split_line,
)


def example(annotation: Any) -> Any:
    """Some value of an annotated type that differs from every default."""
    origin = typing.get_origin(annotation)
    if origin is types.UnionType:
        return example(typing.get_args(annotation)[0])
    if origin is tuple:
        items = typing.get_args(annotation)
        return (example(items[0]),) * (2 if Ellipsis in items else len(items))
    if origin is dict:
        values = typing.get_args(annotation)[1]
        return {"a": {"c": 2.5}} if values is Any else {"a": example(values)}
    return {int: 7, float: 0.25, str: "wört", bool: True}[annotation]


def event_of(cls: type) -> Any:
    return cls(**{name: example(annotation) for name, annotation in field_types(cls).items()})


@pytest.mark.parametrize("cls", kinds().values(), ids=kinds().keys())
def test_every_kind_comes_back_as_it_was_written(cls):
    record = Record(1.25, "engine-0", 41, ("trainer:7", "worker:0"), event_of(cls))
    back = parse_line(record.to_line())
    assert back == record
    assert back.to_line() == record.to_line()
    assert parse_line(record.to_line().encode()) == record


@pytest.mark.parametrize("cls", kinds().values(), ids=kinds().keys())
def test_fields_with_a_default_may_be_left_out(cls):
    required = {
        item.name: example(field_types(cls)[item.name])
        for item in dataclasses.fields(cls)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    }
    line = json.dumps({"t": 0, "actor": "a", "seq": 0, "kind": cls.kind, **required})
    assert parse_line(line).event == cls(**required)


def test_defaults_that_are_dictionaries_are_not_shared():
    line = '{"t":0,"actor":"a","seq":0,"kind":"run_declared"}'
    parse_line(line).event.parameters["max_staleness"] = 3
    assert parse_line(line).event.parameters == {}
    assert parse_line(line).event == RunDeclared()


@pytest.mark.parametrize("cls", kinds().values(), ids=kinds().keys())
def test_a_field_of_the_wrong_type_is_named(cls):
    for name, annotation in field_types(cls).items():
        row = json.loads(Record(0.0, "a", 0, (), event_of(cls)).to_line())
        row[name] = 3 if annotation is str else "3"
        with pytest.raises(ValueError, match=f"{cls.kind}.*{name}"):
            parse_line(json.dumps(row))


@pytest.mark.parametrize(
    ("bad", "name"), [(True, "version"), (1.0, "version"), (None, "term"), (["x", 1], "members")]
)
def test_no_type_is_bent_into_another(bad, name):
    event = VersionCommitted(term=1, version=1, attempt=1, view=1, members=("engine-0",))
    row = json.loads(Record(0.0, "trainer", 0, (), event).to_line())
    with pytest.raises(ValueError, match=name):
        parse_line(json.dumps({**row, name: bad}))


def test_whole_numbers_are_seconds_too_and_nan_survives():
    gap = '"kind":"logprob_gap_measured","version":1,"gap_max":NaN,"gap_mean":1,"tokens":2}'
    event = parse_line('{"t":3,"actor":"a","seq":0,' + gap).event
    assert event.gap_mean == 1.0
    assert event.gap_max != event.gap_max


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        '"t"',
        "[" * 100_000,
        '{"t":0,"actor":"a","kind":"reached","mark":"m"}',
        '{"t":0,"actor":"a","seq":0,"mark":"m"}',
        '{"t":0,"actor":"a","seq":0,"kind":["reached"],"mark":"m"}',
        '{"t":"0","actor":"a","seq":0,"kind":"reached","mark":"m"}',
        '{"t":0,"actor":"a","seq":0.5,"kind":"reached","mark":"m"}',
        '{"t":0,"actor":7,"seq":0,"kind":"reached","mark":"m"}',
        '{"t":0,"actor":"a","seq":0,"cause":"b:1","kind":"reached","mark":"m"}',
        '{"t":0,"actor":"a","seq":0,"cause":[1],"kind":"reached","mark":"m"}',
        '{"t":0,"actor":"a","seq":0,"kind":"reached"}',
        b'{"t":0,"actor":"a","seq":0,"kind":"reached","mark":"\xff"}',
    ],
)
def test_what_is_no_record_is_a_value_error(line):
    with pytest.raises(ValueError):  # noqa: PT011 - the messages differ
        parse_line(line)


def test_a_compressed_trace_is_told_what_a_trace_is():
    with pytest.raises(ValueError, match="one JSON object a line, not compressed"):
        parse_line(gzip.compress(b"{}"))


def test_kinds_and_fields_of_a_newer_schema_are_skipped_but_keep_their_place():
    line = '{"t":2,"actor":"a","seq":5,"cause":["b:1"],"kind":"from_the_future","x":1}'
    assert parse_line(line) is None
    place, row = split_line(line)
    assert place == (2, "a", 5, ("b:1",))
    assert make_record(place, row) is None
    line = '{"t":2,"actor":"a","seq":5,"kind":"reached","mark":"m","new_field":[1]}'
    assert parse_line(line) == Record(2, "a", 5, (), Reached(mark="m"))


def test_a_parsed_event_is_frozen_and_hashable_like_any_other():
    event = parse_line('{"t":0,"actor":"a","seq":0,"kind":"reached","mark":"m"}').event
    assert hash(event) == hash(Reached(mark="m"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.mark = "n"
    assert dataclasses.replace(event, mark="n") == Reached(mark="n")
