"""What must happen in bounded time once faults stop: syncs and members (L1 - L4, L7, L10), and the rest."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.check.liveness import LivenessRule
from grpo_lab.check.progress_rules import PROGRESS_RULES
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    EngineAdmitted,
    EngineFenced,
    EnginePaused,
    EngineResumed,
    Heartbeat,
    MemberDied,
    MemberStarted,
    MemberStopped,
    ModelStep,
    PhaseAgreed,
    Record,
    StepPlanned,
    SyncAborted,
    SyncBegan,
    SyncEnded,
    TermBegan,
    TrainerStarved,
    VersionCommitted,
    ViewChanged,
    WeightsActivated,
)

_KEPT_PHASES = 512  # agreements that a slow rank may lag behind


class NewestVersionReached(LivenessRule):
    """An engine that is dead, fenced or out of the view owes nothing; L7 is about those that come back."""

    id = "L1"
    words = "a version whose sync began is committed, and every live engine of the view activates it, in time"
    capability = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._active: dict[str, int] = {}
        self._newest: tuple[int, int] = (0, 0)

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        self.waive(lambda key: True, record)

    @on(SyncBegan)
    def sync_began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncBegan)
        words = f"version {event.version} of term {event.term} was still not committed"
        self.owe(("commit", 0), record, words)

    @on(VersionCommitted)
    def committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        self.meet(("commit", 0), record)
        self._newest = (event.term, event.version)
        for engine in event.members:
            if not self.context.engine_can(engine, "events"):
                continue
            if self._active.get(engine, 0) >= event.version:
                self.count()
            else:
                words = f"{engine} still served no tokens of version {event.version}, which was committed"
                self.owe(("activate", engine), record, words)

    @on(WeightsActivated)
    def activated(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsActivated)
        self._active[event.engine] = event.version
        if event.version >= self._newest[1]:
            self.meet(("activate", event.engine), record)

    @on(MemberDied, MemberStopped)
    def gone(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberDied | MemberStopped)
        self._active.pop(event.member, None)
        self.waive(lambda key: key == ("activate", event.member), record)

    @on(EngineFenced)
    def fenced(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced)
        self.waive(lambda key: key == ("activate", event.engine), record)


class NoEngineStaysPaused(LivenessRule):
    id = "L2"
    words = "a paused engine generates again, or is declared out of service, in time"
    capability = "events"

    @on(EnginePaused)
    def paused(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EnginePaused)
        self.owe(event.engine, record, f"{event.engine} was still paused (mode {event.mode})")

    @on(EngineResumed)
    def resumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineResumed)
        self.meet(event.engine, record)

    @on(EngineFenced, MemberDied, MemberStopped, MemberStarted)
    def gone(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced | MemberDied | MemberStopped | MemberStarted)
        self.waive(
            lambda key: key == (event.engine if isinstance(event, EngineFenced) else event.member), record
        )


class SyncEnds(LivenessRule):
    id = "L3"
    words = "every sync ends in time, and a dead engine is taken out of the view by then"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._dead: set[str] = set()

    @on(SyncBegan)
    def began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncBegan)
        members = ", ".join(event.members)
        self.owe("sync", record, f"the sync of version {event.version} with {members} had still not ended")
        for member in sorted(self._dead.intersection(event.members)):
            self._owe_eviction(member, record)

    @on(MemberDied)
    def died(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberDied)
        self._dead.add(event.member)
        if "sync" in self._open:
            self._owe_eviction(event.member, record)

    @on(SyncEnded, TermBegan)
    def ended(self, record: Record) -> None:
        self.meet("sync", record)

    @on(SyncAborted)
    def aborted(self, record: Record) -> None:
        """The last word about a sync that an exception ended."""
        event = record.event
        assert isinstance(event, SyncAborted)
        if event.final:
            self.meet("sync", record)

    @on(ViewChanged)
    def view_changed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ViewChanged)
        for member in self._dead.difference(event.members):
            self.meet(("evict", member), record)

    @on(EngineFenced, MemberStarted, MemberStopped)
    def settled(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced | MemberStarted | MemberStopped)
        member = event.engine if isinstance(event, EngineFenced) else event.member
        self.meet(("evict", member), record)
        if isinstance(event, MemberStarted):
            self._dead.discard(member)

    def _owe_eviction(self, member: str, record: Record) -> None:
        words = f"{member} had died and was still in the view of the running sync"
        self.owe(("evict", member), record, words)


@dataclass(slots=True)
class _Beats:
    """Since when a member's heartbeats are due, and since when its progress stands still."""

    beat: Record
    moved: Record
    progress: int = -1


