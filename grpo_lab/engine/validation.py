"""Which requests can be served at all."""

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
        (len(prompt) > 0, "The prompt has no tokens; give at least one"),
        (len(prompt) < limit, f"The prompt has {len(prompt)} tokens; a context of {limit} leaves no room"),
        (wanted.max_tokens >= 1, f"max_tokens={wanted.max_tokens}: must be at least 1"),
        (0 <= wanted.temperature < math.inf, f"temperature={wanted.temperature}: must be finite, at least 0"),
        (0 < wanted.top_p <= 1, f"top_p={wanted.top_p}: must be above 0 and at most 1"),
        (wanted.top_k >= -1, f"top_k={wanted.top_k}: must be -1 or 0 (off), or at least 1"),
        (
            0 <= wanted.min_tokens <= wanted.max_tokens,
            f"min_tokens={wanted.min_tokens}: must be from 0 to max_tokens={wanted.max_tokens}",
        ),
        (blocks <= policy.num_blocks, f"may need {blocks} KV blocks; the engine has {policy.num_blocks}"),
    )
    return next((text for ok, text in checks if not ok), "") or vocabulary_problem(policy, prompt)


def sequence_problem(policy: Policy, ids: Sequence[int]) -> str:
    """Why the sequence cannot be scored, or ""."""
    if not 1 <= len(ids) <= policy.max_model_len:
        return f"a sequence of {len(ids)} tokens: 1 to {policy.max_model_len} can be scored"
    return vocabulary_problem(policy, ids)


def vocabulary_problem(policy: Policy, ids: Sequence[int]) -> str:
    if min(ids) >= 0 and max(ids) < policy.vocab_size:
        return ""
    wrong = next(token for token in ids if not 0 <= token < policy.vocab_size)
    return f"Token id {wrong} is out of vocabulary (size {policy.vocab_size})"
