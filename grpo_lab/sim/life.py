"""Actors that can die: what a dead one does is neither seen nor sent."""

from __future__ import annotations

from grpo_lab.events import Event
from grpo_lab.ports import Recorder


class Life:
    """One incarnation of an actor, as its recorder. Code of a dead incarnation may still unwind; from
    ``end`` on nothing that it does enters the trace, and no client of it sends anything.
    """

    def __init__(self, recorder: Recorder, incarnation: int = 1) -> None:
        self._recorder = recorder
        self.incarnation = incarnation
        self.alive = True

    @property
    def actor(self) -> str:
        return self._recorder.actor

    @property
    def last_id(self) -> str:
        return self._recorder.last_id

    @property
    def next_seq(self) -> int:
        return self._recorder.next_seq

    @property
    def now_s(self) -> float:
        return self._recorder.now_s

    def emit(self, event: Event) -> str:
        return self._recorder.emit(event) if self.alive else self._recorder.last_id

    def observe(self, event_id: str) -> None:
        if self.alive:
            self._recorder.observe(event_id)

    def end(self) -> None:
        self.alive = False
