"""What a run's trace says about time: one pass over the events, arrays for the fits.

Every number is there for real and simulated runs alike, so a fit can be tried on a cluster whose figures are
known.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grpo_lab.events import (
    BucketReceived,
    EnginePaused,
    GroupConsumed,
    GroupScored,
    MicroBatchBegan,
    ModelStep,
    OptimizerStepApplied,
    Record,
    RequestAdmitted,
    RequestFinished,
    RunDeclared,
    SampleCompleted,
    SampleDispatched,
    StateChanged,
    StepPlanned,
    SyncEnded,
    WeightsPublished,
)
from grpo_lab.report.spans import Span

Floats = NDArray[np.float64]


@dataclass(slots=True)
class TrainerStep:
    """An optimizer step; ``tokens`` of its forward-backward passes (of one rank), ``overhead_s`` is what was
    neither waiting, nor the step, nor a sync, since the step before.
    """

    begin_s: float
    end_s: float
    duration_s: float
    wait_s: float
    tokens: float
    overhead_s: float = 0.0


@dataclass(slots=True)
class SyncTimes:
    """Seconds of one committed sync. ``pause_s`` is without the model step that the pause had to wait for.

    ``buckets`` are (bytes, seconds since the one before arrived) of every bucket but the first.
    """

    total_s: float
    pause_s: float
    transfer_s: float
    resume_s: float
    other_s: float
    bucket_nbytes: tuple[int, ...]
    buckets: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    dispatched_s: float = np.nan
    admitted_s: float = np.nan
    finished_s: float = np.nan
    prompt_tokens: int = 0
    engine: str = ""
    tokens: int = 0
    aborted: bool = False
    spans: tuple[tuple[int, int, int, int, int, int], ...] = ()


@dataclass(slots=True)
class Sample:
    group: str
    tokens: int
    censored: bool
    completed_s: float


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """Model steps of one engine, a row each: ``seconds`` with the gap before it where the engine went on,
    ``spans`` of the rows (a row may be several steps), batches, and requests ``finished`` by the step just
    before. ``arrivals_s``: when requests were admitted, in order.
    """

    seconds: Floats
    spans: Sequence[Span]
    prefill_tokens: Floats
    sequences: Floats
    context_tokens: Floats
    finished: Floats
    arrivals_s: Floats

    def admitted(self, held_up_s: Floats | float = 0.0) -> Floats:
        """Requests admitted while each step ran. Those that come in its last ``held_up_s`` seconds, when it
        only waits for others to be taken in, belong to the next one.
        """
        begins_s, ends_s = np.array(self.spans).reshape(-1, 2).T
        until = np.searchsorted(self.arrivals_s, ends_s - held_up_s, "right")
        first = np.searchsorted(self.arrivals_s, begins_s[:1], "right")
        return np.maximum(np.diff(np.concatenate([first, until])), 0).astype(float)


class RunTrace:
    """What the records say. Canary and evaluation requests count in engine steps only."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.declared: RunDeclared | None = None
        self.trainer_steps: list[TrainerStep] = []
        self.requests: dict[str, Request] = defaultdict(Request)
        self.samples: dict[str, Sample] = {}
        self.scored_s: dict[str, float] = {}
        self.prompt_tokens: dict[str, int] = {}
        self.consumed: list[tuple[int, GroupConsumed]] = []
        self.syncs: list[SyncTimes] = []
        self._steps: dict[str, list[tuple[float, ModelStep]]] = defaultdict(list)
        self._planned_s: float | None = None
        self._micro_tokens: dict[int, float] = defaultdict(float)
        self._ranks: set[int] = {0}
        self._states: list[tuple[float, str]] = []
        self._paused: list[tuple[float, str]] = []
        self._published: tuple[int, ...] = ()
        self._received: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._sync_s = 0.0
        for record in records:
            self._see(record)
        self._finish()

    # -- one pass ------------------------------------------------------------------------------------

    def _see(self, record: Record) -> None:
        match record.event:
            case RunDeclared() as event:
                self.declared = self.declared or event
            case ModelStep(shard=0) as event:
                self._steps[event.engine].append((record.t, event))
            case SampleDispatched() as event:
                self.requests[event.request or event.sample].dispatched_s = record.t
            case RequestAdmitted(request_kind="rollout") as event:
                request = self.requests[event.request]
                request.admitted_s, request.engine = record.t, event.engine
                request.prompt_tokens = event.prompt_tokens
                self.prompt_tokens.setdefault(event.request.split(".s")[0], event.prompt_tokens)
            case RequestFinished(request_kind="rollout") as event:
                request = self.requests[event.request]
                request.finished_s, request.tokens, request.spans = record.t, event.tokens, event.spans
                request.aborted = event.finish_reason == "abort"
            case SampleCompleted() as event:
                censored = event.finish_reason == "length"
                self.samples[event.sample] = Sample(event.group, event.tokens, censored, record.t)
            case GroupScored() as event:
                self.scored_s[event.group] = record.t
            case _:
                self._see_trainer(record)

    def _see_trainer(self, record: Record) -> None:
        match record.event:
            case StepPlanned():
                self._planned_s = record.t
            case MicroBatchBegan() as event:
                self._micro_tokens[event.optimizer_step] += event.tokens
                self._ranks.add(event.rank)
            case GroupConsumed() as event:
                self.consumed.append((event.optimizer_step, event))
            case OptimizerStepApplied() as event:
                self._apply(record.t, event)
            case StateChanged() as event:
                self._states.append((record.t, event.after))
            case EnginePaused() as event:
                self._paused.append((record.t, event.engine))
            case WeightsPublished() as event:
                self._published = event.bucket_nbytes
            case BucketReceived(accepted=True) as event:
                self._received[event.engine].append((record.t, event.nbytes))
            case SyncEnded() as event:
                self._end_sync(event)

    def _apply(self, t: float, event: OptimizerStepApplied) -> None:
        if self.trainer_steps and event.optimizer_step < len(self.trainer_steps):
            return  # every rank may say so
        duration_s = event.duration_s or (t - self._planned_s if self._planned_s is not None else 0.0)
        tokens = self._micro_tokens[event.optimizer_step] / len(self._ranks)
        step = TrainerStep(t - duration_s, t, duration_s, event.wait_s, tokens)
        if self.trainer_steps:
            since_s = t - self.trainer_steps[-1].end_s
            step.overhead_s = max(0.0, since_s - duration_s - event.wait_s - self._sync_s)
        self._sync_s = 0.0
        self.trainer_steps.append(step)

    def _end_sync(self, event: SyncEnded) -> None:
        states, self._states = {name: t for t, name in self._states}, []
        paused, self._paused = self._paused, []
        received, self._received = self._received, defaultdict(list)
        total_s = event.phases_s.get("total", 0.0)
        self._sync_s += total_s
        wanted = ("pausing", "paused", "transferring", "loaded", "resuming", "running")
        if event.outcome != "committed" or any(name not in states for name in wanted):
            return
        began_s = states["pausing"]
        stepped_s = max((self._last_step_end(engine, t) - began_s for t, engine in paused), default=0.0)
        pause_s = max(0.0, states["paused"] - began_s - max(0.0, stepped_s))
        transfer_s = states["loaded"] - states["transferring"]
        resume_s = states["running"] - states["resuming"]
        other_s = max(0.0, total_s - (states["paused"] - began_s) - transfer_s - resume_s)
        buckets = [
            (size, t - before)
            for arrivals in received.values()
            for (before, _), (t, size) in itertools.pairwise(arrivals)
        ]
        self.syncs.append(
            SyncTimes(total_s, pause_s, transfer_s, resume_s, other_s, self._published, buckets)
        )

    def _last_step_end(self, engine: str, before_s: float) -> float:
        steps = self._steps[engine]
        index = bisect.bisect_right(steps, before_s, key=lambda row: row[0])
        return steps[index - 1][0] if index else -np.inf

    def _finish(self) -> None:
        for rows in self._steps.values():
            rows.sort(key=lambda row: row[1].first_step)

    # -- what the fits need --------------------------------------------------------------------------------

    @property
    def training(self) -> list[Span]:
        return [(step.begin_s, step.end_s) for step in self.trainer_steps]

    def engine_steps(self) -> list[EngineSteps]:
        """Of each engine, without those before the first optimizer step has begun."""
        first_s = self.trainer_steps[0].begin_s if self.trainer_steps else -np.inf
        return [self._engine_steps(engine, rows, first_s) for engine, rows in sorted(self._steps.items())]

    def _engine_steps(
        self, engine: str, rows: Sequence[tuple[float, ModelStep]], first_s: float
    ) -> EngineSteps:
        ends = np.array([t for t, _ in rows])
        took = np.array([step.duration_s for _, step in rows])
        first = np.array([step.first_step for _, step in rows])
        count = np.array([step.last_step - step.first_step + 1 for _, step in rows], dtype=float)
        context, goes_on, ended = self._batches(engine, int(max(step.last_step for _, step in rows)) + 1)
        begins = ends - took
        gaps = begins - np.concatenate(([np.inf], ends[:-1]))
        going_on = goes_on[first] & np.isfinite(gaps)
        seconds = took + np.where(going_on, np.maximum(gaps, 0.0), 0.0)
        finished = np.where(going_on, np.concatenate(([0], ended[first][:-1])), 0)
        means = np.add.reduceat(context, first) / count
        arrivals = np.sort([r.admitted_s for r in self.requests.values() if r.engine == engine])
        kept = begins >= first_s
        return EngineSteps(
            seconds=(seconds / count)[kept],
            spans=list(zip((ends - seconds)[kept].tolist(), ends[kept].tolist(), strict=True)),
            prefill_tokens=(np.array([step.prefill_tokens for _, step in rows]) / count)[kept],
            sequences=np.array([float(step.sequences) for _, step in rows])[kept],
            context_tokens=np.where(count == 1, context[first], means)[kept],
            finished=(finished / count)[kept],
            arrivals_s=arrivals,
        )

    def _batches(self, engine: str, steps: int) -> tuple[Floats, NDArray[np.bool_], Floats]:
        """By step number: context tokens, whether a request was in the step before too, and requests that
        ended with it. A span's first token is taken to come from a prefill of all before it.
        """
        context, ended = np.zeros(steps), np.zeros(steps)
        goes_on = np.zeros(steps, dtype=bool)
        for request in self.requests.values():
            if request.engine != engine or not request.spans:
                continue
            for _, _, start, end, first, last in request.spans:
                if last - first + 1 != end - start:
                    continue  # preempted in between: which step gave which token is not known
                context[first + 1 : last + 1] += request.prompt_tokens + start + np.arange(last - first)
                goes_on[first + 1 : last + 1] = True
            ended[request.spans[-1][5]] += not request.aborted
        return context, goes_on, ended

    def token_times(self) -> list[tuple[float, float, float, int]]:
        """(dispatched, first token, last token, tokens) of every request that was not cut off, in seconds."""
        ends = {
            (engine, number): t
            for engine, rows in self._steps.items()
            for t, step in rows
            for number in range(step.first_step, step.last_step + 1)
        }
        found = []
        for request in self.requests.values():
            if request.aborted or not request.spans or np.isnan(request.dispatched_s):
                continue
            first = ends.get((request.engine, request.spans[0][4]))
            last = ends.get((request.engine, request.spans[-1][5]))
            if first is not None and last is not None:
                found.append((request.dispatched_s, first, last, request.tokens))
        return found
