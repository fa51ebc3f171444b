"""Rules about versions and terms: which numbers may exist, where, and who may move them."""

from __future__ import annotations

from grpo_lab.check.naming import Weights, weights_name
from grpo_lab.check.pause_rules import PAUSE_RULES
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.check.sync_rules import SYNC_RULES
from grpo_lab.check.term_rules import TERM_RULES
from grpo_lab.check.weights_rules import WEIGHTS_RULES
from grpo_lab.events import (
    EngineAdmitted,
    EngineFenced,
    EnginePaused,
    EngineProved,
    EngineResumed,
    GroupDropped,
    MemberDied,
    MemberStarted,
    ModelStep,
    Record,
    RequestAdmitted,
    SampleCompleted,
    SampleDispatched,
    StateChanged,
    StepPlanned,
    SyncBegan,
    TermBegan,
    VersionAnnounced,
    VersionCommitted,
    WeightsActivated,
    WeightsLoaded,
    WeightsPublished,
)


class CommittedVersionRises(Rule):
    """A term goes on from its base version; each commit adds one, and nobody claims a version without it.

    Only a checkpoint, or a start from nothing (version 0, no optimizer step), may set the base back.
    """

    id = "S1"
    words = "the committed version rises by exactly 1 and moves nowhere but at a commit"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._term = 0
        self._committed: int | None = None
        self._proof = ""
        self._commits = 0

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, TermBegan)
        from_nothing = event.base_version == 0 and event.optimizer_step == 0
        if self._commits and not event.checkpoint and not from_nothing:
            self.count()
            if event.base_version != self._committed:
                self.violate(
                    f"term {event.term} goes on from version {event.base_version} at optimizer step "
                    f"{event.optimizer_step}, without a checkpoint, but {self._committed} is committed",
                    record,
                    self._proof,
                )
        self._term, self._committed, self._proof = event.term, event.base_version, record.id

    @on(VersionCommitted)
    def version_committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        if event.term < self._term:
            return
        if self._committed is not None and event.term == self._term:
            self.count()
            if event.version != self._committed + 1:
                self.violate(
                    f"{record.actor} committed version {event.version} of term {event.term}, but the one "
                    f"before is {self._committed}: expected {self._committed + 1}",
                    record,
                    self._proof,
                )
        self._commits += 1
        self._term, self._committed, self._proof = event.term, event.version, record.id

    @on(VersionAnnounced, StepPlanned)
    def claimed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (VersionAnnounced, StepPlanned))
        if not self._commits or event.term != self._term:
            return
        self.count()
        if event.version != self._committed:
            what = (
                "told the worker"
                if isinstance(event, VersionAnnounced)
                else "planned an optimizer step under"
            )
            self.violate(
                f"{record.actor} {what} version {event.version} in term {event.term}, but the committed "
                f"version is {self._committed}",
                record,
                self._proof,
            )


class ActiveVersionNeverFalls(Rule):
    """A restarted engine holds nothing that counts: it takes rollouts, and decodes, only after an activation.

    Engines without events count as activated when they are proved, and as serving when a sample that was
    dispatched to them since their restart comes back while they are not.
    """

    id = "S2"
    words = (
        "an engine's active version never falls, and a restarted engine serves nothing until it is activated"
    )
    capability = "events"
    weaker = "by what was proved of it and completed by it"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._engines = set(context.declared.capabilities)
        self._active: dict[str, dict[int, tuple[Weights, str]]] = {}  # engine -> shard
        self._blank: dict[str, str] = {}  # engines without activated weights since their death or restart
        self._asked: dict[str, str] = {}  # of those: a rollout request came
        self._samples: dict[str, str] = {}  # sample that was sent to a blank engine without events

    @on(WeightsActivated)
    def activated(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsActivated)
        shards = self._active.setdefault(event.engine, {})
        self._engines.add(event.engine)
        weights = (event.term, event.version)
        if event.shard in shards:
            before, proof = shards[event.shard]
            self.count()
            if weights < before:
                self.violate(
                    f"{event.engine} activated {weights_name(weights)} after {weights_name(before)}",
                    record,
                    proof,
                )
        shards[event.shard] = (weights, record.id)
        self._filled(event.engine)

    @on(MemberStarted)
    def started(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberStarted)
        again = event.incarnation > 1 or event.member in self._active or event.member in self._blank
        if event.role == "engine":
            self._engines.add(event.member)
        if again:
            self._emptied(event.member, record)

    @on(MemberDied)
    def died(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberDied)
        self._emptied(event.member, record)

    @on(RequestAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestAdmitted)
        if event.engine in self._blank and event.request_kind == "rollout":
            self._asked.setdefault(event.engine, record.id)

    @on(ModelStep)
    def stepped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ModelStep)
        if event.engine in self._asked:
            self._served(event.engine, f"ran model step {event.first_step} for rollouts", record)

    @on(EngineProved)
    def proved(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineProved)
        if event.outcome != "fails" and not self.context.engine_can(event.engine, "events"):
            self._filled(event.engine)

    @on(SampleDispatched)
    def dispatched(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleDispatched)
        if event.engine in self._blank and not self.context.engine_can(event.engine, "events"):
            self._samples[event.sample] = event.engine

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        engine = self._samples.pop(event.sample, None) if self._samples else None
        if engine is not None and engine == event.engine and event.tokens and engine in self._blank:
            self._served(engine, f"generated {event.tokens} tokens of sample {event.sample}", record)

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        for sample in event.samples if self._samples else ():
            self._samples.pop(sample, None)

    def _emptied(self, engine: str, record: Record) -> None:
        if engine in self._engines:
            self._active.pop(engine, None)
            self._asked.pop(engine, None)
            self._blank[engine] = record.id

    def _filled(self, engine: str) -> None:
        self._asked.pop(engine, None)
        if self._blank.pop(engine, None) is not None:
            self.count()

    def _served(self, engine: str, what: str, record: Record) -> None:
        self.count()
        proof = self._blank.pop(engine)
        request = self._asked.pop(engine, proof)
        self.violate(
            f"{engine} {what} although no weights were activated since its restart", record, proof, request
        )


