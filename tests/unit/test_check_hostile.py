"""Traces that are well-formed but make no sense: a verdict or a ``TraceError``, never another exception."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from check_shapes import SHAPES, fresh_run
from check_syncs import PARAMETERS
from check_world import World

from grpo_lab.check import check_records
from grpo_lab.errors import TraceError
from grpo_lab.events import Record, RunDeclared, parse_line

ODD: dict[type, list[Any]] = {
    int: [-1, 0, 1, 2**63, 10**30],
    float: [math.nan, math.inf, -math.inf, -1.0, 0.0],
    str: ["", "x", "engine-0", "t1.v1.a1", "\ud800"],
    bool: [True, False],
}


def read_back(records: list[Record]) -> list[Record]:
    """As a file would give them; ``ValueError`` for what a file may not hold."""
    lines = [
        record.to_line().encode("utf-8", "surrogatepass").decode("utf-8", "replace") for record in records
    ]
    return [parse_line(line) for line in lines]


def declared(world: World, **changes: Any) -> list[Record]:
    event = dataclasses.replace(world.records[0].event, **changes)
    return [dataclasses.replace(world.records[0], event=event), *world.records[1:]]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_declared_value_that_cannot_be_is_named(name):
    world = fresh_run()
    refused = []
    for odd in ("x", -1, 0, 1.5, [], {}, True, math.nan, math.inf, 10**30):
        records = declared(world, parameters={**PARAMETERS, name: odd})
        try:
            check_records(read_back(records))
        except TraceError as error:
            refused.append(str(error))
    assert len(refused) >= 5
    assert all(f"{name}=" in message and "expected" in message for message in refused)


def test_a_parameter_of_none_is_not_declared():
    for name in PARAMETERS:
        result = check_records(declared(fresh_run(), parameters={**PARAMETERS, name: None}))
        assert not result.violations, name


def test_a_newer_schema_is_refused():
    with pytest.raises(TraceError, match="schema 99"):
        check_records([Record(0.0, "run", 0, (), RunDeclared(schema=99))])


@pytest.mark.parametrize("odd", [5, [], None, "yes"])
def test_capabilities_are_objects(odd):
    with pytest.raises((TraceError, ValueError), match="capabilities"):
        check_records(read_back(declared(fresh_run(), capabilities={"engine-0": odd})))


@pytest.mark.parametrize("name", SHAPES)
def test_any_field_may_be_odd_and_records_may_be_missing_or_shuffled(name):
    rng = random.Random(name)
    world = SHAPES[name]()
    world.end()
    for _ in range(40):
        for damaged in (one_odd_field(world.records, rng), thinned(world.records, rng)):
            try:
                records = read_back(damaged)
            except ValueError:
                continue
            check_or_refuse(records)
    shuffled = list(world.records)
    rng.shuffle(shuffled)
    check_or_refuse(shuffled)


def check_or_refuse(records: list[Record]) -> None:
    try:
        check_records(records)
    except TraceError:
        return


def thinned(records: list[Record], rng: random.Random) -> list[Record]:
    return [record for record in records if rng.random() < 0.7]


def one_odd_field(records: list[Record], rng: random.Random) -> list[Record]:
    place = rng.randrange(len(records))
    event = records[place].event
    field = rng.choice(dataclasses.fields(event))
    value = getattr(event, field.name)
    if type(value) in ODD:
        odd = rng.choice(ODD[type(value)])
    elif isinstance(value, tuple):
        odd = rng.choice([(), value[:1], value + value, value[::-1], ((1,),)])
    else:
        odd = rng.choice([0, {}, {"pause": "x"}, {"total": -1.0}])
    changed = dataclasses.replace(event, **{field.name: odd})
    return [*records[:place], dataclasses.replace(records[place], event=changed), *records[place + 1 :]]
