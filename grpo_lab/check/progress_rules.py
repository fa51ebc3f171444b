"""What must happen in bounded time once faults stop: samples, trainer, prompts, shutdown (L5, L6, L8, L9)."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.check.liveness import LivenessRule
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    EngineFenced,
    FaultInjected,
    FaultsEnded,
    GroupAdmitted,
    GroupConsumed,
    GroupDropped,
    GroupQueued,
    GroupScored,
    Heartbeat,
    MemberDied,
    MemberStarted,
    MemberStopped,
    OptimizerStepApplied,
    Record,
    RequestAdmitted,
    RequestFinished,
    RunEnded,
    SampleCompleted,
    SampleDispatched,
    StepPlanned,
    TermBegan,
    TrainerStarved,
)


class TrainerFed(LivenessRule):
    id = "L5"
    words = "the trainer does not wait for samples longer than the bound while an engine lives"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._alive = set(context.declared.capabilities)

    @on(TrainerStarved)
    def starved(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, TrainerStarved)
        if self._alive or not self.context.declared.capabilities:
            words = (
                f"the trainer still waited for optimizer step {event.optimizer_step} (it had "
                f"{event.have_groups} of {event.need_groups} groups) although engines were alive"
            )
            self.owe("step", record, words)

    @on(StepPlanned)
    def planned(self, record: Record) -> None:
        self.meet("step", record)

    @on(Heartbeat, GroupDropped)
    def time_passes(self, record: Record) -> None:
        self.expire(record.t)

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        self.waive(lambda key: True, record)

    @on(MemberStarted)
    def started(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberStarted)
        if event.role == "engine":
            self._alive.add(event.member)

    @on(MemberDied, MemberStopped, EngineFenced)
    def gone(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberDied | MemberStopped | EngineFenced)
        self.expire(record.t)
        self._alive.discard(event.engine if isinstance(event, EngineFenced) else event.member)
        if not self._alive:
            self.waive(lambda key: True, record)


class RequestsEnd(LivenessRule):
    """What a dead engine or a dead worker held is not owed; the samples themselves are S20's matter."""

    id = "L6"
    words = "every dispatched sample, and every request that an engine took, ends in time"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._fenced: set[str] = set()

    @on(SampleDispatched)
    def dispatched(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleDispatched)
        words = f"sample {event.sample}, sent to {event.engine}, had neither completed nor been dropped"
        self.owe(("sample", event.sample), record, words)

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        self.meet(("sample", event.sample), record)

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        for sample in event.samples:
            self.meet(("sample", sample), record)

    @on(RequestAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestAdmitted)
        if event.engine not in self._fenced:
            words = f"request {event.request} ({event.request_kind}) was still on {event.engine}"
            self.owe((event.engine, event.request), record, words)

    @on(RequestFinished)
    def finished(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestFinished)
        self.meet((event.engine, event.request), record)

    @on(MemberDied, MemberStopped, MemberStarted)
    def gone(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberDied | MemberStopped | MemberStarted)
        self._fenced.discard(event.member)
        self.waive(lambda key: isinstance(key, tuple) and key[0] == event.member, record)

    @on(EngineFenced)
    def fenced(self, record: Record) -> None:
        """It holds what it is sent until it restarts; the samples are still owed."""
        event = record.event
        assert isinstance(event, EngineFenced)
        self._fenced.add(event.engine)
        self.waive(lambda key: isinstance(key, tuple) and key[0] == event.engine, record)

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        self.waive(lambda key: isinstance(key, tuple) and key[0] == "sample", record)


@dataclass(slots=True)
class _Prompt:
    samples: int
    event_id: str
    completed: int = 0


