"""An event with its place in the trace, and its form on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from grpo_lab.events.base import Event, field_types, kind_class


@dataclass(frozen=True, slots=True)
class Record:
    """An event with its place: ``id`` is ``actor:seq``, and ``cause`` holds ids of other actors."""

    t: float
    actor: str
    seq: int
    cause: tuple[str, ...]
    event: Event

    @property
    def id(self) -> str:
        return f"{self.actor}:{self.seq}"

    def to_line(self) -> str:
        """One line of JSON without a newline; the same record always gives the same bytes."""
        head = {"t": round(self.t, 6), "actor": self.actor, "seq": self.seq}
        if self.cause:
            head["cause"] = list(self.cause)
        body = {"kind": self.event.kind, **_fields_of(self.event)}
        return json.dumps({**head, **body}, separators=(",", ":"), ensure_ascii=False, allow_nan=True)


def parse_id(event_id: str) -> tuple[str, int]:
    """``"engine-0:40"`` -> ``("engine-0", 40)``. Raises ``ValueError`` for another form."""
    actor, _, seq = event_id.rpartition(":")
    if not actor:
        raise ValueError(f"{event_id!r} is not an event id of the form actor:seq")
    return actor, int(seq)


def parse_line(line: str) -> Record | None:
    """The record of one line, or None for a kind that this version does not know.

    Raises ``ValueError`` (or its subclass ``json.JSONDecodeError``) for anything that is no record.
    """
    row = json.loads(line)
    try:
        place = (float(row.pop("t")), str(row.pop("actor")), int(row.pop("seq")))
        cause = tuple(str(item) for item in row.pop("cause", ()))
        kind = row.pop("kind")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a trace record: {error!r} in {line[:120]!r}") from error
    cls = kind_class(kind)
    if cls is None:
        return None
    known = field_types(cls)
    try:
        values = {name: _restore(value) for name, value in row.items() if name in known}
        return Record(*place, cause, cls(**values))
    except TypeError as error:
        raise ValueError(f"record of kind {kind!r} lacks a field: {error}") from error


def _fields_of(item: Event) -> dict[str, Any]:
    return {name: getattr(item, name) for name in field_types(type(item))}


def _restore(value: Any) -> Any:
    """JSON has no tuples: every list of a record becomes one, so that events compare equal again."""
    if isinstance(value, list):
        return tuple(_restore(item) for item in value)
    return value
