"""Rules about the sending side's memory: what is read stands still, and what is taken is given back."""

from __future__ import annotations

from grpo_lab.check.naming import Identity, sync_name
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    BucketPackBegan,
    BucketPacked,
    GatherBegan,
    GatherEnded,
    MemberDied,
    MemberStarted,
    OptimizerStepApplied,
    Record,
    ResourceClosed,
    ResourceOpened,
    RunEnded,
    SlotReleased,
    SyncAborted,
    SyncEnded,
    TermBegan,
    WeightsPublished,
)


class SlotRule(Rule):
    """Base of the rules that follow which ring slots are being read."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._slots: dict[tuple[str, int], tuple[int, str]] = {}  # (actor, slot) -> bucket, event

    @on(BucketPacked)
    def packed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, BucketPacked)
        self._slots[record.actor, event.slot] = (event.bucket, record.id)

    @on(SlotReleased)
    def released(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SlotReleased)
        self._slots.pop((record.actor, event.slot), None)


class SourceStandsStill(SlotRule):
    """From the first pack of an attempt until its manifest is complete no parameter changes; a bucket is
    packed when its gather has ended, into a slot that every reader has released.

    An aborted attempt, and a resource that is opened or closed, end all readers.
    """

    id = "S10"
    words = "source tensors are unchanged while a transfer reads them, and no slot is reused while it is read"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._reading: dict[str, tuple[Identity, str]] = {}  # actor -> attempt, its first pack
        self._gathering: dict[tuple[Identity, int], dict[int, str]] = {}  # bucket -> rank

    @on(GatherBegan)
    def gather_began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GatherBegan)
        key = ((event.term, event.version, event.attempt), event.bucket)
        self._gathering.setdefault(key, {})[event.rank] = record.id

    @on(GatherEnded)
    def gather_ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GatherEnded)
        key = ((event.term, event.version, event.attempt), event.bucket)
        ranks = self._gathering.get(key, {})
        ranks.pop(event.rank, None)
        if not ranks:
            self._gathering.pop(key, None)

    @on(BucketPackBegan)
    def pack_began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, BucketPackBegan)
        self.count()
        attempt = (event.term, event.version, event.attempt)
        reading = self._reading.get(record.actor)
        if reading is None or reading[0] != attempt:
            self._reading[record.actor] = (attempt, record.id)
        for rank, proof in self._gathering.get((attempt, event.bucket), {}).items():
            self.violate(
                f"{record.actor} packs bucket {event.bucket} of {sync_name(attempt)} while rank {rank} still "
                "gathers its tensors",
                record,
                proof,
            )
        held = self._slots.get((record.actor, event.slot))
        if held is not None:
            self.violate(
                f"{record.actor} packs bucket {event.bucket} of {sync_name(attempt)} into slot {event.slot}, "
                f"from which bucket {held[0]} is still read",
                record,
                held[1],
            )

    @on(OptimizerStepApplied)
    def stepped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, OptimizerStepApplied)
        if not event.changed:
            return
        self.count()
        reading = self._reading.pop(record.actor, None)
        if reading is not None:
            self.violate(
                f"{record.actor} applied optimizer step {event.optimizer_step} while it read the "
                f"parameters for {sync_name(reading[0])}",
                record,
                reading[1],
            )

    @on(WeightsPublished)
    def published(self, record: Record) -> None:
        self._reading.pop(record.actor, None)

    @on(SyncAborted)
    def aborted(self, record: Record) -> None:
        self._reading.pop(record.actor, None)
        self._gathering.clear()
        self._free(record.actor)

    @on(ResourceOpened, ResourceClosed, TermBegan)
    def reopened(self, record: Record) -> None:
        self._free(record.actor)

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._reading.pop(event.member, None)
        self._free(event.member)

    def _free(self, actor: str) -> None:
        for key in [key for key in self._slots if key[0] == actor]:
            del self._slots[key]


class GivenBack(SlotRule):
    """A committed sync leaves no slot in use, and a clean end no resource open. Who died owes nothing here:
    what it left behind is its supervisor's to remove.
    """

    id = "S30"
    words = "every published buffer is freed when its readers end, and every opened resource is closed"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._open: dict[str, tuple[str, str]] = {}  # resource -> actor, event

    @on(SyncEnded)
    def sync_ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncEnded)
        if event.outcome == "committed":
            self.count()
            for (actor, slot), (bucket, proof) in sorted(self._slots.items()):
                self.violate(
                    f"the sync of version {event.version} ended, but slot {slot} of {actor} with bucket "
                    f"{bucket} was never released",
                    record,
                    proof,
                )
        self._slots.clear()

    @on(SyncAborted)
    def aborted(self, record: Record) -> None:
        self._slots.clear()

    @on(ResourceOpened)
    def opened(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ResourceOpened)
        before = self._open.get(event.resource)
        if before is not None:
            self.count()
            self.violate(
                f"{record.actor} opened {event.resource} again without closing it", record, before[1]
            )
        self._open[event.resource] = (record.actor, record.id)

    @on(ResourceClosed)
    def closed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ResourceClosed)
        if self._open.pop(event.resource, None) is not None:
            self.count()

    @on(MemberDied)
    def died(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberDied)
        for resource in [name for name, (actor, _) in self._open.items() if actor == event.member]:
            del self._open[resource]

    @on(RunEnded)
    def run_ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RunEnded)
        if event.outcome == "clean":
            for resource, (actor, proof) in sorted(self._open.items()):
                self.count()
                self.violate(f"{actor} never closed {resource}", record, proof)
            self._open.clear()


SOURCE_RULES: tuple[type[Rule], ...] = (SourceStandsStill, GivenBack)