class PromptsSettled(LivenessRule):
    """A queued group is due after ``queue_capacity / groups_per_step`` steps for those before it, and
    ``(max_staleness + 2) weight_sync_steps`` until it is used or too old; then one for good measure. So a
    slow trainer breaks nothing. Versions move only with training: more stale drops in a row than groups
    can have been under way, with nothing trained on in between, are a livelock.
    """

    id = "L8"
    words = (
        "every prompt that was let in is trained on or dropped with a reason, in a bounded number of steps"
    )
    parameters = (
        "liveness_bound_s",
        "max_staleness",
        "weight_sync_steps",
        "queue_capacity",
        "groups_per_step",
        "max_inflight_tasks",
        "num_generations",
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        per_step = context.parameter("groups_per_step")
        until_stale = (context.parameter("max_staleness") + 2) * context.parameter("weight_sync_steps")
        capacity: int = context.parameter("queue_capacity")
        in_flight = context.parameter("max_inflight_tasks") // context.parameter("num_generations")
        self._due_steps: int = -(-capacity // per_step) + until_stale + 1
        self._under_way_at_most: int = capacity + in_flight + per_step
        if context.declared.parameters.get("staleness_policy") == "freshest":
            self._under_way_at_most += capacity  # its trainer looks at all that was queued and lets it refill
        self._steps = 0
        self._calm_since_step = 0
        self._under_way: dict[str, _Prompt] = {}
        self._queued: dict[str, tuple[int, str]] = {}
        self._stale_drops: list[str] = []

    @on(FaultInjected)
    def fault_injected(self, record: Record) -> None:
        super().fault_injected(record)
        self._stale_drops.clear()

    @on(FaultsEnded)
    def faults_ended(self, record: Record) -> None:
        super().faults_ended(record)
        self._calm_since_step = self._steps

    @on(GroupAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupAdmitted)
        self._under_way[event.group] = _Prompt(len(event.samples), record.id)

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        prompt = self._under_way.get(event.group)
        if prompt is None:
            return
        prompt.completed += 1
        if prompt.completed == prompt.samples:
            words = f"all samples of group {event.group} had completed and it was neither scored nor dropped"
            self.owe(event.group, record, words)

    @on(GroupScored)
    def scored(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupScored)
        self.meet(event.group, record)

    @on(GroupQueued)
    def queued(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupQueued)
        self.meet(event.group, record)
        self._queued[event.group] = (self._steps, record.id)

    @on(GroupConsumed, GroupDropped)
    def settled(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupConsumed | GroupDropped)
        self.meet(event.group, record)
        self._under_way.pop(event.group, None)
        self._queued.pop(event.group, None)
        if isinstance(event, GroupConsumed):
            self._stale_drops.clear()
            if self.calm:
                self.count()
        elif event.reason == "stale" and self.calm:
            self._stale_drop(event, record)

    def _stale_drop(self, event: GroupDropped, record: Record) -> None:
        self.count()
        self._stale_drops.append(record.id)
        if len(self._stale_drops) > self._under_way_at_most:
            self.violate(
                f"{len(self._stale_drops)} groups in a row, up to {event.group}, were dropped as stale and "
                "none was trained on: nothing that is generated is ever fresh enough",
                record,
                *self._stale_drops[:3],
            )
            self._stale_drops.clear()

    @on(OptimizerStepApplied)
    def applied(self, record: Record) -> None:
        self._steps += 1
        while self.calm and self._queued:
            group, (step, event_id) = next(iter(self._queued.items()))
            waited_steps = self._steps - max(step, self._calm_since_step)
            if waited_steps <= self._due_steps:
                return
            del self._queued[group]
            self.count()
            self.violate(
                f"group {group} was queued {waited_steps} optimizer steps ago and has neither been "
                f"trained on nor dropped (due after {self._due_steps} steps)",
                record,
                event_id,
            )

    @on(TermBegan)
    def term_began(self, record: Record) -> None:
        self.waive(lambda key: True, record)
        self._under_way.clear()
        self._queued.clear()
        self._stale_drops.clear()


class NothingLeaks(Rule):
    """Evaluated at a clean end: what an interrupted run left is in its own words."""

    id = "L9"
    words = "a clean shutdown leaves no member running"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._running: dict[str, str] = {}
        self._members = 0
        self._ended: Record | None = None

    @on(MemberStarted)
    def started(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberStarted)
        self._members += 1
        self._running[event.member] = record.id

    @on(MemberStopped, MemberDied)
    def gone(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemberStopped | MemberDied)
        self._running.pop(event.member, None)

    @on(RunEnded)
    def run_ended(self, record: Record) -> None:
        self._ended = record

    def finish(self, last: Record | None) -> None:
        if self._ended is None:
            return
        event = self._ended.event
        assert isinstance(event, RunEnded)
        if event.outcome != "clean":
            return
        self.count(self._members)
        for member, event_id in self._running.items():
            self.violate(f"{member} was still running when the run ended cleanly", self._ended, event_id)


PROGRESS_RULES: tuple[type[Rule], ...] = (TrainerFed, RequestsEnd, PromptsSettled, NothingLeaks)
