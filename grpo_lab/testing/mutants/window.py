"""The protocol events around a fault: what a person reads of a case that was made small."""

from __future__ import annotations

import dataclasses
from typing import Any

from grpo_lab.events import (
    BucketPackBegan,
    BucketPacked,
    BucketReceived,
    CacheCleared,
    EngineAcknowledged,
    Event,
    GatherBegan,
    GatherEnded,
    Heartbeat,
    MemoryMeasured,
    ModelStep,
    Record,
    RequestAdmitted,
    RequestFinished,
    SlotReleased,
    SyncBegan,
    TermBegan,
)
from grpo_lab.testing.mutants.mutant import Finding

_NAMES = ("engine", "member", "sample", "request", "group", "checkpoint", "resource")
_BEGIN = (SyncBegan, TermBegan)
_DETAIL: tuple[type[Event], ...] = (
    BucketPackBegan,
    BucketPacked,
    BucketReceived,
    CacheCleared,
    EngineAcknowledged,
    GatherBegan,
    GatherEnded,
    Heartbeat,
    MemoryMeasured,
    ModelStep,
    RequestAdmitted,
    RequestFinished,
    SlotReleased,
)


def around(finding: Finding) -> list[Record]:
    """From the first proof of the violation to its last: that, and all that the last one is about.

    A single proof begins with the sync, or term, in which it lies. Events are about what they name: engines,
    samples, groups, checkpoints, syncs (by term and version). Work that is no decision of the protocol
    (packing, steps, requests in an engine, heartbeats, measurements) is left out unless it is proof itself.
    """
    records = finding.records
    proof = set(finding.event_ids)
    places = [place for place, record in enumerate(records) if record.id in proof]
    if not places:
        return records[-1:]
    first, last = places[0], places[-1]
    if first == last:
        first = next((at for at in range(first, -1, -1) if isinstance(records[at].event, _BEGIN)), 0)
    subjects = _subjects(records[last].event)
    return [
        record
        for record in records[first : last + 1]
        if record.id in proof
        or (not isinstance(record.event, _DETAIL) and subjects.intersection(_subjects(record.event)))
    ]


def _subjects(event: Event) -> set[tuple[Any, ...]]:
    """What an event is about. One that names a sample, request or group is not about the engine as well."""
    named: set[tuple[Any, ...]] = set()
    for field in dataclasses.fields(event):  # type: ignore[arg-type]
        value = getattr(event, field.name)
        if field.name in _NAMES and value:
            named.add((field.name, value))
        elif field.name in ("samples", "groups") and isinstance(value, tuple):
            named.update((field.name[:-1], one) for one in value)
    if hasattr(event, "version") and hasattr(event, "attempt"):
        named.add(("sync", getattr(event, "term", 0), event.version))
    small = {one for one in named if one[0] in ("sample", "request", "group")}
    return small or named
