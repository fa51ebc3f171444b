"""Rules about one weight sync: how it begins, fails, commits, and lets the engines go."""

from __future__ import annotations

from grpo_lab.check.naming import Identity, Weights, sync_name, weights_name
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    EngineAcknowledged,
    EngineAdmitted,
    EngineFailed,
    EngineFenced,
    EngineProved,
    EngineResumed,
    MemberDied,
    MemberStarted,
    ModelStep,
    Record,
    StateChanged,
    SyncAborted,
    SyncBegan,
    SyncEnded,
    TermBegan,
    UpdateFailed,
    UpdateStarted,
    VersionCommitted,
    ViewChanged,
    WeightsActivated,
    WeightsLoaded,
    WeightWriteEnded,
)

_AT_REST = ("running", "fenced", "disconnected")  # coordinator states outside a sync


class CommitNeedsTheView(Rule):
    """A commit names the members of the current view; each has loaded the version (as its own events say,
    where it has any) and proved it, in that run of its process that the coordinator took in: nobody can know
    that an engine dies and restarts after its proof. An engine that is not named serves nothing until it
    restarts, and a fenced one is taken in again only after that, or when it never held anything.

    Where no proof is ever told of, an engine that was not declared (another trainer's log) cannot be judged.
    """

    id = "S11"
    words = "a commit needs every member of the current view; who did not prove it is fenced before it serves"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._view: tuple[int, tuple[str, ...], str] | None = None
        self._loaded: dict[str, tuple[Weights, str]] = {}
        self._proved: dict[str, tuple[Weights, str, str]] = {}  # engine -> weights, outcome, event
        self._outside: dict[str, str] = {}  # engine that was once in a view -> commit that left it out
        self._fenced: dict[str, tuple[str, str]] = {}  # engine -> start id, event
        self._starts: dict[str, str] = {}  # engine -> start id of the run that was taken in
        self._filled: set[str] = set()  # engines that were proved of something in that run
        self._met: set[str] = set()
        self._unanswered: set[str] = set()  # engines whose last resume got no answer
        self._proofs_told = False

    @on(ViewChanged)
    def view_changed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ViewChanged)
        self._view = (event.view, event.members, record.id)
        self._met.update(event.members)

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        self._met.clear()  # the new term's full sync takes in again who was fenced or left out
        self._starts.clear()
        self._fenced.clear()
        self._outside.clear()

    @on(SyncBegan)
    def sync_began(self, record: Record) -> None:
        # An earlier sync that was given up may have had the same version, with other weights.
        self._loaded.clear()
        self._proved.clear()

    @on(WeightsLoaded)
    def loaded(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsLoaded)
        self._loaded[event.engine] = ((event.term, event.version), record.id)

    @on(EngineProved)
    def proved(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineProved)
        self._proofs_told = True
        self._filled.add(event.engine)
        self._proved[event.engine] = ((event.term, event.version), event.outcome, record.id)

    @on(VersionCommitted)
    def committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        weights = (event.term, event.version)
        self.count()
        if self._view is not None:
            view, members, proof = self._view
            if (event.view, set(event.members)) != (view, set(members)):
                self.violate(
                    f"view {event.view} ({', '.join(event.members)}) committed {weights_name(weights)}, but "
                    f"the current view is {view} ({', '.join(members)})",
                    record,
                    proof,
                )
        for engine in event.members:
            self._require_proof(engine, weights, record)
        self._outside = dict.fromkeys(self._met.difference(event.members), record.id)

    @on(EngineFenced)
    def fenced(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced)
        self._fenced[event.engine] = (event.start, record.id)

    @on(EngineFailed, EngineAcknowledged)
    def asked_to_resume(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (EngineFailed, EngineAcknowledged))
        if event.call == "resume" and event.engine not in self._fenced:
            failed = isinstance(event, EngineFailed)
            (self._unanswered.add if failed else self._unanswered.discard)(event.engine)

    @on(EngineAdmitted)
    def taken_in(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineAdmitted)
        engine = event.engine
        self._outside.pop(engine, None)  # the next commit is to name it
        fenced = self._fenced.pop(engine, None)
        if fenced is not None:
            self.count()
            start, proof = fenced
            if start == event.start and engine in self._filled:
                self.violate(
                    f"{engine} was taken in again although it has not restarted since it was fenced",
                    record,
                    proof,
                )
        if self._starts.get(engine) != event.start:
            self._loaded.pop(engine, None)
            self._proved.pop(engine, None)
            self._filled.discard(engine)
        self._starts[engine] = event.start

    @on(EngineResumed)
    def resumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineResumed)
        _, proof = self._fenced.get(event.engine, ("", ""))
        if proof and event.engine in self._unanswered:
            # It was asked before it was fenced, and the request took its time: nobody can call that back.
            self._unanswered.discard(event.engine)
        elif proof:
            self.count()
            self.violate(f"{event.engine} was resumed although it had been fenced", record, proof)
        else:
            self._judge_outsider(event.engine, "was resumed", record)

    @on(ModelStep)
    def stepped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ModelStep)
        if self._outside and event.engine not in self._fenced:
            self._judge_outsider(event.engine, f"ran model step {event.first_step}", record)

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        if isinstance(event, MemberStarted) and event.member not in self._starts:
            self._loaded.pop(event.member, None)
            self._proved.pop(event.member, None)
        self._fenced.pop(event.member, None)
        self._unanswered.discard(event.member)
        self._outside.pop(event.member, None)
        self._met.discard(event.member)

    def _require_proof(self, engine: str, weights: Weights, record: Record) -> None:
        name = weights_name(weights)
        if self.context.engine_can(engine, "events"):
            held, *proofs = self._loaded.get(engine, (None,))
            if held != weights:
                what = f"which has loaded {weights_name(held)}"
                self.violate(f"{name} was committed with {engine}, {what}", record, *proofs)
                return
        if not self._proofs_told and engine not in self.context.declared.capabilities:
            return
        proved, outcome, *proofs = self._proved.get(engine, (None, ""))
        if proved != weights or outcome == "fails":
            what = "its proof failed" if proved == weights else f"it has proved {weights_name(proved)}"
            self.violate(f"{name} was committed with {engine}, but {what}", record, *proofs)

    def _judge_outsider(self, engine: str, what: str, record: Record) -> None:
        commit = self._outside.pop(engine, None)
        if commit is not None:
            self.count()
            self.violate(
                f"{engine} {what} although the newest commit went without it, and it was not fenced",
                record,
                commit,
            )


