"""One sequence on its way through the engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from grpo_lab.types import RequestKind, SamplingParams, SyncId

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class WeightIdentity:
    """Which weights the engine serves. ``label`` is what ``/weight_info`` says."""

    label: str = "default"
    term: int = 0
    version: int = 0

    @classmethod
    def of(cls, sync: SyncId) -> WeightIdentity:
        return cls(str(sync), sync.term, sync.version)

    @property
    def weights(self) -> tuple[int, int]:
        return (self.term, self.version)


@dataclass(slots=True)
class Span:
    """Tokens ``[start, end)`` of a completion, sampled under ``identity`` in steps first..last.

    ``kv`` is the oldest (term, version) whose KV entries they attended to.
    """

    identity: WeightIdentity
    start: int
    end: int
    first_step: int
    last_step: int
    kv: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What changes the logits before a token is drawn, under vLLM's names and with its formulas.

    Attributes:
        min_p: least probability of a token, relative to the likeliest one's; 0 is off.
        presence_penalty, frequency_penalty: subtracted once, or once per occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in prompt or
            output (Keskar et al., arXiv:1909.05858); 1 is off.
        bias: (token id, added to its logit) pairs.
        allowed: the only token ids that may be drawn; empty is all.
    """

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()

    @property
    def penalise(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class Extras:
    """What most requests do without.

    Attributes:
        rules: None leaves the logits as they are.
        cache_salt: requests share prefix cache blocks only with those of the same salt.
        prompt_logprobs: how many of the likeliest tokens to report per prompt token; None reports nothing.
        raw_logprobs: report the model's own distribution (vLLM's default), not the one drawn from.
        ranks: report the rank of every drawn token.
        on_token: called after every booked token and at the end; must not block or raise.
    """

    rules: LogitRules | None = None
    cache_salt: bytes = b""
    prompt_logprobs: int | None = None
    raw_logprobs: bool = False
    ranks: bool = False
    on_token: Callable[[], None] | None = None


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class PromptScore:
    """One prompt token given those before it; ``top`` are the likeliest (token, logprob) pairs there."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's and the policy's view of a sequence.

    ``token_ids`` is prompt and output together; ``num_computed_tokens`` of them have KV entries in
    ``block_table``. ``sample_key`` and the token's position are all that its random numbers depend on.
    ``final_tokens`` is the length of its completion, where the policy knows it (0: not asked for yet).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    done: asyncio.Future[None]
    kind: RequestKind = "rollout"
    sample_key: int = 0
    top_logprobs: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    arrival_s: float = 0.0
    first_token_s: float | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_blocks: int = 0
    parent_hash: bytes = b""
    kv_weights: tuple[int, int] | None = None
    recomputed_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    extras: Extras = NO_EXTRAS
    ranks: list[int] = field(default_factory=list)
    prompt_scores: list[PromptScore] | None = None
    last_token_s: float | None = None
    scheduled_s: float | None = None
    num_cached_tokens: int = 0
    final_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens ``[start, start + count)`` of ``request`` are computed in this step.

    ``samples`` is True when they reach the end of the sequence, so that the step draws a new token.
    """

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a policy drew: one entry for each scheduled request with ``samples``, in their order.

    ``top`` holds the most likely (token, logprob) pairs, ``ranks`` the drawn token's rank, of requests that
    asked for them, by place.
    """

    token_ids: list[int]
    logprobs: list[float]
    top: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)


def sample_key(seed: int, request_id: str, sample_seed: int | None) -> int:
    """64-bit key of a sample: of (engine seed, sample seed), or of the request's id when it has none."""
    words = f"{seed}:{sample_seed}" if sample_seed is not None else f"{seed}:id:{request_id}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")
