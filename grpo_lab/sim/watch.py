"""Sees every record of a simulation as it is written: checks it, and notes what was reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_lab.check import Checker, Violation
from grpo_lab.events import (
    AdmissionBlocked,
    EngineAdmitted,
    EngineFenced,
    GroupAdmitted,
    GroupConsumed,
    GroupDropped,
    GroupQueued,
    MemberDied,
    MemberStarted,
    Reached,
    Record,
    RequestAdmitted,
    RequestFinished,
    RequestRefused,
    SampleCompleted,
    SyncAborted,
    SyncBegan,
    SyncEnded,
    TermBegan,
    TrainerStarved,
    UpdateFailed,
    VersionCommitted,
)
from grpo_lab.recorders import ListRecorder
from grpo_lab.sim.scenario import TRAINER, WORKER


class WatchedRecorder(ListRecorder):
    """One actor's part of the one list of records."""

    def __init__(self, actor: str, clock: Callable[[], float], watch: Watch) -> None:
        super().__init__(actor, clock, watch.records)
        self._watch = watch

    def _store(self, record: Record) -> None:
        self._watch.see(record)


@dataclass(slots=True)
class Measures:
    """What a search tries to make large."""

    staleness: int = 0
    overlap: int = 0
    queue_depth: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Watch:
    """The trace ends with the record that broke a rule: what comes later is not kept.

    ``open_groups`` are those that were let in and have not ended, ``lost_groups`` those of them that a worker
    or trainer had when it died. ``stop`` is set at a violation; with
    ``only``, at one of these rules, and ``passed_over`` counts those of others.
    """

    records: list[Record]
    only: frozenset[str] | None = None
    passed_over: dict[str, int] = field(default_factory=dict)
    checker: Checker = field(default_factory=Checker)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    violation: Violation | None = None
    open_groups: dict[str, GroupAdmitted] = field(default_factory=dict)
    lost_groups: dict[str, GroupAdmitted] = field(default_factory=dict)
    measures: Measures = field(default_factory=Measures)
    marks: dict[str, int] = field(default_factory=dict)
    _requests: set[tuple[str, str]] = field(default_factory=set)
    _left: set[str] = field(default_factory=set)
    _syncing: bool = False

    def see(self, record: Record) -> None:
        if self.violation is not None:
            return
        self.records.append(record)
        found = self.checker.feed(record)
        self._note(record)
        for violation in found:
            self.judge(violation)

    def judge(self, violation: Violation) -> None:
        if self.only is None or violation.rule in self.only:
            self.break_off(violation)
        else:
            self.passed_over[violation.rule] = self.passed_over.get(violation.rule, 0) + 1

    def break_off(self, violation: Violation) -> None:
        if self.violation is None:
            self.violation = violation
            self.stop.set()

    def mark(self, name: str) -> None:
        self.marks[name] = self.marks.get(name, 0) + 1

    def _note(self, record: Record) -> None:
        handler = _NOTES.get(type(record.event))
        if handler is not None:
            handler(self, record.event)


def _group_admitted(watch: Watch, event: GroupAdmitted) -> None:
    watch.open_groups[event.group] = event


def _group_consumed(watch: Watch, event: GroupConsumed) -> None:
    watch.open_groups.pop(event.group, None)
    watch.lost_groups.pop(event.group, None)
    staleness = event.version - min(event.versions_first)
    watch.measures.staleness = max(watch.measures.staleness, staleness)
    if staleness:
        watch.mark("consumed-stale-sample")


def _group_dropped(watch: Watch, event: GroupDropped) -> None:
    watch.open_groups.pop(event.group, None)
    watch.lost_groups.pop(event.group, None)
    watch.mark(f"dropped-{event.reason}")


def _group_queued(watch: Watch, event: GroupQueued) -> None:
    watch.measures.queue_depth = max(watch.measures.queue_depth, event.depth)


