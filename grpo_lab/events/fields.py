"""From the JSON fields of a record to an event, with every type checked."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

from grpo_lab.events.base import Event, field_types

Convert = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Schema:
    """``fields`` are (name, type that needs no conversion, conversion of anything else)."""

    fields: tuple[tuple[str, type, Convert], ...]
    defaults: dict[str, Any]
    factories: tuple[tuple[str, Callable[[], Any]], ...]


_SCHEMAS: dict[type[Event], _Schema] = {}


def parse_fields(cls: type[Event], row: dict[str, Any]) -> Event:
    """The event whose fields are in ``row``; names that the class does not know are ignored.

    Raises ``ValueError`` naming the kind, the field and the value.

    >>> from grpo_lab.events import Reached
    >>> parse_fields(Reached, {"kind": "reached", "mark": "a"})
    Reached(mark='a')
    """
    schema = _SCHEMAS.get(cls) or _schema(cls)
    values = schema.defaults.copy()
    for name, make in schema.factories:
        if name not in row:
            values[name] = make()
    for name, plain, convert in schema.fields:
        if name in row:
            value = row[name]
            if type(value) is not plain:
                try:
                    value = convert(value)
                except TypeError:
                    raise ValueError(f"record of kind {cls.kind!r}: {name}={value!r:.80}") from None
            values[name] = value
        elif name not in values:
            raise ValueError(f"record of kind {cls.kind!r} lacks a field: {name}")
    # Traces have millions of events; a frozen dataclass' own constructor takes longer than all the rest.
    event = object.__new__(cls)
    object.__setattr__(event, "__dict__", values)
    return event


def _schema(cls: type[Event]) -> _Schema:
    fields, defaults, factories = [], {}, []
    annotations = field_types(cls)
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        plain, convert = _conversion(annotations[item.name])
        fields.append((item.name, plain, convert))
        if item.default is not dataclasses.MISSING:
            defaults[item.name] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            factories.append((item.name, item.default_factory))
    schema = _SCHEMAS[cls] = _Schema(tuple(fields), defaults, tuple(factories))
    return schema


def _conversion(annotation: Any) -> tuple[type, Convert]:
    """The JSON type that may stay as it is, and what to do with another; it raises ``TypeError``."""
    origin = typing.get_origin(annotation)
    if annotation is float:
        return float, _to_float
    if origin is types.UnionType:
        options = [option for option in typing.get_args(annotation) if option is not type(None)]
        plain, convert = _conversion(options[0])
        return plain, lambda value: None if value is None else convert(value)
    if origin is tuple:
        return tuple, _tuple_conversion(typing.get_args(annotation))
    if origin is dict:
        return _dict_conversion(typing.get_args(annotation)[1])
    return annotation, _refuse


def _tuple_conversion(items: tuple[Any, ...]) -> Convert:
    """JSON has no tuples. ``tuple[int, ...]`` may be of any length, ``tuple[int, int]`` is of its own."""
    plain, convert = _conversion(items[0])
    length = None if Ellipsis in items else len(items)

    def to_tuple(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or (length is not None and len(value) != length):
            raise TypeError
        return tuple([item if type(item) is plain else convert(item) for item in value])

    return to_tuple


def _dict_conversion(annotation: Any) -> tuple[type, Convert]:
    if annotation is Any:
        return dict, _refuse
    plain, convert = _conversion(annotation)

    def to_dict(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise TypeError
        return {key: item if type(item) is plain else convert(item) for key, item in value.items()}

    return type(None), to_dict  # every value is looked at


def _to_float(value: Any) -> float:
    if type(value) is not int:
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        raise TypeError from None


def _refuse(value: Any) -> Any:
    raise TypeError
