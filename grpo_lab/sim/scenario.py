"""A simulated cluster as data: everything that decides a run, apart from the order of ready callbacks.

A scenario and a tape are a whole run. Both fit into a JSON file, and so does a failure, which adds the
rule that was broken and the place in the trace where it showed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self, get_args

from grpo_lab.engine.block_pool import PrefixPolicy
from grpo_lab.errors import ConfigError, TraceError
from grpo_lab.files import write_whole
from grpo_lab.protocol.admission import StalenessBound, StalenessPolicy
from grpo_lab.sim.tape import Tape
from grpo_lab.types import PauseMode, SyncScope

FAILURE_SCHEMA = 1
Lengths = Literal["geometric", "fixed", "heavy", "lognormal"]
EngineMode = Literal["step", "event"]
Topology = Literal["independent", "p2p", "tree", "ring"]

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
    "partition_trainer",  # the same for the trainer's requests and buckets alone
    "partition_worker",  # the same for the worker's alone
    "slow_link",  # for duration_s everything takes ten times as long
)
BUCKET_FAULTS = ("flip", "truncate", "lose", "repeat", "swap", "late")
ENGINE_FAULTS = (
    "oom",  # there is no memory to load: the update is dropped, and finish refused
    "stall",  # also of the trainer or the worker: for duration_s it does nothing, as in a garbage collection
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
SHARED_FIELDS = (
    "max_staleness",
    "max_staleness_steps",
    "weight_sync_steps",
    "staleness_policy",
    "window",
    "queue_capacity",
    "pause_mode",
    "clear_cache",
    "min_engines",
    "sync_attempts",
    "final_sync",
)
"""Of a scenario, a recipe and a trace's declaration alike, under one name."""
SEQUENCE_SHARE, PREFILL_SHARE = 0.01, 0.002  # of a step without a batch, for each sequence or prompt token
SHARED_PREFIX_TOKENS = 20  # of every fourth prompt: more than a block of the KV cache
RANK_CALLS = ("agree", "gather")  # collectives of the trainer's ranks
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
        if not self.target.startswith("engine-") and self.kind not in _OF_ACTORS:
            raise ConfigError("fault target", self.target, f"an engine for fault {self.kind}")


