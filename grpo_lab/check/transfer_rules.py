"""Rules about one transfer of weights: agreed beforehand, whole on arrival, applied once, given back."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_lab.check.membership_rules import MEMBERSHIP_RULES
from grpo_lab.check.naming import Identity, Weights, some, sync_name
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.check.source_rules import SOURCE_RULES
from grpo_lab.events import (
    BucketReceived,
    EngineAcknowledged,
    GroupConsumed,
    GroupDropped,
    HandshakeCompared,
    MemberDied,
    MemberStarted,
    Record,
    SampleCompleted,
    SampleDispatched,
    UpdateStarted,
    WeightsLoaded,
    WeightsPublished,
)

_RECENT_VERSIONS = 8
_RECENT_SYNCS = 32


class HandshakeFirst(Rule):
    """Both sides' geometry is compared before weights move; a difference means that none do.

    The engine's ``WeightsLoaded``, or its acknowledged ``finish`` where it has no events, is the success.
    """

    id = "H1"
    words = "a geometry or manifest mismatch is refused at the handshake, and nothing moves without one"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._compared: dict[str, tuple[str, str]] = {}  # engine -> difference, event

    @on(HandshakeCompared)
    def compared(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, HandshakeCompared)
        self.count()
        if event.ours and event.theirs and event.ours != event.theirs and not event.difference:
            self.violate(
                f"the handshake with {event.engine} named no difference, but our plan is {event.ours} and "
                f"theirs is {event.theirs}",
                record,
            )
        self._compared[event.engine] = (event.difference, record.id)

    @on(WeightsLoaded)
    def loaded(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsLoaded)
        self._require(event.engine, (event.term, event.version, event.attempt), record)

    @on(EngineAcknowledged)
    def acknowledged(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineAcknowledged)
        if event.call == "finish" and not self.context.engine_can(event.engine, "events"):
            self._require(event.engine, (event.term, event.version, event.attempt), record)

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._compared.pop(event.member, None)

    def _require(self, engine: str, identity: Identity, record: Record) -> None:
        self.count()
        difference, *proofs = self._compared.get(engine, (None,))
        if difference is None:
            self.violate(f"{engine} took {sync_name(identity)} without any handshake", record)
        elif difference:
            self.violate(
                f"{engine} took {sync_name(identity)} although its handshake had named a difference: "
                f"{difference}",
                record,
                *proofs,
            )


@dataclass(slots=True)
class _Arrival:
    """What has come to an engine since its update began. ``loaded``: the event that ended it."""

    identity: Identity
    accepted: dict[int, int] = field(default_factory=dict)  # bucket -> bytes
    rejected: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    loaded: str = ""


class WholeManifestLoaded(Rule):
    """An engine loads a version when exactly the buckets of its manifest have come, each once."""

    id = "S9"
    words = "an engine loads only when every bucket of the manifest is there, each once and of that version"
    capability = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._manifests: dict[Weights, tuple[tuple[int, ...], str]] = {}
        self._arrivals: dict[str, _Arrival] = {}

    @on(WeightsPublished)
    def published(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsPublished)
        self._manifests[event.term, event.version] = (event.bucket_nbytes, record.id)
        while len(self._manifests) > _RECENT_VERSIONS:
            del self._manifests[min(self._manifests)]

    @on(UpdateStarted)
    def started(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, UpdateStarted)
        self._arrivals[event.engine] = _Arrival((event.term, event.version, event.attempt))

    @on(BucketReceived)
    def received(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, BucketReceived)
        identity = (event.term, event.version, event.attempt)
        arrival = self._arrivals.get(event.engine)
        if arrival is None:
            arrival = self._arrivals[event.engine] = _Arrival(identity)
        if arrival.loaded and identity == arrival.identity:
            self.violate(
                f"bucket {event.bucket} of {sync_name(identity)} landed on {event.engine} after it had "
                "loaded that",
                record,
                arrival.loaded,
            )
        elif not event.accepted:
            arrival.rejected.add(event.bucket)
        elif identity != arrival.identity:
            arrival.problems.append(f"bucket {event.bucket} was of {sync_name(identity)}")
        elif event.bucket in arrival.accepted:
            arrival.problems.append(f"bucket {event.bucket} was taken twice")
        else:
            arrival.accepted[event.bucket] = event.nbytes

    @on(WeightsLoaded)
    def loaded(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsLoaded)
        identity = (event.term, event.version, event.attempt)
        arrival = self._arrivals.get(event.engine)
        if arrival is None or arrival.loaded:
            arrival = _Arrival(identity)
        manifest = self._manifests.get((event.term, event.version))
        if manifest is not None:
            self.count()
            sizes, proof = manifest
            problems = _problems(arrival, identity, sizes)
            if problems:
                self.violate(
                    f"{event.engine} loaded {sync_name(identity)} of {len(sizes)} buckets, but "
                    f"{'; '.join(problems)}",
                    record,
                    proof,
                )
        self._arrivals[event.engine] = _Arrival(identity, loaded=record.id)

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._arrivals.pop(event.member, None)


def _problems(arrival: _Arrival, identity: Identity, sizes: tuple[int, ...]) -> list[str]:
    problems = list(arrival.problems)
    if arrival.identity != identity:
        problems.append(f"the open update was {sync_name(arrival.identity)}")
    missing = [bucket for bucket in range(len(sizes)) if bucket not in arrival.accepted]
    refused = arrival.rejected.intersection(missing)
    if refused:
        problems.append(f"buckets {some(list(refused))} had been rejected")
    absent = [bucket for bucket in missing if bucket not in refused]
    if absent:
        problems.append(f"buckets {some(absent)} never came")
    for bucket, nbytes in arrival.accepted.items():
        if bucket >= len(sizes):
            problems.append(f"bucket {bucket} is not of the manifest")
        elif nbytes != sizes[bucket]:
            problems.append(f"bucket {bucket} had {nbytes} bytes instead of {sizes[bucket]}")
    return problems


class AppliedOnce(Rule):
    """The identity of a sync names one application on an engine, and a sample has one completion, however
    often their clients ask. Counts only where one was asked for again.
    """

    id = "S14"
    words = "a retried request applies at most once"
    capability = "events"
    weaker = "completions only"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._applied: dict[str, dict[Identity, str]] = {}
        self._asked: dict[str, dict[str, int]] = {}  # group -> sample -> times it was sent
        self._completed: dict[str, dict[str, str]] = {}  # group -> sample -> event

    @on(SampleDispatched)
    def dispatched(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleDispatched)
        asked = self._asked.setdefault(event.group, {})
        asked[event.sample] = asked.get(event.sample, 0) + 1

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        completed = self._completed.setdefault(event.group, {})
        if self._asked.get(event.group, {}).get(event.sample, 0) > 1:
            self.count()
        if event.sample in completed:
            self.violate(
                f"sample {event.sample} was completed twice, now by {event.engine}",
                record,
                completed[event.sample],
            )
        completed[event.sample] = record.id

    @on(GroupConsumed, GroupDropped)
    def group_ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupConsumed | GroupDropped)
        self._asked.pop(event.group, None)
        self._completed.pop(event.group, None)

    @on(WeightsLoaded)
    def loaded(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsLoaded)
        applied = self._applied.setdefault(event.engine, {})
        identity = (event.term, event.version, event.attempt)
        if identity[2]:  # 0: the engine knows no identities
            if applied:
                self.count()
            if identity in applied:
                self.violate(f"{event.engine} applied {sync_name(identity)} twice", record, applied[identity])
            applied[identity] = record.id
            while len(applied) > _RECENT_SYNCS:
                del applied[next(iter(applied))]

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._applied.pop(event.member, None)


TRANSFER_RULES: tuple[type[Rule], ...] = (
    HandshakeFirst,
    WholeManifestLoaded,
    AppliedOnce,
    *SOURCE_RULES,
    *MEMBERSHIP_RULES,
)
