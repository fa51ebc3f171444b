"""What each engine did with its time, and which weights it served."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_lab.events import (
    EngineAcknowledged,
    EngineFenced,
    EnginePaused,
    EngineResumed,
    ModelStep,
    Record,
    WeightsActivated,
)
from grpo_lab.report.spans import Span, merged, without

MERGE_GAP_S = 0.005  # between two steps of a busy engine: scheduling, not idleness


@dataclass(slots=True)
class EngineHistory:
    """One engine's busy and paused times, and its active version as (t, version) changes.

    ``seen_by`` is "engine" where the engine wrote its own events into the trace, and "client" where
    only requests and replies are known; then "busy" means that a request was in flight.
    """

    name: str
    busy: list[Span] = field(default_factory=list)
    paused: list[Span] = field(default_factory=list)
    versions: list[tuple[float, int]] = field(default_factory=list)
    fenced_t: float | None = None
    decode_tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    seen_by: str = "engine"


class EngineLog:
    """Histories by engine name; ``finish`` closes what the trace left open."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineHistory] = {}
        self._client_views: dict[str, EngineHistory] = {}
        self._paused_since: dict[tuple[str, str], float] = {}

    def see(self, record: Record) -> None:
        match record.event:
            case ModelStep() as event:
                self._step(record.t, event)
            case EnginePaused() as event:
                self._of(event.engine)
                self._paused_since.setdefault((event.engine, "engine"), record.t)
            case EngineResumed() as event:
                self._resume(self._of(event.engine), record.t)
            case WeightsActivated() as event:
                self._activate(self._of(event.engine), record.t, event.version)
            case EngineAcknowledged() as event:
                self._acknowledge(record.t, event)
            case EngineFenced() as event:
                self._of(event.engine).fenced_t = record.t

    def finish(self, end_t: float, requests: dict[str, list[Span]]) -> None:
        """``requests``: the client's view of each engine, for those that wrote no events."""
        for (name, view), since in sorted(self._paused_since.items()):
            histories = self.engines if view == "engine" else self._client_views
            histories[name].paused.append((since, end_t))
        for name in sorted(set(requests) | set(self._client_views)):
            if name and not self._of(name).steps:
                self._adopt_client_view(self.engines[name], requests.get(name, []))
        for history in self.engines.values():
            history.paused = merged(history.paused)
            history.busy = merged(history.busy, MERGE_GAP_S)
            if history.seen_by == "client":
                history.busy = without(history.busy, history.paused)

    def _of(self, name: str) -> EngineHistory:
        return self.engines.setdefault(name, EngineHistory(name))

    def _step(self, t: float, event: ModelStep) -> None:
        if event.shard:
            return  # the ranks of an engine work on the same tokens
        history = self._of(event.engine)
        history.steps += event.last_step - event.first_step + 1
        history.decode_tokens += event.decode_tokens
        history.prefill_tokens += event.prefill_tokens
        start = t - event.duration_s
        last = history.busy[-1] if history.busy else None
        if last is not None and last[0] <= start <= last[1] + MERGE_GAP_S:
            history.busy[-1] = (last[0], max(last[1], t))
        else:
            history.busy.append((start, t))

    def _resume(self, history: EngineHistory, t: float) -> None:
        view = history.seen_by
        since = self._paused_since.pop((history.name, view), None)
        if since is not None:
            history.paused.append((since, t))

    @staticmethod
    def _activate(history: EngineHistory, t: float, version: int) -> None:
        if not history.versions or history.versions[-1][1] != version:
            history.versions.append((t, version))

    def _acknowledge(self, t: float, event: EngineAcknowledged) -> None:
        view = self._client_views.setdefault(event.engine, EngineHistory(event.engine, seen_by="client"))
        if event.call == "pause":
            self._paused_since.setdefault((event.engine, "client"), t)
        elif event.call == "resume":
            self._resume(view, t)
        elif event.call == "finish":
            self._activate(view, t, event.version)

    def _adopt_client_view(self, history: EngineHistory, requests: list[Span]) -> None:
        view = self._client_views.get(history.name, EngineHistory(history.name))
        history.seen_by = "client"
        history.busy = list(requests)
        history.paused = history.paused or view.paused
        history.versions = history.versions or view.versions