class LoadedPublishedCommitted(Rule):
    """Loaded <= published always. Who serves has the committed version active. Scope rolling: or the next
    one while its sync is in flight, so the active versions of engines in service differ by at most one.

    Probation is exempt (canaries are asked then), and so is an engine that is fenced or paused.
    """

    id = "S3"
    words = "an engine loads only what was published, and serves rollouts only under the committed version"
    parameters = ("scope",)
    capability = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rolling = context.parameter("scope") == "rolling"
        self._published: tuple[Weights, str] = ((0, 0), "")
        self._committed: tuple[Weights, str] | None = None
        self._active: dict[str, tuple[Weights, str]] = {}
        self._paused: set[str] = set()
        self._fenced: set[str] = set()
        self._fenced_before: set[str] = set()  # of those, by an earlier term
        self._judged: dict[str, tuple[Weights, Weights]] = {}
        self._probation = False
        self._syncing = False

    @on(WeightsPublished)
    def published(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsPublished)
        self._published = max(self._published, ((event.term, event.version), record.id))

    @on(WeightsLoaded)
    def loaded(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsLoaded)
        self.count()
        weights = (event.term, event.version)
        newest, proof = self._published
        if weights > newest:
            self.violate(
                f"{event.engine} loaded {weights_name(weights)}, but the newest published version is "
                f"{weights_name(newest) if proof else 'none'}",
                record,
                *((proof,) if proof else ()),
            )

    @on(VersionCommitted)
    def version_committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        self._committed = ((event.term, event.version), record.id)
        self._fenced.difference_update(event.members)
        self._fenced_before.clear()

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        self._fenced_before.update(self._fenced)  # until the new term's full sync has taken them in again

    @on(StateChanged)
    def state_changed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, StateChanged)
        self._probation = event.after == "probation"
        if event.before != "disconnected" and event.after in ("running", "fenced"):
            self._syncing = False

    @on(SyncBegan)
    def sync_began(self, record: Record) -> None:
        self._syncing = True  # until it ends: a dead coordinator's, until a sync of its successor does

    @on(WeightsActivated)
    def activated(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsActivated)
        self._active[event.engine] = ((event.term, event.version), record.id)
        if self._rolling:
            self._compare_spread(record)

    @on(EnginePaused)
    def paused(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EnginePaused)
        self._paused.add(event.engine)

    @on(EngineFenced)
    def fenced(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced)
        self._fenced.add(event.engine)

    @on(EngineAdmitted)
    def taken_in(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineAdmitted)
        if event.engine not in self._fenced_before:
            self._fenced.discard(event.engine)

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._active.pop(event.member, None)
        self._judged.pop(event.member, None)
        self._fenced.discard(event.member)
        self._paused.discard(event.member)

    @on(EngineResumed)
    def resumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineResumed)
        self._paused.discard(event.engine)
        self._judge(event.engine, "was resumed", record)

    @on(ModelStep)
    def stepped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ModelStep)
        self._judge(event.engine, "ran a model step", record)

    def _judge(self, engine: str, what: str, record: Record) -> None:
        held = self._active.get(engine)
        if held is None or self._committed is None or self._probation:
            return
        if engine in self._paused or engine in self._fenced:
            return
        active, committed = held[0], self._committed[0]
        if self._judged.get(engine) == (active, committed):
            return
        if self._rolling and self._syncing and active[0] >= committed[0] and active[1] == committed[1] + 1:
            return
        self._judged[engine] = (active, committed)
        self.count()
        if active != committed:
            self.violate(
                f"{engine} {what} under {weights_name(active)}, but {weights_name(committed)} is committed",
                record,
                held[1],
                self._committed[1],
            )

    def _compare_spread(self, record: Record) -> None:
        serving = {name: held for name, held in self._active.items() if name not in self._fenced}
        if len(serving) < 2:
            return
        self.count()
        low = min(serving, key=lambda name: serving[name][0])
        high = max(serving, key=lambda name: serving[name][0])
        (low_term, low_version), (high_term, high_version) = serving[low][0], serving[high][0]
        if low_term == high_term and high_version - low_version > 1:
            self.violate(
                f"{high} has version {high_version} active and {low} has {low_version}: more than 1 apart",
                record,
                serving[low][1],
                serving[high][1],
            )


VERSION_RULES: tuple[type[Rule], ...] = (
    *PAUSE_RULES,
    *SYNC_RULES,
    *WEIGHTS_RULES,
    CommittedVersionRises,
    ActiveVersionNeverFalls,
    LoadedPublishedCommitted,
    *TERM_RULES,
)