_OF_ACTORS = (*CRASHES, "stall", "hang", "clock_skew", "reward_error")
_CALLS_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(CALL_FAULTS, ENGINE_CALLS),
    **dict.fromkeys(LINK_FAULTS, ENGINE_CALLS),
    **dict.fromkeys(BUCKET_FAULTS, (BUCKET_CALL,)),
    **dict.fromkeys(CRASHES, (*ENGINE_CALLS, *RANK_CALLS)),
    "hang": RANK_CALLS,  # the rank comes duration_s late
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
            their scale and ``max_tokens`` as their end; ``fixed`` is ``mean_tokens`` each. ``lognormal`` has
            ``mean_tokens`` as its mean, sigma 0.8, and no words: a sample repeats one token.
        engine_mode: ``event`` jumps from one change of an engine's batch to the next: the same run, faster.
        batch_tokens: most tokens of one engine step. context_token_s: of a step, for each token that has a KV
            entry. step_jitter: a step takes up to so much less or more, as a part of it.
        prefix_policy, cache_outputs, engine_ranks: see the engine's ``BlockPool`` and ``EngineConfig``.
        prompt_tokens: prompts have up to so many tokens, besides those that some share.
        stock: the engines can do no more than a stock vLLM, and write no events: they prove structure only,
            and get on with the canary in probation.
        step_s: one optimizer step; token_s: one engine step without its batch.
        network_s, jitter: one way of a message takes ``network_s`` times 1 to 1 + jitter.
        bandwidth_bytes_s: of every link that carries weights.
        topology: the way of the buckets, see ``grpo_lab.sim.topology``; ``independent`` gives every engine a
            copy over a link of its own, all at once. ring_slots: buckets under way at once.
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
    sync_scope: SyncScope = "global"
    clear_cache: bool = True
    sync_attempts: int = 3
    min_engines: int = 1
    canary: bool = False
    stock: bool = False
    trainer_ranks: int = 1
    final_sync: bool = False
    lengths: Lengths = "geometric"
    mean_tokens: int = 8
    max_tokens: int = 32
    length_sigma: float = 0.8
    kv_blocks: int = 64
    engine_mode: EngineMode = "step"
    batch_tokens: int = 256
    context_token_s: float = 0.0
    step_jitter: float = 0.0
    prefix_policy: PrefixPolicy = "versioned"
    cache_outputs: bool = True
    engine_ranks: int = 1
    prompt_tokens: int = 12
    step_s: float = 0.5
    token_s: float = 0.02
    reward_s: float = 0.05
    network_s: float = 0.005
    jitter: float = 1.0
    bandwidth_bytes_s: float = 1e6
    bucket_bytes: int = 512
    topology: Topology = "independent"
    ring_slots: int = 2
    steps: int = 4
    checkpoint_every_steps: int = 2
    faults: tuple[Fault, ...] = ()
    faults_until_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value: Any = getattr(self, name)
            whole = isinstance(low, int)
            if not isinstance(value, Integral if whole else Real) or not low <= float(value) <= high:
                kind = "an integer" if whole else "a number"
                raise ConfigError(name, value, f"{kind} from {low} to {high}")
        for name, words in _WORDS.items():
            if getattr(self, name) not in get_args(words):
                raise ConfigError(name, getattr(self, name), f"one of {get_args(words)}")
        if self.max_inflight < self.generations:
            raise ConfigError("max_inflight", self.max_inflight, f"at least generations = {self.generations}")
        if self.min_engines > self.engines:
            raise ConfigError("min_engines", self.min_engines, f"at most engines = {self.engines}")
        _ = self.bound  # its own checks
        members = (*self.engine_names, *self.rank_names, WORKER)
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise ConfigError("faults", fault, "a tuple of Fault")
            if fault.target not in members:
                raise ConfigError("fault target", fault.target, f"one of {', '.join(members)}")

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(f"engine-{index}" for index in range(self.engines))

    @property
    def rank_names(self) -> tuple[str, ...]:
        """The trainer's ranks; rank 0 is the trainer."""
        return (TRAINER, *(f"{TRAINER}-r{rank}" for rank in range(1, self.trainer_ranks)))

    @property
    def longest_sample_s(self) -> float:
        """From a sample's first step to its last in a full engine, stalls, pauses and waiting apart."""
        context_tokens = self.slots * (self.max_tokens + self.prompt_tokens)
        step_s = self.token_s * (1 + SEQUENCE_SHARE * self.slots) + self.context_token_s * context_tokens
        return self.max_tokens * step_s * (1 + self.step_jitter)

    @property
    def longest_drain_s(self) -> float:
        """Until an engine that got every request of the worker has answered them all."""
        return math.ceil(self.max_inflight / self.slots) * self.longest_sample_s

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


_WORDS: Mapping[str, Any] = {
    "pause_mode": PauseMode,
    "sync_scope": SyncScope,
    "lengths": Lengths,
    "engine_mode": EngineMode,
    "prefix_policy": PrefixPolicy,
    "topology": Topology,
}
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("engines", 1, 1024),
    ("slots", 1, 4096),
    ("prompts_per_step", 1, 4096),
    ("generations", 1, 4096),
    ("queue_capacity", 1, 100_000),
    ("sync_attempts", 1, 100),
    ("min_engines", 1, 1024),
    ("max_inflight", 1, 1_000_000),
    ("mean_tokens", 1, 100_000),
    ("max_tokens", 1, 100_000),
    ("length_sigma", 0.0, 4.0),
    ("kv_blocks", 1, 10_000_000),
    ("batch_tokens", 1, 1_000_000),
    ("context_token_s", 0.0, 1.0),
    ("step_jitter", 0.0, 0.99),
    ("engine_ranks", 1, 1024),
    ("trainer_ranks", 1, 64),
    ("prompt_tokens", 1, 100_000),
    ("step_s", 0.0, 3600.0),
    ("token_s", 1e-6, 60.0),
    ("reward_s", 0.0, 60.0),
    ("network_s", 0.0, 5.0),
    ("jitter", 0.0, 100.0),
    ("bandwidth_bytes_s", 1.0, 1e15),
    ("bucket_bytes", 256, 1 << 30),
    ("ring_slots", 1, 64),
    ("steps", 1, 1_000_000),
    ("checkpoint_every_steps", 0, 1_000_000),
    ("faults_until_s", 0.0, 86_400.0),
)


def write_failure(path: Path, row: Mapping[str, Any]) -> None:
    """A failure file, whole or not at all. Raises ``TraceError`` when the place cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(row, indent=1) + "\n")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from error


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
        write_failure(path, row)