class HeartbeatsProveProgress(LivenessRule):
    """No progress is a fault only while the trainer waits for samples: a worker that has done all that it may
    do has nothing to report.
    """

    id = "L4"
    words = (
        "heartbeats come on time, during a sync too, and show progress while the trainer waits for samples"
    )
    parameters = ("liveness_bound_s", "heartbeat_stale_after_s")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._stale_after_s: float = context.parameter("heartbeat_stale_after_s")
        self._beats: dict[str, _Beats] = {}
        self._starved_since_s: float | None = None

    @on(Heartbeat)
    def beat(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, Heartbeat)
        before = self._beats.get(event.member)
        if before is None:
            self._beats[event.member] = _Beats(record, record, event.progress)
            return
        self._look_at(event.member, before, record.t)
        if self.calm:
            self.count()
        before.beat = record
        if event.progress > before.progress:
            before.progress, before.moved = event.progress, record

    @on(TrainerStarved)
    def starved(self, record: Record) -> None:
        self._starved_since_s = record.t

    @on(StepPlanned, TermBegan)
    def fed(self, record: Record) -> None:
        self._starved_since_s = None

    @on(MemberStopped, MemberDied)
    def gone(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberStopped | MemberDied)
        beats = self._beats.pop(event.member, None)
        if beats is not None:
            self._look_at(event.member, beats, record.t)

    def expire(self, now_s: float) -> None:
        for member, beats in list(self._beats.items()):
            self._look_at(member, beats, now_s)
        self._beats.clear()  # only called at the end

    def _look_at(self, member: str, beats: _Beats, now_s: float) -> None:
        if self._calm_since_s is None:
            return
        silent_s = now_s - max(beats.beat.t, self._calm_since_s)
        if silent_s > self._stale_after_s:
            self._now_s = now_s
            self.violate(
                f"{member} sent no heartbeat for {silent_s:.1f} s (heartbeat_stale_after_s = "
                f"{self._stale_after_s:g} s), although it was not reported stopped or dead",
                None,
                beats.beat.id,
            )
        if self._starved_since_s is None:
            return
        stuck_s = now_s - max(beats.moved.t, self._calm_since_s, self._starved_since_s)
        if stuck_s > self.bound_s:
            self._now_s = now_s
            self.violate(
                f"{member} sent heartbeats but made no progress (count {beats.progress}) for {stuck_s:.1f} s "
                f"while the trainer waited for samples (bound {self.bound_s:g} s)",
                None,
                beats.moved.id,
                beats.beat.id,
            )
            self._starved_since_s = None  # once for each wait


class NewEngineServes(LivenessRule):
    """It is owed from the first commit after the engine's start, when there is a version to give it; not by
    one that was fenced in this very run of its process.
    """

    id = "L7"
    words = "a new or restarted engine holds committed weights and takes part, in time"
    capability = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._waiting: dict[str, str] = {}  # engines that have activated nothing since their start: its id
        self._put_out: dict[str, str] = {}  # of those: fenced in that very run

    @on(MemberStarted)
    def started(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberStarted)
        if event.role == "engine" and self.context.engine_can(event.member, "events"):
            self._waiting[event.member] = event.start

    @on(EngineFenced)
    def fenced(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced)
        if event.start and self._waiting.get(event.engine) == event.start:
            self._put_out[event.engine] = self._waiting.pop(event.engine)
            self.waive(lambda key: key == event.engine, record)

    @on(EngineAdmitted)
    def taken_in(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineAdmitted)
        if self._put_out.pop(event.engine, None) == event.start:
            self._waiting[event.engine] = event.start

    @on(VersionCommitted)
    def committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        for engine in self._waiting:
            words = f"{engine} had started and still served nothing, with version {event.version} committed"
            self.owe(engine, record, words)

    @on(WeightsActivated, ModelStep)
    def serves(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsActivated | ModelStep)
        if self._waiting and self._waiting.pop(event.engine, None) is not None:
            self.meet(event.engine, record)

    @on(MemberDied, MemberStopped)
    def gone(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberDied | MemberStopped)
        self._waiting.pop(event.member, None)
        self._put_out.pop(event.member, None)
        self.waive(lambda key: key == event.member, record)


class FailureReachesEveryRank(LivenessRule):
    """Agreements are told apart by their sync and phase; an aborted sync may come to the same ones again."""

    id = "L10"
    words = "all ranks come to the same outcome of every phase, so that one rank's failure reaches every rank"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._ranks: set[int] = set()
        self._outcomes: dict[tuple[int, str, int], dict[int, tuple[PhaseAgreed, str]]] = {}
        self._rounds: dict[tuple[str, int], int] = {}  # (phase, rank) -> agreements so far

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        """The ranks of older terms have ended; who died between an agreement and its word says no more."""
        event = record.event
        assert isinstance(event, TermBegan)
        term = event.term
        self.waive(lambda key: isinstance(key, tuple) and key[0] < term, record)

    @on(PhaseAgreed)
    def agreed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, PhaseAgreed)
        self._ranks.add(event.rank)
        phase = f"{event.phase} of t{event.term}.v{event.version}.a{event.attempt}"
        number = self._rounds[phase, event.rank] = self._rounds.get((phase, event.rank), 0) + 1
        key = (event.term, phase, number)
        outcomes = self._outcomes.setdefault(key, {})
        if outcomes:
            self.count()
            first, proof = next(iter(outcomes.values()))
            if event.ok != first.ok:
                self.violate(
                    f"rank {event.rank} came out of the phase {phase} with ok={event.ok}, but rank "
                    f"{first.rank} with ok={first.ok}: from here on the ranks take different paths",
                    record,
                    proof,
                )
        else:
            outcome = "success" if event.ok else f"failure ({event.detail})"
            words = (
                f"rank {event.rank} knew of the {outcome} of the phase {phase}, and some other rank did not"
            )
            self.owe(key, record, words)
        outcomes[event.rank] = (event, record.id)
        if len(outcomes) > 1 and outcomes.keys() >= self._ranks:
            self.meet(key, record)
        while len(self._outcomes) > _KEPT_PHASES:
            del self._outcomes[next(iter(self._outcomes))]
        while len(self._rounds) > _KEPT_PHASES * len(self._ranks):
            del self._rounds[next(iter(self._rounds))]


LIVENESS_RULES: tuple[type[Rule], ...] = (
    NewestVersionReached,
    NoEngineStaysPaused,
    SyncEnds,
    HeartbeatsProveProgress,
    NewEngineServes,
    FailureReachesEveryRank,
    *PROGRESS_RULES,
)
