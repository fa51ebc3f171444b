"""The run itself: its declaration, members, faults and resources."""

from __future__ import annotations

from dataclasses import field

from grpo_lab.events.base import SCHEMA_VERSION, Event, Params, event


@event
class RunDeclared(Event):
    """First event of a trace. ``check`` takes every bound from here and derives every formula itself.

    ``parameters`` (a missing one makes its rules "not evaluable"): max_staleness,
    max_staleness_steps, weight_sync_steps, staleness_policy, window, groups_per_step, num_generations,
    queue_capacity, ring_slots, max_inflight_tasks, pause_mode, clear_cache, scope, min_engines,
    sync_attempts, logprob_tolerance, batch_invariant, heartbeat_stale_after_s, liveness_bound_s,
    initial_version, final_sync. Optional, for what is unusual: min_group_size, prefix_policy.
    ``capabilities`` maps each engine to its ``EngineCapabilities`` fields.
    """

    schema: int = SCHEMA_VERSION
    world: str = "real"
    engine: str = "sim"
    seed: int = 0
    parameters: Params = field(default_factory=dict)
    capabilities: dict[str, Params] = field(default_factory=dict)


@event
class RunEnded(Event):
    """``outcome`` is clean, interrupted or failed; ``in_flight`` and ``queued`` count samples left."""

    outcome: str
    detail: str = ""
    in_flight: int = 0
    queued: int = 0


@event
class FaultsEnded(Event):
    """From here on the environment injects no fault: liveness rules start counting."""


@event
class FaultInjected(Event):
    """The environment did something on purpose. ``target`` is an actor or a link."""

    fault: str
    target: str = ""
    detail: str = ""


@event
class Reached(Event):
    """A situation that a test campaign must have met, e.g. ``worker-retried-after-commit``."""

    mark: str


@event
class MemberStarted(Event):
    """A process or actor began; ``incarnation`` counts its starts from 1.

    It holds nothing that an earlier incarnation held: an engine has no active weights. ``start`` is how an
    engine names this run of its process to those who ask it.
    """

    member: str
    role: str
    incarnation: int = 1
    start: str = ""


@event
class MemberStopped(Event):
    """It ended because it was asked to."""

    member: str


@event
class MemberDied(Event):
    """It was declared dead, with ``detail`` saying how that was seen. It may not act any more (S28)."""

    member: str
    detail: str = ""


@event
class Heartbeat(Event):
    """``progress`` rises with useful work, so a live but stuck actor is told from a busy one (L4)."""

    member: str
    progress: int


@event
class ResourceOpened(Event):
    """Memory or a connection that must be given back: shared memory, a ring slot, a process group."""

    resource: str
    nbytes: int = 0


@event
class ResourceClosed(Event):
    resource: str


@event
class MemoryMeasured(Event):
    """Resident bytes of a member after a sync (D2)."""

    member: str
    resident_bytes: int
