"""S6: one (term, version) is one set of weights, on every engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_lab.check.naming import Weights, weights_name
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    BucketReceived,
    EngineAcknowledged,
    EngineFenced,
    EngineProved,
    MemberDied,
    MemberStarted,
    Record,
    SyncAborted,
    SyncEnded,
    UpdateStarted,
    VersionCommitted,
    WeightsActivated,
    WeightsLoaded,
    WeightsPublished,
)

_RECENT_VERSIONS = 8  # what a late engine may still load; older ones are forgotten
_MIN_SEPARATION = 5  # tolerances between two versions' canaries, below which holding proves nothing


@dataclass(slots=True)
class _Version:
    hashes: tuple[int, ...] = ()  # of the manifest's buckets
    published: str = ""
    held: dict[str, tuple[str, str]] = field(default_factory=dict)  # engine -> weights_hash, event


class SameVersionSameWeights(Rule):
    """Where bytes land their hashes are the manifest's, and engines that hash a version agree about it.

    A retry publishes the same weights. A canary that fails is followed neither by a commit with that engine
    nor by its service. A canary's verdict follows from its numbers: it fails beyond the tolerance, and holds
    only if the version before would have been 5 tolerances away. A version whose sync was given up may be
    published anew: who had loaded it is fenced (S15).
    """

    id = "S6"
    words = "one version is the same weights on every engine: equal hashes, or a canary that does not fail"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._versions: dict[Weights, _Version] = {}
        self._received: dict[str, dict[int, tuple[int, str]]] = {}  # engine -> bucket -> hash, event
        self._failed: dict[str, tuple[Weights, float | None, str]] = {}  # engines whose canary failed

    @on(WeightsPublished)
    def published(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsPublished)
        version = self._version((event.term, event.version))
        if version.published:
            self.count()
            if version.hashes != event.bucket_hashes:
                self.violate(
                    f"attempt {event.attempt} of {weights_name((event.term, event.version))} published other "
                    "weights than the attempt before it",
                    record,
                    version.published,
                )
        version.hashes, version.published = event.bucket_hashes, record.id

    @on(UpdateStarted)
    def started(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, UpdateStarted)
        self._received[event.engine] = {}

    @on(BucketReceived)
    def received(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, BucketReceived)
        if not event.accepted:
            return
        self.count()
        self._received.setdefault(event.engine, {})[event.bucket] = (event.hash64, record.id)
        if event.hash64 != event.expected_hash64:
            self.violate(
                f"{event.engine} accepted bucket {event.bucket} of "
                f"{weights_name((event.term, event.version))} with hash {event.hash64:#018x}, "
                f"but {event.expected_hash64:#018x} was sent",
                record,
            )

    @on(WeightsLoaded)
    def loaded(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsLoaded)
        weights = (event.term, event.version)
        version = self._version(weights)
        for bucket, (found, proof) in self._received.pop(event.engine, {}).items():
            if bucket < len(version.hashes):
                self.count()
                if found != version.hashes[bucket]:
                    self.violate(
                        f"{event.engine} loaded {weights_name(weights)} with bucket {bucket} of hash "
                        f"{found:#018x}, but {version.hashes[bucket]:#018x} was published",
                        record,
                        version.published,
                        proof,
                    )
        self._hold(event, record)

    @on(WeightsActivated)
    def activated(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsActivated)
        self._hold(event, record)

    @on(EngineProved)
    def proved(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineProved)
        if event.proof != "canary":
            return
        self._judge_verdict(event, record)
        if event.outcome == "fails":
            self._failed[event.engine] = ((event.term, event.version), event.gap, record.id)
        else:
            self._failed.pop(event.engine, None)

    @on(EngineFenced)
    def fenced(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineFenced)
        self._forget(event.engine)

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._forget(event.member)

    @on(VersionCommitted)
    def committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        weights = (event.term, event.version)
        for engine in event.members:
            if engine in self._failed and self._failed[engine][0] == weights:
                self._serves_anyway(engine, f"{weights_name(weights)} was committed with it", record)

    @on(EngineAcknowledged)
    def acknowledged(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, EngineAcknowledged)
        if self._failed and event.call == "resume" and event.engine in self._failed:
            self._serves_anyway(event.engine, "it was resumed", record)

    @on(SyncEnded)
    def sync_ended(self, record: Record) -> None:
        for engine in sorted(self._failed):
            self._serves_anyway(engine, "the sync ended without fencing it", record)

    @on(SyncAborted)
    def aborted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncAborted)
        if event.final:
            self._versions.pop((event.term, event.version), None)

    def _version(self, weights: Weights) -> _Version:
        version = self._versions.get(weights)
        if version is None:
            version = self._versions[weights] = _Version()
            while len(self._versions) > _RECENT_VERSIONS:
                del self._versions[min(self._versions)]
        return version

    def _hold(self, event: WeightsLoaded | WeightsActivated, record: Record) -> None:
        if not event.weights_hash:
            return
        weights = (event.term, event.version)
        held = self._version(weights).held
        for engine, (other, proof) in held.items():
            self.count()
            if other != event.weights_hash:
                whom = f"{engine} has" if engine != event.engine else "it had"
                self.violate(
                    f"{event.engine} holds {weights_name(weights)} with weights hash {event.weights_hash}, "
                    f"but {whom} {other} under that version",
                    record,
                    proof,
                )
                break
        held[event.engine] = (event.weights_hash, record.id)

    def _judge_verdict(self, event: EngineProved, record: Record) -> None:
        tolerance = self.context.declared.parameters.get("canary_tolerance", event.tolerance)
        if event.gap is None or tolerance is None:
            return
        self.count()
        # Written so that a gap of NaN fails.
        within = event.gap <= tolerance
        apart = event.separation is not None and event.separation >= _MIN_SEPARATION * tolerance
        verdict = "fails" if not within else "holds" if apart else "inconclusive"
        if event.outcome != verdict:
            self.violate(
                f"the canary of {event.engine} was judged {event.outcome!r}, but gap {event.gap:.3g}, "
                f"separation {event.separation} and tolerance {tolerance:g} mean {verdict!r}",
                record,
            )

    def _serves_anyway(self, engine: str, what: str, record: Record) -> None:
        self.count()
        weights, gap, proof = self._failed.pop(engine)
        size = "" if gap is None else f" by a gap of {gap:.3g}"
        name = weights_name(weights)
        self.violate(f"the canary of {engine} failed{size} for {name}, but {what}", record, proof)

    def _forget(self, engine: str) -> None:
        self._failed.pop(engine, None)
        self._received.pop(engine, None)
        for version in self._versions.values():
            version.held.pop(engine, None)


WEIGHTS_RULES: tuple[type[Rule], ...] = (SameVersionSameWeights,)
