"""Rules about pauses: nothing decodes in them, nothing is lost in them, and they end."""

from __future__ import annotations

from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    EngineAcknowledged,
    EngineAdmitted,
    EngineFailed,
    EngineFenced,
    EnginePaused,
    EngineResumed,
    MemberDied,
    MemberStarted,
    MemberStopped,
    ModelStep,
    Record,
    RequestAdmitted,
    RequestFinished,
    RunEnded,
    StateChanged,
    SyncBegan,
    SyncEnded,
    TermBegan,
)

_AGAIN = " (again)"


class PausesHold(Rule):
    """``EnginePaused`` says that no step runs any more, and how many requests the engine still holds.

    Those are the ones that it admitted and has not returned: with ``keep`` all of them, with ``abort`` none,
    each returned once. During a sync the mode is the one that the sync began with.
    """

    id = "S16"
    words = "nothing decodes while paused; a keep loses no request, an abort returns each exactly once"
    capability = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._held: dict[str, dict[str, str]] = {}  # engine -> request it has not returned -> admission
        self._paused: dict[str, str] = {}
        self._asked: tuple[str, str] | None = None  # mode of the sync in flight
        self._mode: tuple[str, str] | None = None  # the same while the coordinator pauses
        self._members: tuple[str, ...] = ()
        self._frozen: dict[str, dict[str, str]] = {}  # engine -> requests that a keep froze

    @on(SyncBegan)
    def sync_began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncBegan)
        self._asked = self._mode = (event.pause_mode, record.id)
        self._members = event.members

    @on(StateChanged)
    def state_changed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, StateChanged)
        self._mode = self._asked if event.after in ("pausing", "paused") else None

    @on(SyncEnded)
    def sync_ended(self, record: Record) -> None:
        self._asked = self._mode = None

    @on(RequestAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestAdmitted)
        held = self._held.setdefault(event.engine, {})
        name = event.request
        while name in held:  # a retry whose first try is not over yet
            name += _AGAIN
        held[name] = record.id

    @on(RequestFinished)
    def finished(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestFinished)
        held = self._held.get(event.engine, {})
        name = event.request
        while name + _AGAIN in held:
            name += _AGAIN
        if held.pop(name, None) is None:
            self.count()
            self.violate(f"{event.engine} returned request {event.request}, which it does not hold", record)

    @on(ModelStep)
    def stepped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ModelStep)
        if event.engine in self._paused:
            self.count()
            self.violate(
                f"{event.engine} ran model steps {event.first_step} to {event.last_step} while it was paused",
                record,
                self._paused[event.engine],
            )

    @on(EnginePaused)
    def paused(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EnginePaused)
        held = self._held.setdefault(event.engine, {})
        self.count()
        self._require_mode(event, record)
        if event.mode == "abort":
            self._require_returned(event, held, record)
        elif event.running >= 0 and event.waiting >= 0 and event.running + event.waiting != len(held):
            lost = len(held) - event.running - event.waiting
            what = f"{lost} are lost" if lost > 0 else f"{-lost} came from nowhere"
            self.violate(
                f"{event.engine} paused with {event.running} running and {event.waiting} waiting requests, "
                f"but {len(held)} were admitted and not returned: {what} ({_first(held)})",
                record,
                *list(held.values())[:1],
            )
        if event.mode == "keep":
            self._frozen[event.engine] = dict(held)
        self._paused[event.engine] = record.id

    @on(EngineResumed)
    def resumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineResumed)
        self._paused.pop(event.engine, None)

    @on(EngineFenced)
    def fenced(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced)
        self._frozen.pop(event.engine, None)
        self._members = tuple(name for name in self._members if name != event.engine)  # stopped in any mode

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._held.pop(event.member, None)
        self._frozen.pop(event.member, None)
        self._paused.pop(event.member, None)

    @on(RunEnded)
    def run_ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RunEnded)
        if event.outcome != "clean":
            return
        for engine, frozen in sorted(self._frozen.items()):
            held = self._held.get(engine, {})
            lost = {request: proof for request, proof in frozen.items() if held.get(request) == proof}
            self.count()
            if lost:
                self.violate(
                    f"{engine} never returned {len(lost)} requests that a pause(keep) froze ({_first(lost)})",
                    record,
                    *list(lost.values())[:1],
                )

    def _require_mode(self, event: EnginePaused, record: Record) -> None:
        if self._mode is None or event.engine not in self._members:
            return
        wanted, proof = self._mode
        if event.mode != wanted:
            self.violate(
                f"{event.engine} paused with mode {event.mode}, but the sync asked for {wanted}",
                record,
                proof,
            )

    def _require_returned(self, event: EnginePaused, held: dict[str, str], record: Record) -> None:
        if held:
            what = f"paused with mode abort and still holds {len(held)} requests ({_first(held)})"
            self.violate(f"{event.engine} {what}", record, *list(held.values())[:1])
        twice = len(event.aborted) - len(set(event.aborted))
        if twice:
            self.violate(f"{event.engine} says that it aborted {twice} requests more than once", record)


