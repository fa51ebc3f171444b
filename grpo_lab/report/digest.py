"""One pass over a trace: everything that the summary, the figures and the timeline need."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from grpo_lab.events import (
    EngineAdmitted,
    EngineFenced,
    FaultInjected,
    MemberDied,
    Record,
    RunDeclared,
    RunEnded,
    SyncAborted,
)
from grpo_lab.report.engine_log import EngineHistory, EngineLog
from grpo_lab.report.rollout_log import RolloutLog
from grpo_lab.report.spans import Span, clipped, common, merged, total_s
from grpo_lab.report.sync_log import SyncLog
from grpo_lab.report.training_log import TrainingLog


class Digest:
    """What happened in a run, by theme. Memory grows with steps, syncs and samples, not with tokens."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.declared: RunDeclared | None = None
        self.ended: RunEnded | None = None
        self.end_t = 0.0
        self.records = 0
        self.incidents: list[tuple[float, str]] = []
        self._out: set[str] = set()  # engines that are fenced
        self.training = TrainingLog()
        self.rollouts = RolloutLog()
        self.syncs = SyncLog()
        self._engines = EngineLog()
        logs = (self.training, self.rollouts, self.syncs, self._engines)
        for record in records:
            self.records += 1
            if math.isfinite(record.t):
                self.end_t = max(self.end_t, record.t)
            self._see(record)
            for log in logs:
                log.see(record)
        self.training.finish(self.end_t)
        self.rollouts.finish(self.end_t)
        self._engines.finish(self.end_t, self.rollouts.engine_requests)

    @property
    def engines(self) -> list[EngineHistory]:
        """Histories by name, engine-2 before engine-10."""
        return sorted(self._engines.engines.values(), key=lambda engine: _natural(engine.name))

    @property
    def simulated(self) -> bool:
        return self.declared is not None and self.declared.world != "real"

    @property
    def outcome(self) -> str:
        """How the run ended; a trace without its last event belongs to a run that was cut off."""
        return self.ended.outcome if self.ended else "failed"

    @property
    def window(self) -> Span:
        """From the first dispatch to the end of the last optimizer step: where overlap is possible."""
        start = self.rollouts.first_dispatch_t or 0.0
        ends = [step.t for step in self.training.steps]
        return (start, max(ends, default=self.end_t))

    @property
    def trainer_busy(self) -> list[Span]:
        return merged(self.training.training)

    @property
    def any_engine_busy(self) -> list[Span]:
        return merged(span for engine in self.engines for span in engine.busy)

    def busy_fractions(self) -> dict[str, float | None]:
        """Shares of ``window`` in which the trainer trained, an engine generated, and both at once."""
        window = self.window
        length = window[1] - window[0]
        trainer, engine = clipped(self.trainer_busy, window), clipped(self.any_engine_busy, window)
        spans = {"trainer": trainer, "engine": engine, "both": common(trainer, engine)}
        return {name: total_s(value) / length if length > 0 else None for name, value in spans.items()}

    def _see(self, record: Record) -> None:
        match record.event:
            case RunDeclared() as event:
                self.declared = self.declared or event
            case RunEnded() as event:
                self.ended = event
            case MemberDied() as event:
                self.incidents.append((record.t, f"{event.member} died: {event.detail}"))
            case EngineFenced() as event:
                self.incidents.append((record.t, f"{event.engine} fenced: {event.reason}"))
                self._out.add(event.engine)
            case EngineAdmitted() as event:
                if event.engine in self._out:
                    self._out.discard(event.engine)
                    self.incidents.append((record.t, f"{event.engine} taken in again"))
            case SyncAborted() as event:
                words = "given up" if event.final else f"attempt {event.attempt} failed"
                self.incidents.append((record.t, f"sync of v{event.version} {words}: {event.reason}"))
            case FaultInjected() as event:
                self.incidents.append((record.t, f"fault injected: {event.fault} {event.target}".strip()))


def _natural(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
