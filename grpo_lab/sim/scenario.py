"""A simulated cluster as data: everything that decides a run, apart from the order of ready callbacks.

A scenario and a tape are a whole run. Both fit into a JSON file, and so does a failure, which adds the
rule that was broken and the place in the trace where it showed.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from grpo_lab.errors import ConfigError, TraceError
from grpo_lab.protocol.admission import StalenessBound, StalenessPolicy
from grpo_lab.sim.tape import Tape
from grpo_lab.types import PauseMode

FAILURE_SCHEMA = 1
Lengths = Literal["geometric", "fixed", "heavy"]

CALL_FAULTS = (
    "refuse",  # no connection: nothing happens at the engine
    "lose_request",  # nothing happens, and no answer comes
    "lose_reply",  # it happens, and the connection is reset before the answer
    "hang_reply",  # it happens, and no answer comes
    "duplicate",  # it arrives twice
    "delay",  # it arrives duration_s later, so that what was sent after it may arrive before
    "late_reply",  # the answer comes duration_s later
    "busy",  # 429
    "unavailable",  # 503
    "error",  # 500, and nothing happens
)
LINK_FAULTS = (
    "partition",  # for duration_s no request arrives
    "partition_replies",  # for duration_s every request arrives, and no answer does
    "slow_link",  # for duration_s everything takes ten times as long
)
BUCKET_FAULTS = ("flip", "truncate", "lose", "repeat", "swap", "late")
ENGINE_FAULTS = (
    "oom",  # there is no memory to load: the update is dropped, and finish refused
    "stall",  # for duration_s neither steps nor answers, like a long garbage collection
)
CRASHES = ("crash_before", "crash_after")  # of the target; it starts again after duration_s
ENGINE_CALLS = (
    "health",
    "start_id",
    "pause",
    "resume",
    "init_transfer",
    "start_update",
    "update",
    "finish_update",
    "abandon_update",
    "weight_info",
    "score",
    "generate",
)
REWARD_CALL, BUCKET_CALL = "score_reward", "bucket"
TRAINER, WORKER = "trainer", "worker"


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes at the ``occurrence``-th ``call`` (from 1, over the whole run) that ``target`` takes part in.

    ``target`` is an engine, ``trainer`` or ``worker``. ``clock_skew`` shifts the target's clock by
    ``duration_s`` from the start on and needs no call.
    """

    kind: str
    target: str
    call: str = ""
    occurrence: int = 1
    duration_s: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in _CALLS_OF:
            raise ConfigError("fault kind", self.kind, f"one of {', '.join(_CALLS_OF)}")
        allowed = _CALLS_OF[self.kind]
        if allowed and self.call not in allowed:
            raise ConfigError(f"call of fault {self.kind}", self.call, f"one of {', '.join(allowed)}")
        if self.occurrence < 1:
            raise ConfigError("fault occurrence", self.occurrence, "an integer of at least 1")
        if not -60.0 <= self.duration_s <= 600.0 or (self.duration_s < 0 and self.kind != "clock_skew"):
            raise ConfigError("fault duration_s", self.duration_s, "0 to 600 seconds")
        if self.target in (TRAINER, WORKER) and self.kind not in (*CRASHES, "clock_skew", "reward_error"):
            raise ConfigError("fault target", self.target, f"an engine for fault {self.kind}")


