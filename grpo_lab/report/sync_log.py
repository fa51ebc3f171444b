"""Weight syncs: when each ran, how long each phase took, and what it proved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from grpo_lab.events import (
    EngineProved,
    Record,
    StateChanged,
    SyncAborted,
    SyncBegan,
    SyncEnded,
    VersionCommitted,
)

PHASES = ("pause", "gather", "pack", "wire", "verify", "load", "resume")
PROOFS = ("hash", "structure", "canary_holds", "canary_inconclusive", "canary_fails")


@dataclass(slots=True)
class Sync:
    """One sync, all its attempts. ``end_t`` is None where the trace stops inside it.

    ``states`` are (t, state) changes of the coordinator; ``phases_s`` may add up to more than the
    total, because gathering, packing and sending overlap.
    """

    actor: str
    term: int
    version: int
    begin_t: float
    attempts: int = 1
    end_t: float | None = None
    outcome: str = "unfinished"
    committed: bool = False
    phases_s: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    states: list[tuple[float, str]] = field(default_factory=list)

    @property
    def total_s(self) -> float | None:
        if "total" in self.phases_s:
            return self.phases_s["total"]
        return None if self.end_t is None else self.end_t - self.begin_t


class SyncLog:
    """Syncs in order, commits as (t, term, version), proofs and aborts by reason."""

    def __init__(self) -> None:
        self.syncs: list[Sync] = []
        self.commits: list[tuple[float, int, int]] = []
        self.proofs: Counter[str] = Counter(dict.fromkeys(PROOFS, 0))
        self.aborts: Counter[str] = Counter()
        self.canary_gap_max: float | None = None
        self._early: list[tuple[str, int, float, str]] = []  # (actor, version, t, state) before SyncBegan

    def see(self, record: Record) -> None:
        match record.event:
            case SyncBegan() as event:
                self._begin(record, event)
            case StateChanged() as event:
                self._change(record, event)
            case EngineProved() as event:
                self._prove(event)
            case VersionCommitted() as event:
                self._commit(record.t, event)
            case SyncAborted() as event:
                self.aborts[event.reason] += 1
                if event.final and self._open():
                    self.syncs[-1].outcome = "aborted"
            case SyncEnded() as event:
                self._end(record.t, event)

    def mean_s(self) -> dict[str, float | None]:
        """Mean seconds of each phase, and of the total, over the committed syncs."""
        done = [sync for sync in self.syncs if sync.committed and sync.end_t is not None]
        means: dict[str, float | None] = {}
        for phase in PHASES:
            values = [sync.phases_s[phase] for sync in done if phase in sync.phases_s]
            means[phase] = sum(values) / len(values) if values else None
        totals = [sync.total_s for sync in done if sync.total_s is not None]
        means["total"] = sum(totals) / len(totals) if totals else None
        return means

    def _change(self, record: Record, event: StateChanged) -> None:
        if not self._open():
            self._early.append((record.actor, event.version, record.t, event.after))
        elif record.actor == self.syncs[-1].actor:
            self.syncs[-1].states.append((record.t, event.after))

    def _open(self) -> bool:
        return bool(self.syncs) and self.syncs[-1].end_t is None

    def _begin(self, record: Record, event: SyncBegan) -> None:
        last = self.syncs[-1] if self._open() else None
        if last is not None and (last.term, last.version) == (event.term, event.version):
            last.attempts = max(last.attempts, event.attempt)
            return
        self.syncs.append(Sync(record.actor, event.term, event.version, record.t, event.attempt))
        self.syncs[-1].states = [
            change[2:] for change in self._early if change[:2] == (record.actor, event.version)
        ]
        self._early.clear()

    def _prove(self, event: EngineProved) -> None:
        if event.proof == "canary":
            self.proofs[f"canary_{event.outcome}"] += 1
            if event.gap is not None:
                self.canary_gap_max = max(event.gap, self.canary_gap_max or 0.0)
        elif event.outcome == "holds":
            self.proofs[event.proof] += 1
        else:
            self.proofs[f"{event.proof}_{event.outcome}"] += 1

    def _commit(self, t: float, event: VersionCommitted) -> None:
        if any(commit[1:] == (event.term, event.version) for commit in self.commits[-1:]):
            return  # every rank may say so
        self.commits.append((t, event.term, event.version))
        for sync in reversed(self.syncs):
            if (sync.term, sync.version) == (event.term, event.version):
                sync.committed = True
                break

    def _end(self, t: float, event: SyncEnded) -> None:
        for sync in reversed(self.syncs):
            if (sync.term, sync.version) == (event.term, event.version) and sync.end_t is None:
                sync.end_t, sync.outcome = t, event.outcome
                sync.phases_s, sync.nbytes = dict(event.phases_s), event.nbytes
                break
