"""An engine's configuration, states and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, get_args

from grpo_lab.engine.block_pool import PrefixPolicy
from grpo_lab.errors import ConfigError


class RunState(Enum):
    """``DRAINING`` finishes what is in flight and admits nothing; ``FROZEN`` runs no step."""

    RUNNING = "running"
    DRAINING = "draining"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``name`` is the member's name in the trace. ``seed`` is part of every sample's key. ``start_id`` names this
    run of the process: it must differ after every start ("": unknown).
    """

    name: str = "engine-0"
    max_num_seqs: int = 128
    max_batched_tokens: int = 2048
    seed: int = 0
    prefix_policy: PrefixPolicy = "versioned"
    prefix_caching: bool = True
    start_id: str = ""


@dataclass(slots=True)
class Counters:
    """Totals since the start, for /metrics."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
