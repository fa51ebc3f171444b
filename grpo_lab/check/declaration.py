"""What a run may declare: every bound of every rule rests on these values, so they are checked first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from grpo_lab.errors import TraceError
from grpo_lab.events import SCHEMA_VERSION, RunDeclared

Fits = Callable[[Any], bool]
_LARGEST = 10**12


def _whole(lowest: int) -> tuple[str, Fits]:
    def fits(value: Any) -> bool:
        return type(value) is int and lowest <= value <= _LARGEST

    return f"an integer of at least {lowest}", fits


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _tolerance(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _flag(value: Any) -> bool:
    return type(value) is bool


def _word(value: Any) -> bool:
    return type(value) is str


EXPECTED: dict[str, tuple[str, Fits]] = {
    **dict.fromkeys(("max_staleness", "max_staleness_steps", "initial_version"), _whole(0)),
    **dict.fromkeys(
        (
            "weight_sync_steps",
            "window",
            "groups_per_step",
            "num_generations",
            "min_group_size",
            "queue_capacity",
            "ring_slots",
            "max_inflight_tasks",
            "min_engines",
            "sync_attempts",
        ),
        _whole(1),
    ),
    **dict.fromkeys(("heartbeat_stale_after_s", "liveness_bound_s"), ("seconds above 0", _seconds)),
    "logprob_tolerance": ("a finite number of at least 0", _tolerance),
    **dict.fromkeys(("clear_cache", "batch_invariant", "final_sync"), ("true or false", _flag)),
    **dict.fromkeys(("staleness_policy", "pause_mode", "scope", "prefix_policy"), ("a word", _word)),
}


def check_declaration(event: RunDeclared) -> None:
    """Raises ``TraceError`` for a schema that cannot be read, and for a value that no rule could work with.

    None stands for "not declared" (or "no bound"); names that no rule knows are left alone.
    """
    if event.schema > SCHEMA_VERSION:
        raise TraceError(
            f"run_declared: schema {event.schema}, but this version reads up to {SCHEMA_VERSION}: check the "
            "trace with the version that wrote it"
        )
    for name, (words, fits) in EXPECTED.items():
        value = event.parameters.get(name)
        if value is not None and not fits(value):
            raise TraceError(f"run_declared: {name}={value!r:.80}: expected {words}")
    for engine, abilities in event.capabilities.items():
        if not isinstance(abilities, dict):
            raise TraceError(f"run_declared: capabilities of {engine} are {abilities!r:.80}, not an object")