_CALLS_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(CALL_FAULTS, ENGINE_CALLS),
    **dict.fromkeys(LINK_FAULTS, ENGINE_CALLS),
    **dict.fromkeys(BUCKET_FAULTS, (BUCKET_CALL,)),
    **dict.fromkeys(CRASHES, ENGINE_CALLS),
    "oom": ("finish_update",),
    "stall": ENGINE_CALLS,
    "reward_error": (REWARD_CALL,),
    "clock_skew": (),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, its work and its faults.

    Attributes:
        steps: optimizer steps until the run is over.
        lengths: of completions: ``geometric`` and ``heavy`` (Pareto, exponent 1.2) have ``mean_tokens`` as
            their scale and ``max_tokens`` as their end; ``fixed`` is ``mean_tokens`` each.
        step_s: one optimizer step; token_s: one engine step without its batch.
        network_s, jitter: one way of a message takes ``network_s`` times 1 to 1 + jitter.
        bandwidth_bytes_s: of every link that carries weights.
        checkpoint_every_steps: 0 is never: a restarted trainer begins from nothing.
        faults_until_s: faults that have not struck by then never do.
        seed: of weights, lengths, jitter and rewards.
    """

    engines: int = 2
    slots: int = 4
    prompts_per_step: int = 2
    generations: int = 2
    staleness_policy: StalenessPolicy = "admission"
    max_staleness: int = 1
    max_staleness_steps: int | None = None
    window: int = 1
    weight_sync_steps: int = 1
    max_inflight: int = 8
    queue_capacity: int = 4
    pause_mode: PauseMode = "keep"
    clear_cache: bool = True
    sync_attempts: int = 3
    min_engines: int = 1
    canary: bool = False
    final_sync: bool = False
    lengths: Lengths = "geometric"
    mean_tokens: int = 8
    max_tokens: int = 32
    kv_blocks: int = 64
    step_s: float = 0.5
    token_s: float = 0.02
    reward_s: float = 0.05
    network_s: float = 0.005
    jitter: float = 1.0
    bandwidth_bytes_s: float = 1e6
    bucket_bytes: int = 512
    steps: int = 4
    checkpoint_every_steps: int = 2
    faults: tuple[Fault, ...] = ()
    faults_until_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            if not low <= getattr(self, name) <= high:
                raise ConfigError(name, getattr(self, name), f"{low} to {high}")
        for name, words in (("pause_mode", PauseMode), ("lengths", Lengths)):
            if getattr(self, name) not in get_args(words):
                raise ConfigError(name, getattr(self, name), f"one of {get_args(words)}")
        if self.max_inflight < self.generations:
            raise ConfigError("max_inflight", self.max_inflight, f"at least generations = {self.generations}")
        if self.min_engines > self.engines:
            raise ConfigError("min_engines", self.min_engines, f"at most engines = {self.engines}")
        _ = self.bound  # its own checks
        members = (*self.engine_names, TRAINER, WORKER)
        for fault in self.faults:
            if fault.target not in members:
                raise ConfigError("fault target", fault.target, f"one of {', '.join(members)}")

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(f"engine-{index}" for index in range(self.engines))

    @property
    def bound(self) -> StalenessBound:
        return StalenessBound(
            self.staleness_policy,
            groups_per_step=self.prompts_per_step,
            max_staleness=self.max_staleness,
            weight_sync_steps=self.weight_sync_steps,
            max_staleness_steps=self.max_staleness_steps,
            window=self.window,
        )

    def to_json(self) -> dict[str, Any]:
        """Every field, so that the file does not depend on later defaults."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Raises ``TraceError`` for a field that is unknown or has a value that cannot be."""
        values = dict(row)
        try:
            faults = tuple(Fault(**fault) for fault in values.pop("faults", ()))
            return cls(**values, faults=faults)
        except (TypeError, ConfigError) as error:
            raise TraceError(f"not a scenario of this version: {error}") from error


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("engines", 1, 1024),
    ("slots", 1, 4096),
    ("prompts_per_step", 1, 4096),
    ("generations", 1, 4096),
    ("queue_capacity", 1, 100_000),
    ("sync_attempts", 1, 100),
    ("min_engines", 1, 1024),
    ("mean_tokens", 1, 100_000),
    ("max_tokens", 1, 100_000),
    ("kv_blocks", 1, 10_000_000),
    ("step_s", 0.0, 3600.0),
    ("token_s", 1e-6, 60.0),
    ("reward_s", 0.0, 60.0),
    ("network_s", 0.0, 5.0),
    ("jitter", 0.0, 100.0),
    ("bandwidth_bytes_s", 1.0, 1e15),
    ("bucket_bytes", 256, 1 << 30),
    ("steps", 1, 1_000_000),
    ("checkpoint_every_steps", 0, 1_000_000),
    ("faults_until_s", 0.0, 86_400.0),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that broke a rule, whole: it replays exactly.

    ``rule`` is the rule's id, or the name of the exception that ended the run; ``event`` is the place in
    the trace (from 0) where it showed, -1 when the trace has none.
    """

    scenario: Scenario
    tape: Tape
    rule: str
    message: str = ""
    event: int = -1
    event_ids: tuple[str, ...] = field(default=())
    protocol: str = ""

    def save(self, path: Path) -> None:
        """Whole or not at all. Raises ``TraceError`` when the place cannot be written to."""
        scenario = self.scenario.to_json()
        row = {
            "schema": FAILURE_SCHEMA,
            "rule": self.rule,
            "message": self.message,
            "event": self.event,
            "event_ids": list(self.event_ids),
            "protocol": self.protocol,
            "faults": scenario.pop("faults"),
            "scenario": scenario,
            "tape": self.tape.to_json(),
        }
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ``TraceError`` for a file that is missing, no failure file, or of a newer schema."""
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TraceError(f"{path}: no failure file can be read: {error}") from error
        schema = row.get("schema") if isinstance(row, dict) else None
        if type(schema) is not int:
            raise TraceError(f"{path}: not a failure file; it has no schema number")
        if schema > FAILURE_SCHEMA:
            raise TraceError(f"{path}: schema {schema}; this version reads up to {FAILURE_SCHEMA}")
        try:
            scenario = Scenario.from_json({**row["scenario"], "faults": row["faults"]})
            return cls(
                scenario,
                Tape.from_json(row["tape"]),
                str(row["rule"]),
                str(row.get("message", "")),
                int(row.get("event", -1)),
                tuple(row.get("event_ids", ())),
                str(row.get("protocol", "")),
            )
        except (KeyError, TypeError, ValueError, TraceError) as error:
            raise TraceError(f"{path}: damaged: {error}") from error
