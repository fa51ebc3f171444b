"""An engine's configuration, states and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from grpo_lab.engine.block_pool import PrefixPolicy
from grpo_lab.errors import ConfigError


class RunState(Enum):
    """``DRAINING`` finishes what is in flight and admits nothing; ``FROZEN`` runs no step."""

    RUNNING = "running"
    DRAINING = "draining"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What kind of engine it is.

    Raises ``ConfigError`` for less than one rank.

    Attributes:
        name: the member's name in the trace.
        seed: part of every sample's key.
        cache_outputs: completions enter the prefix cache too, not prompts alone.
        start_id: names this run of the process: it must differ after every start ("": unknown).
        ranks: workers (tensor or pipeline parallel) that hold a part of the weights each and switch together.
    """

    name: str = "engine-0"
    max_num_seqs: int = 128
    max_batched_tokens: int = 2048
    seed: int = 0
    prefix_policy: PrefixPolicy = "versioned"
    prefix_caching: bool = True
    start_id: str = ""
    cache_outputs: bool = True
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError("ranks", self.ranks, "an integer of at least 1")


@dataclass(slots=True)
class Counters:
    """Totals since the start, for /metrics."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
