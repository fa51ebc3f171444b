"""Which states and transitions of the coordinator were met, against the table of all that may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from grpo_lab.events import Record, StateChanged
from grpo_lab.types import SyncState

Edge = tuple[SyncState, SyncState]

_S = SyncState
TRANSITIONS: dict[Edge, str] = {
    (_S.DISCONNECTED, _S.RUNNING): "connected",
    (_S.RUNNING, _S.PAUSING): "a sync begins",
    (_S.RUNNING, _S.DISCONNECTED): "closed at rest",
    (_S.PAUSING, _S.PAUSED): "every engine of the view is paused",
    (_S.PAUSING, _S.ABORTING): "an engine could not be paused",
    (_S.PAUSING, _S.RUNNING): "interrupted; the engines were released",
    (_S.PAUSING, _S.FENCED): "interrupted, and no engine came back",
    (_S.PAUSED, _S.TRANSFERRING): "an attempt begins",
    (_S.PAUSED, _S.PROBATION): "attempts failed, but enough proved the version; some must be tried",
    (_S.PAUSED, _S.RESUMING): "attempts failed, but enough proved the version",
    (_S.PAUSED, _S.ABORTING): "no attempt succeeded, or none was possible",
    (_S.PAUSED, _S.RUNNING): "interrupted or closed; the engines were released",
    (_S.PAUSED, _S.FENCED): "interrupted or closed, and no engine came back",
    (_S.TRANSFERRING, _S.LOADED): "every engine of the view has loaded and proved the version",
    (_S.TRANSFERRING, _S.PAUSED): "the attempt failed",
    (_S.TRANSFERRING, _S.RUNNING): "interrupted; the engines were released",
    (_S.TRANSFERRING, _S.FENCED): "interrupted, and no engine came back",
    (_S.LOADED, _S.PROBATION): "some engines can only be tried when resumed",
    (_S.LOADED, _S.RESUMING): "committed",
    (_S.LOADED, _S.RUNNING): "closed before the resume; the engines were released",
    (_S.LOADED, _S.FENCED): "closed before the resume, and no engine came back",
    (_S.PROBATION, _S.RESUMING): "committed",
    (_S.PROBATION, _S.RUNNING): "closed before the resume, or interrupted with others in service",
    (_S.PROBATION, _S.FENCED): "failed or interrupted: who holds the version is fenced",
    (_S.RESUMING, _S.PAUSING): "rolling: the next engine has its turn",
    (_S.RESUMING, _S.RUNNING): "every engine of the view generates again",
    (_S.RESUMING, _S.FENCED): "no engine came back",
    (_S.ABORTING, _S.RESUMING): "all are back on the previous version",
    (_S.ABORTING, _S.RUNNING): "interrupted, or something broke that no retry mends",
    (_S.ABORTING, _S.FENCED): "the same, and no engine came back",
    (_S.FENCED, _S.DISCONNECTED): "closed without an engine",
}
"""Every transition that the coordinator may take, and when. Another one is an error of the protocol."""


@dataclass(slots=True)
class Coverage:
    """Counts of states entered and transitions taken. One coverage may take in any number of traces."""

    states: Counter[SyncState] = field(default_factory=Counter)
    edges: Counter[Edge] = field(default_factory=Counter)

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            event = record.event
            if isinstance(event, StateChanged):
                edge = (SyncState(event.before), SyncState(event.after))
                self.edges[edge] += 1
                self.states[edge[1]] += 1

    @property
    def missing(self) -> list[Edge]:
        """Declared transitions that were never taken."""
        return [edge for edge in TRANSITIONS if edge not in self.edges]

    @property
    def undeclared(self) -> list[Edge]:
        """Transitions that were taken although the table has none of the kind."""
        return sorted((edge for edge in self.edges if edge not in TRANSITIONS), key=str)

    @property
    def states_missing(self) -> list[SyncState]:
        return [state for state in SyncState if state not in self.states]

    def __str__(self) -> str:
        reached = len(TRANSITIONS) - len(self.missing)
        return (
            f"{len(self.states)} of {len(SyncState)} states, {reached} of {len(TRANSITIONS)} transitions, "
            f"{len(self.undeclared)} undeclared"
        )
