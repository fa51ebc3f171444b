"""Where samples go: none is lost, split, overtaken for long or held without bound (S20 - S23)."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    GroupAdmitted,
    GroupConsumed,
    GroupDropped,
    GroupQueued,
    GroupTaken,
    OptimizerStepApplied,
    Record,
    RunEnded,
    SampleCompleted,
    SampleDispatched,
    TermBegan,
)

_RECENTLY_ENDED = 4096  # kept only to name the first end of a sample that ends twice


class SamplesConserved(Rule):
    """One completion is the unit. A trace that stops without ``RunEnded`` leaves its rest in flight. Where no
    dispatch or admission is ever told of (another trainer's log, an injected worker), a trainer's word that a
    group ended cannot be judged.
    """

    id = "S20"
    words = (
        "every dispatched sample ends exactly once: consumed, dropped with a reason, or declared as left over"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._open: dict[str, str] = {}  # sample -> event that began it
        self._ended: dict[str, str] = {}  # group -> event that ended it
        self._tells_of_dispatch = False
        self._trainers: set[str] = set()
        self._run_ended: Record | None = None

    @on(GroupAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupAdmitted)
        self._tells_of_dispatch = True
        for sample in event.samples:
            self._open[sample] = record.id

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        self._trainers.add(record.actor)

    @on(SampleDispatched)
    def dispatched(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleDispatched)
        self._tells_of_dispatch = True
        if event.sample in self._open:
            return
        if event.group in self._ended:
            self.violate(
                f"sample {event.sample} was sent to {event.engine} although its group had ended",
                record,
                self._ended[event.group],
            )
            return
        self._open[event.sample] = record.id

    @on(GroupConsumed, GroupDropped)
    def ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupConsumed | GroupDropped)
        how = "consumed" if isinstance(event, GroupConsumed) else f"dropped ({event.reason})"
        if how == "dropped ()":
            self.violate(f"group {event.group} was dropped without a reason", record)
        if not self._tells_of_dispatch and (how == "consumed" or record.actor in self._trainers):
            return
        unknown = [sample for sample in event.samples if self._open.pop(sample, None) is None]
        self.count(len(event.samples))
        if unknown and event.group in self._ended:
            self.violate(
                f"{len(unknown)} samples of group {event.group} ended twice: now {how}, after they had ended "
                f"before ({', '.join(unknown[:4])})",
                record,
                self._ended[event.group],
            )
        elif unknown:
            self.violate(
                f"{len(unknown)} samples of group {event.group} ended as {how} although they were never "
                f"dispatched ({', '.join(unknown[:4])})",
                record,
            )
        self._ended[event.group] = record.id
        if len(self._ended) > _RECENTLY_ENDED:
            del self._ended[next(iter(self._ended))]

    @on(RunEnded)
    def run_ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RunEnded)
        self._run_ended = record

    def finish(self, last: Record | None) -> None:
        if self._run_ended is None:
            return
        event = self._run_ended.event
        assert isinstance(event, RunEnded)
        self.count()
        left = event.in_flight + event.queued
        if event.outcome == "clean" and left:
            self.violate(
                f"the run ended cleanly with {event.in_flight} samples in flight and {event.queued} queued; "
                "a clean end drops them with a reason",
                self._run_ended,
            )
        if len(self._open) != left:
            some = list(self._open)[:4]
            self.violate(
                f"{len(self._open)} dispatched samples were neither consumed nor dropped, but the end of the "
                f"run declares {event.in_flight} in flight and {event.queued} queued"
                + (f" (among them {', '.join(some)})" if some else ""),
                self._run_ended,
                *dict.fromkeys(self._open[sample] for sample in some),
            )


@dataclass(slots=True)
class _Group:
    samples: tuple[str, ...]
    event_id: str
    completed: set[str] = field(default_factory=set)


class GroupsAtomic(Rule):
    """With ``min_group_size`` declared, a group may be consumed without some of its samples."""

    id = "S21"
    words = "a group is consumed or dropped whole, with exactly the samples that were let in together"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._smallest: int | None = context.declared.parameters.get("min_group_size")
        self._groups: dict[str, _Group] = {}

    @on(GroupAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupAdmitted)
        self._groups[event.group] = _Group(event.samples, record.id)

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        group = self._groups.get(event.group)
        if group is not None:
            group.completed.add(event.sample)

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        group = self._groups.pop(event.group, None)
        if group is None:
            return
        self.count()
        if set(event.samples) != set(group.samples):
            self._partly("dropped", event.group, event.samples, group, record)

    @on(GroupConsumed)
    def consumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupConsumed)
        group = self._groups.pop(event.group, None)
        if group is None:
            return
        self.count()
        samples, admitted = set(event.samples), set(group.samples)
        small_enough = self._smallest is not None and len(samples) >= self._smallest and samples <= admitted
        if (samples != admitted and not small_enough) or len(samples) != len(event.samples):
            self._partly("consumed", event.group, event.samples, group, record)
        missing = samples - group.completed
        if group.completed and missing:
            self.violate(
                f"group {event.group} was consumed although {len(missing)} of its samples never completed "
                f"({', '.join(sorted(missing)[:4])})",
                record,
                group.event_id,
            )

    def _partly(self, how: str, name: str, samples: tuple[str, ...], group: _Group, record: Record) -> None:
        self.violate(
            f"group {name} was let in with {len(group.samples)} samples and {how} with {len(samples)}: "
            f"missing {sorted(set(group.samples) - set(samples))[:4]}, "
            f"foreign {sorted(set(samples) - set(group.samples))[:4]}",
            record,
            group.event_id,
        )


@dataclass(slots=True)
class _Waiting:
    event_id: str
    overtaken: int = 0


class OrderKept(Rule):
    """Groups of one optimizer step are used together, so they do not overtake each other."""

    id = "S22"
    words = (
        "groups are consumed in dispatch order; with a window of W none is overtaken more than W - 1 times"
    )
    parameters = ("staleness_policy", "window")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        policy = context.parameter("staleness_policy")
        self._ordered = policy in ("admission", "window")
        self._allowed: int = context.parameter("window") - 1 if policy == "window" else 0
        self._waiting: dict[int, _Waiting] = {}  # number -> group of this term that has not ended
        self._number_of: dict[str, int] = {}
        self._term = 0
        self._step = -1
        self._chosen: dict[int, Record] = {}

    @on(GroupAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupAdmitted)
        if not self._ordered:
            return
        if event.term != self._term:
            self._judge_step()
            self._waiting.clear()
            self._number_of.clear()
            self._term = event.term
        self._waiting[event.number] = _Waiting(record.id)
        self._number_of[event.group] = event.number

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        self._waiting.pop(self._number_of.pop(event.group, -1), None)

    @on(GroupConsumed)
    def consumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupConsumed)
        number = self._number_of.pop(event.group, None)
        if number is None:
            return
        if event.optimizer_step != self._step:
            self._judge_step()
            self._step = event.optimizer_step
        self._chosen[number] = record
        self._waiting.pop(number, None)

    @on(OptimizerStepApplied)
    def applied(self, record: Record) -> None:
        self._judge_step()

    def finish(self, last: Record | None) -> None:
        self._judge_step()

    def _judge_step(self) -> None:
        """Every group that stayed behind was overtaken by the later ones among the chosen."""
        if not self._chosen:
            return
        self.count(len(self._chosen))
        last = max(self._chosen)
        for number, waiting in self._waiting.items():
            if number > last:
                continue
            passed = [record for other, record in self._chosen.items() if other > number]
            waiting.overtaken += len(passed)
            if waiting.overtaken - len(passed) <= self._allowed < waiting.overtaken:
                self.violate(
                    f"group number {number} was overtaken {waiting.overtaken} times by groups that were let "
                    f"in later, in optimizer step {self._step} at the latest; allowed are {self._allowed}",
                    passed[-1],
                    waiting.event_id,
                )
        self._chosen.clear()


class QueueBounded(Rule):
    id = "S23"
    words = "the sample queue never holds more than its capacity, and what was put into it comes out once"
    parameters = ("queue_capacity",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._capacity: int = context.parameter("queue_capacity")
        self._queued: dict[str, str] = {}
        self._terms: set[int] = set()
        self._run_ended: RunEnded | None = None

    @on(GroupQueued)
    def queued(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupQueued)
        self.count()
        self._terms.add(event.term)
        if not 1 <= event.depth <= self._capacity:
            self.violate(
                f"the sample queue held {event.depth} groups after group {event.group} was put in; its "
                f"capacity is {self._capacity}",
                record,
            )
        self._queued[event.group] = record.id

    @on(GroupTaken)
    def taken(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupTaken)
        if event.term in self._terms and self._queued.pop(event.group, None) is None:
            self.violate(
                f"group {event.group} was taken out of the sample queue although it was not in it (any more)",
                record,
            )

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        self._queued.pop(event.group, None)

    @on(RunEnded)
    def run_ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RunEnded)
        self._run_ended = event

    def finish(self, last: Record | None) -> None:
        if self._run_ended is None or self._run_ended.outcome != "clean" or not self._queued:
            return
        some = list(self._queued)[:4]
        self.violate(
            f"{len(self._queued)} groups were put into the sample queue and never taken out or dropped "
            f"({', '.join(some)})",
            None,
            *(self._queued[group] for group in some),
        )


CONSERVATION_RULES: tuple[type[Rule], ...] = (SamplesConserved, GroupsAtomic, OrderKept, QueueBounded)