def _request_admitted(watch: Watch, event: RequestAdmitted) -> None:
    watch._requests.add((event.engine, event.request))
    if watch._syncing:
        watch.measures.overlap = max(watch.measures.overlap, len(watch._requests))
    if event.paused:
        watch.mark("request-arrived-in-pause")


def _request_finished(watch: Watch, event: RequestFinished) -> None:
    watch._requests.discard((event.engine, event.request))
    watch.measures.tokens += event.tokens
    if event.finish_reason == "abort":
        watch.mark("request-aborted")


def _request_refused(watch: Watch, event: RequestRefused) -> None:
    watch.mark(f"request-refused-{event.status}")


def _sample_completed(watch: Watch, event: SampleCompleted) -> None:
    if len({span[1] for span in event.spans}) > 1:
        watch.mark("sample-over-two-versions")


def _sync_began(watch: Watch, event: SyncBegan) -> None:
    watch._syncing = True
    if watch._requests:
        watch.mark("sync-under-traffic")
    watch.measures.overlap = max(watch.measures.overlap, len(watch._requests))


def _sync_ended(watch: Watch, event: SyncEnded) -> None:
    watch._syncing = False


def _sync_aborted(watch: Watch, event: SyncAborted) -> None:
    watch.mark("sync-given-up" if event.final else "sync-attempt-failed")


def _committed(watch: Watch, event: VersionCommitted) -> None:
    if event.attempt > 1:
        watch.mark("committed-by-retry")
    if event.term > 1:
        watch.mark("committed-by-restarted-trainer")


def _fenced(watch: Watch, event: EngineFenced) -> None:
    watch._left.add(event.engine)
    watch.mark("engine-fenced")


def _admitted(watch: Watch, event: EngineAdmitted) -> None:
    if event.engine in watch._left:
        watch._left.discard(event.engine)
        watch.mark("engine-taken-in-again")


def _update_failed(watch: Watch, event: UpdateFailed) -> None:
    watch.mark("engine-dropped-update")


def _died(watch: Watch, event: MemberDied) -> None:
    for key in [key for key in watch._requests if key[0] == event.member]:
        watch._requests.discard(key)
    if event.member in (TRAINER, WORKER):
        watch.lost_groups.update(watch.open_groups)
    watch.mark(f"died-{event.member.partition('-')[0]}")


def _started(watch: Watch, event: MemberStarted) -> None:
    if event.incarnation > 1:
        watch.mark(f"restarted-{event.role}")


def _term_began(watch: Watch, event: TermBegan) -> None:
    watch._left.clear()
    if event.checkpoint:
        watch.mark("resumed-from-checkpoint")
    elif event.term > 1:
        watch.mark("began-again-from-nothing")


def _blocked(watch: Watch, event: AdmissionBlocked) -> None:
    watch.mark(f"admission-blocked-by-{event.by}")


def _starved(watch: Watch, event: TrainerStarved) -> None:
    watch.mark("trainer-starved")


def _reached(watch: Watch, event: Reached) -> None:
    watch.mark(event.mark)


_NOTES: dict[type, Callable[..., None]] = {
    GroupAdmitted: _group_admitted,
    GroupConsumed: _group_consumed,
    GroupDropped: _group_dropped,
    GroupQueued: _group_queued,
    RequestAdmitted: _request_admitted,
    RequestFinished: _request_finished,
    RequestRefused: _request_refused,
    SampleCompleted: _sample_completed,
    SyncBegan: _sync_began,
    SyncEnded: _sync_ended,
    SyncAborted: _sync_aborted,
    VersionCommitted: _committed,
    EngineAdmitted: _admitted,
    EngineFenced: _fenced,
    UpdateFailed: _update_failed,
    MemberDied: _died,
    MemberStarted: _started,
    TermBegan: _term_began,
    AdmissionBlocked: _blocked,
    TrainerStarved: _starved,
    Reached: _reached,
}
