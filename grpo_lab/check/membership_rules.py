"""Rules about who takes part: the dead do not act, and ranks keep one order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    BucketReceived,
    CollectiveEntered,
    Event,
    GroupAdmitted,
    GroupQueued,
    MemberDied,
    MemberStarted,
    ModelStep,
    OptimizerStepApplied,
    Record,
    RequestAdmitted,
    RequestFinished,
    RunEnded,
    SampleCompleted,
    SampleDispatched,
    StepPlanned,
    SyncBegan,
    UpdateStarted,
    VersionCommitted,
    WeightsActivated,
    WeightsLoaded,
    WeightsPublished,
)

_ACTS: tuple[type[Event], ...] = (
    BucketReceived,
    GroupAdmitted,
    GroupQueued,
    ModelStep,
    OptimizerStepApplied,
    RequestAdmitted,
    RequestFinished,
    SampleCompleted,
    SampleDispatched,
    StepPlanned,
    SyncBegan,
    UpdateStarted,
    VersionCommitted,
    WeightsActivated,
    WeightsLoaded,
    WeightsPublished,
)
_KEPT_ORDERS = 2  # the newest generation, and the one before for a rank that is late
_MAX_AHEAD = 4096  # collectives that a rank may be behind before what it should have entered is forgotten


class TheDeadDoNotAct(Rule):
    """Between a member's ``MemberDied`` and its next ``MemberStarted`` it does nothing that has an effect."""

    id = "S28"
    words = "a member declared dead cannot act any more"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._dead: dict[str, tuple[str, str]] = {}  # member -> detail, event

    @on(MemberDied)
    def died(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberDied)
        self._dead[event.member] = (event.detail, record.id)

    @on(MemberStarted)
    def started(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberStarted)
        if self._dead.pop(event.member, None) is not None:
            self.count()

    @on(*_ACTS)
    def acted(self, record: Record) -> None:
        if not self._dead:
            return
        if record.actor in self._dead:
            self.count()
            detail, proof = self._dead[record.actor]
            what = f"{record.actor} acted ({record.event.kind}) after it had been declared dead"
            self.violate(f"{what}{f' ({detail})' if detail else ''}", record, proof)

    @on(RunEnded)
    def run_ended(self, record: Record) -> None:
        self.count(len(self._dead))


_Generation = tuple[int, int]  # a view, and how often a rank has begun anew in it


@dataclass(slots=True)
class _Order:
    """The collectives that some rank has entered since ``first``, in the order in which it did."""

    first: int = 0
    entered: deque[tuple[str, str, int, str]] = field(default_factory=deque)  # group, operation, rank, event


class OneOrderOfCollectives(Rule):
    """Every rank enters the same collectives of the same groups in the same order: the n-th of one rank is
    the n-th of all, within a view. A rank that counts a group from 0 again is a new process, and begins a
    new order. (By the view first: of two ranks that die together only one may have entered anything.)

    None enters a collective of a view that another rank has already left for a newer one.
    """

    id = "S29"
    words = "all ranks join collectives in one order; none joins a dead view"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._orders: dict[_Generation, _Order] = {}
        self._places: dict[int, tuple[_Generation, int]] = {}  # of a rank; collectives entered
        self._last: dict[int, dict[str, int]] = {}  # rank -> group -> index
        self._views: dict[str, tuple[int, int, str]] = {}  # group -> newest view, rank, event

    @on(CollectiveEntered)
    def entered(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, CollectiveEntered)
        generation, place = self._places.get(event.rank, ((event.view, 0), 0))
        last = self._last.setdefault(event.rank, {})
        view, restarts = generation
        if event.view != view:
            generation, place = (event.view, 0), 0
            last.clear()
        elif event.index <= last.get(event.group, -1):
            generation, place = (view, restarts + 1), 0
            last.clear()
        last[event.group] = event.index
        self._places[event.rank] = (generation, place + 1)
        self._judge_view(event, record)
        self._judge_order(event, record, generation, place)

    def _judge_view(self, event: CollectiveEntered, record: Record) -> None:
        newest, rank, proof = self._views.get(event.group, (event.view, event.rank, record.id))
        if event.view < newest:
            self.count()
            self.violate(
                f"rank {event.rank} entered {event.operation} of {event.group} in view {event.view}, but "
                f"rank {rank} is in view {newest} already",
                record,
                proof,
            )
        else:
            self._views[event.group] = (event.view, event.rank, record.id)

    def _judge_order(
        self, event: CollectiveEntered, record: Record, generation: _Generation, place: int
    ) -> None:
        order = self._orders.setdefault(generation, _Order())
        if place >= order.first + len(order.entered):
            order.entered.append((event.group, event.operation, event.rank, record.id))
        elif place >= order.first:
            self.count()
            group, operation, rank, proof = order.entered[place - order.first]
            if (group, operation) != (event.group, event.operation):
                self.violate(
                    f"as its collective number {place}, rank {event.rank} entered {event.operation} of "
                    f"{event.group}, but rank {rank} had entered {operation} of {group}",
                    record,
                    proof,
                )
        while len(order.entered) > _MAX_AHEAD:
            order.entered.popleft()
            order.first += 1
        for old in sorted(self._orders)[:-_KEPT_ORDERS]:
            del self._orders[old]


MEMBERSHIP_RULES: tuple[type[Rule], ...] = (TheDeadDoNotAct, OneOrderOfCollectives)