class OneSyncInFlight(Rule):
    """A coordinator begins a sync only at rest, an engine an update only when none is open."""

    id = "S13"
    words = "at most one sync is in flight"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._sync: tuple[Identity, str] | None = None
        self._updates: dict[str, tuple[Identity, str]] = {}

    @on(SyncBegan)
    def began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncBegan)
        self.count()
        identity = (event.term, event.version, event.attempt)
        if self._sync is not None:
            before, proof = self._sync
            self.violate(
                f"{record.actor} began sync {sync_name(identity)} while {sync_name(before)} was in flight",
                record,
                proof,
            )
        self._sync = (identity, record.id)

    @on(SyncEnded, TermBegan)
    def ended(self, record: Record) -> None:
        self._sync = None

    @on(SyncAborted)
    def aborted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncAborted)
        if event.final:
            self._sync = None

    @on(StateChanged)
    def state_changed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, StateChanged)
        if event.after in _AT_REST:
            self._sync = None

    @on(UpdateStarted)
    def started(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, UpdateStarted)
        self.count()
        identity = (event.term, event.version, event.attempt)
        before, proof = self._updates.get(event.engine, (identity, ""))
        if before != identity:
            self.violate(
                f"{event.engine} started update {sync_name(identity)} while {sync_name(before)} was open",
                record,
                proof,
            )
        self._updates[event.engine] = (identity, record.id)

    @on(WeightsLoaded, UpdateFailed)
    def closed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (WeightsLoaded, UpdateFailed))
        self._updates.pop(event.engine, None)

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._updates.pop(event.member, None)