def _first(requests: dict[str, str]) -> str:
    names = list(requests)[:4]
    return ", ".join(names) + (", ..." if len(requests) > len(names) else "")


class PausesEnd(Rule):
    """When the coordinator is at rest again, or the engine is stopped, nobody is paused who was not fenced.

    For engines without events the acknowledged calls stand for the pauses. A dead coordinator owes nothing:
    its successor's first sync does. A pause that nobody answered was given up, but may come yet: when it hits
    an engine that was just asked to resume, and said yes, nobody can know. The next sync ends it, L2 says how
    soon.
    """

    id = "S32"
    words = "every pause ends in a resume or a declared FENCED state"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._paused: dict[str, str] = {}
        self._fenced: set[str] = set()
        self._given_up: set[str] = set()  # engines that did not answer a pause
        self._said_yes: set[str] = set()  # to the resume of the newest sync
        self._coordinator = ""

    @on(EnginePaused)
    def paused(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EnginePaused)
        self._pause(event.engine, record)

    @on(EngineResumed)
    def resumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineResumed)
        self._end(event.engine)

    @on(EngineFailed)
    def unanswered(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFailed)
        if event.call == "pause" and event.status == 0:
            self._given_up.add(event.engine)

    @on(EngineAcknowledged)
    def acknowledged(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineAcknowledged)
        if event.call == "resume":
            self._said_yes.add(event.engine)
        if not self.context.engine_can(event.engine, "events"):
            if event.call == "pause":
                self._pause(event.engine, record)
            elif event.call == "resume":
                self._end(event.engine)

    @on(EngineFenced)
    def fenced(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced)
        self._fenced.add(event.engine)
        self._end(event.engine)

    @on(EngineAdmitted)
    def taken_in(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineAdmitted)
        self._fenced.discard(event.engine)

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._fenced.discard(event.member)
        self._paused.pop(event.member, None)
        if event.member == self._coordinator:
            self._paused.clear()

    @on(MemberStopped)
    def stopped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberStopped)
        self._require_running({event.member}, "was stopped", record)
        self._fenced.discard(event.member)

    @on(SyncBegan)
    def sync_began(self, record: Record) -> None:
        self._coordinator = record.actor
        self._said_yes.clear()

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        self._fenced.clear()  # the new term's full sync takes them in again

    @on(StateChanged)
    def state_changed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, StateChanged)
        if event.after == "running" and event.before != "disconnected":
            self._require_running(set(self._paused), "is still paused after its sync", record)

    @on(SyncEnded)
    def sync_ended(self, record: Record) -> None:
        self._require_running(set(self._paused), "is still paused after its sync", record)

    @on(RunEnded)
    def run_ended(self, record: Record) -> None:
        self._require_running(set(self._paused), "is still paused at the end of the run", record)

    def _pause(self, engine: str, record: Record) -> None:
        if engine not in self._fenced:
            self._paused.setdefault(engine, record.id)

    def _end(self, engine: str) -> None:
        if self._paused.pop(engine, None) is not None:
            self.count()

    def _require_running(self, engines: set[str], what: str, record: Record) -> None:
        for engine in sorted(engines & self._paused.keys()):
            self.count()
            proof = self._paused.pop(engine)
            if engine in self._given_up and engine in self._said_yes:
                self._given_up.discard(engine)
                continue
            self.violate(f"{engine} {what} (paused, neither resumed nor fenced)", record, proof)


PAUSE_RULES: tuple[type[Rule], ...] = (PausesHold, PausesEnd)
