"""Hand-written traces, briefly: what actors emit, in the order in which a merged trace would have it."""

from __future__ import annotations

from typing import Any

from grpo_lab.check import CheckResult, check_records
from grpo_lab.events import Event, Record, RunDeclared

PARAMETERS: dict[str, Any] = {
    "max_staleness": 1,
    "max_staleness_steps": None,
    "weight_sync_steps": 1,
    "staleness_policy": "drop",
    "window": 1,
    "groups_per_step": 1,
    "num_generations": 2,
    "queue_capacity": 4,
    "ring_slots": 2,
    "max_inflight_tasks": 8,
    "pause_mode": "keep",
    "clear_cache": True,
    "scope": "global",
    "min_engines": 1,
    "sync_attempts": 3,
    "logprob_tolerance": 1e-4,
    "batch_invariant": False,
    "heartbeat_stale_after_s": 60.0,
    "liveness_bound_s": 120.0,
    "initial_version": 1,
    "final_sync": False,
}
CAPABILITIES = {
    "staged": True,
    "hashes": True,
    "token_versions": True,
    "term_fencing": True,
    "score_while_paused": True,
    "events": True,
}


def declared(
    *, engines: tuple[str, ...] = ("engine-0",), without: tuple[str, ...] = (), **parameters: Any
) -> RunDeclared:
    """Good defaults; every engine has all capabilities but those in ``without``."""
    capabilities = {name: value and name not in without for name, value in CAPABILITIES.items()}
    return RunDeclared(
        parameters={**PARAMETERS, **parameters},
        capabilities={engine: dict(capabilities) for engine in engines},
    )


class Trace:
    """Records with ``seq`` and ``t`` given out automatically.

    >>> from grpo_lab.events import Reached
    >>> trace = Trace(declared())
    >>> trace.emit("worker", Reached(mark="first"))
    'worker:0'
    """

    def __init__(self, declaration: RunDeclared | None = None) -> None:
        self.records: list[Record] = []
        self._next_seq: dict[str, int] = {}
        self._now_s = 0.0
        self.emit("run", declaration or declared())

    def emit(
        self, actor: str, event: Event, cause: str | tuple[str, ...] | None = None, t: float | None = None
    ) -> str:
        """Appends a record and returns its id; without ``t``, a second passes."""
        self._now_s = self._now_s + 1.0 if t is None else t
        seq = self._next_seq.get(actor, 0)
        self._next_seq[actor] = seq + 1
        causes = (cause,) if isinstance(cause, str) else tuple(cause or ())
        self.records.append(Record(self._now_s, actor, seq, causes, event))
        return self.records[-1].id

    def next_seq(self, actor: str) -> int:
        return self._next_seq.get(actor, 0)

    def check(self) -> CheckResult:
        """All rules over the trace."""
        return check_records(self.records)

    def violated(self) -> set[str]:
        """Ids of the rules that the trace breaks."""
        return {rule.id for rule in self.check().rules if rule.violation_count}

    def evaluated(self, rule_id: str) -> int:
        return self.check().of(rule_id).evaluations
