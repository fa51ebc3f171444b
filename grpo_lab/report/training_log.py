"""Optimizer steps, what they consumed, and how stale it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from grpo_lab.events import (
    Evaluated,
    GroupConsumed,
    GroupQueued,
    GroupScored,
    GroupTaken,
    LogprobGapMeasured,
    OptimizerStepApplied,
    Record,
    StepPlanned,
    SyncBegan,
    SyncEnded,
    TermBegan,
    TrainerStarved,
)
from grpo_lab.report.spans import Span


@dataclass(slots=True)
class Step:
    """One optimizer step; ``staleness_*`` hold one number for each consumed sample.

    Staleness in versions is the trainer's version at consumption minus the version of the sample's
    first token; in steps, the optimizer steps done since the weights of that version were published.
    ``version_oldest`` and ``version_newest`` span the tokens that were consumed.
    """

    term: int
    step: int
    version: int
    t: float
    begin_t: float | None = None
    loss: float | None = None
    reward_mean: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    duration_s: float = 0.0
    wait_s: float = 0.0
    weight_sync_time_s: float = 0.0
    queue_depth_groups: int = 0
    groups: int = 0
    samples: int = 0
    staleness_versions: list[int] = field(default_factory=list)
    staleness_steps: list[int] = field(default_factory=list)
    version_oldest: int | None = None
    version_newest: int | None = None
    logprob_gap_max: float | None = None
    rewards: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Evaluation:
    t: float
    split: str
    accuracy: float
    step: int
    version: int
    prompts: int
    before_training: bool


class TrainingLog:
    """Steps in order, evaluations, logprob gaps by version, and how the trainer's time went."""

    def __init__(self) -> None:
        self.actor = ""
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []
        self.gaps: list[tuple[int, float, float]] = []  # version, max, mean
        self.staleness_versions: Counter[int] = Counter()
        self.staleness_steps: Counter[int] = Counter()
        self.training: list[Span] = []
        self.waiting: list[Span] = []
        self._open: Step | None = None
        self._starved_t: float | None = None
        self._applied: set[tuple[int, int]] = set()
        self._steps_done = 0
        self._published: dict[tuple[int, int], int] = {}  # (term, version) -> optimizer steps done
        self._rewards: dict[str, tuple[float | None, ...]] = {}
        self._queue_depth = 0
        self._sync_time_s = 0.0

    def see(self, record: Record) -> None:
        match record.event:
            case TermBegan() as event:
                self._steps_done = event.optimizer_step
            case SyncBegan() as event:
                # An aborted version may be published later with newer weights: the last time counts.
                self._published[event.term, event.version] = self._steps_done
            case SyncEnded() as event:
                self._sync_time_s += event.phases_s.get("total", 0.0)
            case GroupScored() as event:
                self._rewards[event.group] = event.rewards
            case GroupQueued() as event:
                self._queue_depth = event.depth
            case GroupTaken():
                self._queue_depth = max(0, self._queue_depth - 1)
            case TrainerStarved():
                self._starved_t = record.t if self._starved_t is None else self._starved_t
            case StepPlanned() as event:
                self._plan(record, event)
            case GroupConsumed() as event:
                self._consume(record.t, event)
            case OptimizerStepApplied() as event:
                self._apply(record, event)
            case Evaluated() as event:
                self._evaluate(record.t, event)
            case LogprobGapMeasured() as event:
                self._measure(event)

    def finish(self, end_t: float) -> None:
        """A step that the trace cut off was training until its end; so was a wait."""
        if self._open is not None and self._open.begin_t is not None:
            self.training.append((self._open.begin_t, end_t))
        if self._starved_t is not None:
            self.waiting.append((self._starved_t, end_t))

    def _plan(self, record: Record, event: StepPlanned) -> None:
        self.actor = record.actor
        self._close_wait(record.t)
        step = self._step(event.term, event.optimizer_step, event.version, record.t)
        step.begin_t, step.queue_depth_groups = record.t, self._queue_depth

    def _step(self, term: int, number: int, version: int, t: float) -> Step:
        """The step in progress; a consumption or update without a plan opens one as well."""
        if self._open is None or (self._open.term, self._open.step) != (term, number):
            self._open = Step(term, number, version, t, queue_depth_groups=self._queue_depth)
        return self._open

    def _close_wait(self, t: float) -> None:
        if self._starved_t is not None:
            self.waiting.append((self._starved_t, t))
            self._starved_t = None

    def _consume(self, t: float, event: GroupConsumed) -> None:
        step = self._step(event.term, event.optimizer_step, event.version, t)
        step.groups += 1
        step.samples += len(event.samples)
        for first in event.versions_first:
            step.staleness_versions.append(event.version - first)
            self.staleness_versions[event.version - first] += 1
            published = self._published.get((event.term, first), event.optimizer_step_first)
            if published >= 0:
                step.staleness_steps.append(self._steps_done - published)
                self.staleness_steps[self._steps_done - published] += 1
        oldest = [*event.versions_first, *([step.version_oldest] if step.version_oldest is not None else [])]
        newest = [*event.versions_last, *([step.version_newest] if step.version_newest is not None else [])]
        step.version_oldest, step.version_newest = min(oldest, default=None), max(newest, default=None)
        step.rewards += [value for value in self._rewards.pop(event.group, ()) if value is not None]

    def _apply(self, record: Record, event: OptimizerStepApplied) -> None:
        key = (event.term, event.optimizer_step)
        if key in self._applied:
            return  # every rank applies the step and may say so
        self._applied.add(key)
        step = self._step(event.term, event.optimizer_step, event.version, record.t)
        self.actor = self.actor or record.actor
        if step.begin_t is None:
            step.begin_t = record.t - event.duration_s
        self.training.append((step.begin_t, record.t))
        if event.wait_s > 0 and not (self.waiting and self.waiting[-1][1] == step.begin_t):
            self.waiting.append((step.begin_t - event.wait_s, step.begin_t))
        step.t, step.loss, step.grad_norm, step.tokens = record.t, event.loss, event.grad_norm, event.tokens
        step.duration_s, step.wait_s = event.duration_s or record.t - step.begin_t, event.wait_s
        mean = sum(step.rewards) / len(step.rewards) if step.rewards else None
        step.reward_mean = mean if event.reward_mean is None else event.reward_mean
        step.weight_sync_time_s, self._sync_time_s = self._sync_time_s, 0.0
        self.steps.append(step)
        self._steps_done += 1
        self._open = None

    def _evaluate(self, t: float, event: Evaluated) -> None:
        before = not self._applied
        self.evaluations.append(
            Evaluation(
                t, event.split, event.accuracy, event.optimizer_step, event.version, event.prompts, before
            )
        )

    def _measure(self, event: LogprobGapMeasured) -> None:
        self.gaps.append((event.version, event.gap_max, event.gap_mean))
        step = self._open or (self.steps[-1] if self.steps else None)
        if step is not None:
            step.logprob_gap_max = max(event.gap_max, step.logprob_gap_max or 0.0)
