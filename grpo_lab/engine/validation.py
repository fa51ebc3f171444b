"""Which requests can be served at all, in vLLM's words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_lab.engine.block_pool import BLOCK_TOKENS
from grpo_lab.engine.policy import Policy
from grpo_lab.types import SamplingParams


def request_problem(policy: Policy, prompt: Sequence[int], sampling: SamplingParams) -> str:
    """Why the request can never be served, or "" when it can."""
    limit, wanted = policy.max_model_len, sampling
    blocks = -(-min(limit, len(prompt) + wanted.max_tokens) // BLOCK_TOKENS)
    checks = (
        (len(prompt) > 0, "The decoder prompt cannot be empty"),
        (len(prompt) <= limit, _too_long(len(prompt), limit)),
        (
            len(prompt) != limit,
            f"The decoder prompt (length {len(prompt)}) plus the number of requested output tokens (at least "
            f"1) is longer than the maximum model length of {limit}. Make sure that `max_model_len` is no "
            "smaller than the number of text tokens (prompt + requested output tokens).",
        ),
        (wanted.max_tokens >= 1, f"max_tokens must be at least 1, got {wanted.max_tokens}."),
        (0 <= wanted.temperature < math.inf, f"temperature={wanted.temperature}: must be finite, at least 0"),
        (0 < wanted.top_p <= 1, f"top_p must be in (0, 1], got {wanted.top_p}."),
        (wanted.top_k >= -1, f"top_k must be 0 (disable), or at least 1, got {wanted.top_k}."),
        (
            0 <= wanted.min_tokens <= wanted.max_tokens,
            f"min_tokens={wanted.min_tokens}: must be from 0 to max_tokens={wanted.max_tokens}",
        ),
        (blocks <= policy.num_blocks, f"may need {blocks} KV blocks; the engine has {policy.num_blocks}"),
    )
    return next((text for ok, text in checks if not ok), "") or vocabulary_problem(policy, prompt)


def _too_long(tokens: int, limit: int) -> str:
    at_least = "at least " if tokens == limit + 1 else ""
    return (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains "
        f"{at_least}{tokens} input tokens, which exceeds this limit even without any output tokens. "
        f"Please reduce the length of the input prompt. (parameter=input_tokens, value={tokens})"
    )


def sequence_problem(policy: Policy, ids: Sequence[int]) -> str:
    """Why the sequence cannot be scored, or ""."""
    if not 1 <= len(ids) <= policy.max_model_len:
        return f"a sequence of {len(ids)} tokens: 1 to {policy.max_model_len} can be scored"
    return vocabulary_problem(policy, ids)


def vocabulary_problem(policy: Policy, ids: Sequence[int]) -> str:
    if min(ids) >= 0 and max(ids) < policy.vocab_size:
        return ""
    wrong = min(ids) if min(ids) < 0 else max(ids)
    return f"Token id {wrong} is out of vocabulary"
