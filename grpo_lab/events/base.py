"""The base of all events, and the registry of kinds."""

from __future__ import annotations

import dataclasses
import re
import typing
from typing import Any, ClassVar, TypeVar

SCHEMA_VERSION = 1

Params = dict[str, Any]
E = TypeVar("E")
_REGISTRY: dict[str, type[Event]] = {}
_FIELD_TYPES: dict[type[Event], dict[str, Any]] = {}


class Event:
    """Base of all events. A subclass' kind is its name in snake case."""

    __slots__ = ()
    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        _REGISTRY[cls.kind] = cls


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def event(cls: type[E]) -> type[E]:
    """Makes a class a frozen dataclass with keyword-only fields."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def kinds() -> dict[str, type[Event]]:
    """Every event kind of this schema, by name."""
    return dict(_REGISTRY)


def kind_class(kind: str) -> type[Event] | None:
    """The class of a kind, or None for one that this version does not know."""
    return _REGISTRY.get(kind)


def field_types(cls: type[Event]) -> dict[str, Any]:
    """Field names of an event class with their annotations, in order."""
    cached = _FIELD_TYPES.get(cls)
    if cached is None:
        hints = typing.get_type_hints(cls)
        cached = {item.name: hints[item.name] for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        _FIELD_TYPES[cls] = cached
    return cached