class AbortLeavesPreviousVersion(Rule):
    """After a failure an engine that serves holds the previous version, whole. A torn one serves nothing
    until a whole version is written and activated; nobody serves a version whose sync was given up.

    Where `scope` is declared as rolling, an engine that is ahead runs when the sync is given up, and has to
    be fenced before the coordinator goes on.
    """

    id = "S15"
    words = "an aborted sync leaves exactly the previous version, or the engine out of service"
    capability = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rolling = context.declared.parameters.get("scope") == "rolling"
        self._active: dict[str, tuple[Weights, str]] = {}
        self._torn: dict[str, tuple[str, str]] = {}  # engine -> what was left half-done, event
        self._half_written: set[str] = set()  # of those: no whole write has followed
        self._aborted: tuple[Weights, str] | None = None
        self._to_judge: set[str] = set()  # engines that have not served since the abort
        self._fenced: set[str] = set()

    @on(WeightsActivated)
    def activated(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsActivated)
        self._active[event.engine] = ((event.term, event.version), record.id)
        if event.engine not in self._half_written and self._torn.pop(event.engine, None) is not None:
            self.count()

    @on(UpdateFailed)
    def update_failed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, UpdateFailed)
        if event.weights == "torn":
            identity = sync_name((event.term, event.version, event.attempt))
            self._torn[event.engine] = (f"its update {identity} failed half-way", record.id)

    @on(WeightWriteEnded)
    def write_ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightWriteEnded)
        if not event.complete:
            name = weights_name((event.term, event.version))
            self._torn[event.engine] = (f"the write of {name} ended incomplete", record.id)
            self._half_written.add(event.engine)
        else:
            self._half_written.discard(event.engine)

    @on(SyncAborted)
    def aborted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncAborted)
        if event.final:
            self._aborted = ((event.term, event.version), record.id)
            if not self._rolling:
                self._to_judge = set(self._active) - self._fenced

    @on(StateChanged)
    def state_changed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, StateChanged)
        if self._rolling and self._aborted is not None and event.after in ("resuming", *_AT_REST):
            self._to_judge = set(self._active) - self._fenced

    @on(SyncBegan, VersionCommitted)
    def moved_on(self, record: Record) -> None:
        self._aborted = None
        self._to_judge.clear()

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        self._fenced.clear()

    @on(EngineFenced)
    def fenced(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced)
        self._fenced.add(event.engine)
        self._to_judge.discard(event.engine)

    @on(EngineAdmitted)
    def taken_in(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineAdmitted)
        self._fenced.discard(event.engine)

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._active.pop(event.member, None)
        self._torn.pop(event.member, None)
        self._half_written.discard(event.member)
        self._to_judge.discard(event.member)
        self._fenced.discard(event.member)

    @on(EngineResumed)
    def resumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineResumed)
        self._judge(event.engine, "was resumed", record)

    @on(ModelStep)
    def stepped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ModelStep)
        if self._torn or self._to_judge:
            self._judge(event.engine, f"ran model step {event.first_step}", record)

    def _judge(self, engine: str, what: str, record: Record) -> None:
        if engine in self._torn:
            self.count()
            why, proof = self._torn.pop(engine)
            self.violate(f"{engine} {what} although {why}: its weights are torn", record, proof)
        if engine not in self._to_judge or self._aborted is None:
            return
        self._to_judge.discard(engine)
        self.count()
        given_up, proof = self._aborted
        active, activation = self._active[engine]
        if active == given_up:
            self.violate(
                f"{engine} {what} with {weights_name(active)} active, but its sync was aborted",
                record,
                activation,
                proof,
            )


SYNC_RULES: tuple[type[Rule], ...] = (
    CommitNeedsTheView,
    OneSyncInFlight,
    AbortLeavesPreviousVersion,
)
