"""An event with its place in the trace, and its form on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from grpo_lab.events.base import Event, field_types, kind_class
from grpo_lab.events.fields import parse_fields

Place = tuple[float, str, int, tuple[str, ...]]


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


def parse_line(line: str | bytes) -> Record | None:
    """The record of one line, or None for a kind that this version does not know.

    Raises ``ValueError`` (or its subclass ``json.JSONDecodeError``) for anything that is no record.
    """
    place, row = split_line(line)
    return make_record(place, row)


def split_line(line: str | bytes) -> tuple[Place, dict[str, Any]]:
    """A line's place in the trace, also for kinds that this version does not know, and its other fields.

    Raises ``ValueError`` for anything that has no place.
    """
    try:
        row = json.loads(line.decode() if isinstance(line, bytes) else line)
    except RecursionError as error:
        raise ValueError("nested too deeply for a trace record") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            "not a trace record: no UTF-8 text. A trace is one JSON object a line, not compressed"
        ) from error
    try:
        t, actor, seq = row.pop("t"), row.pop("actor"), row.pop("seq")
        cause = row.pop("cause", None)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a trace record: {error!r} in {_shown(line)}") from error
    if (type(t) is not float and type(t) is not int) or type(seq) is not int or type(actor) is not str:
        raise ValueError(f"not a trace record: t, actor or seq of the wrong type in {_shown(line)}")
    if cause is None:
        return (t, actor, seq, ()), row
    if type(cause) is not list or not all(type(item) is str for item in cause):
        raise ValueError(f"not a trace record: cause is no list of event ids in {_shown(line)}")
    return (t, actor, seq, tuple(cause)), row


def make_record(place: Place, row: dict[str, Any]) -> Record | None:
    """The record of what ``split_line`` found, or None for an unknown kind.

    Raises ``ValueError`` for a missing field or one of the wrong type.
    """
    kind = row.get("kind")
    if type(kind) is not str:
        raise ValueError(f"not a trace record: kind={kind!r}")
    cls = kind_class(kind)
    if cls is None:
        return None
    return Record(*place, parse_fields(cls, row))


def _shown(line: str | bytes) -> str:
    text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
    return repr(text[:120])


def _fields_of(item: Event) -> dict[str, Any]:
    return {name: getattr(item, name) for name in field_types(type(item))}
