"""Drawing tokens: counter-based random numbers, truncation, logprobs. Vectorised over sequences.

The random number of a token depends on (sample key, position) alone, so what a sample says does not
depend on its neighbours in the batch, on scheduling or on preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_lab.engine.logit_rules import apply_rules, drop_unlikely
from grpo_lab.engine.request import Request, StepOutput

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) per (key, position): the output function of SplitMix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = np.array(keys, dtype=np.uint64) + np.array(positions, dtype=np.uint64) * _GOLDEN
    for _ in range(2):  # twice, as neighbouring keys and positions must not be related
        state = state + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: Tensor, requests: Sequence[Request]) -> StepOutput:
    """Draws one token per row of ``logits`` [sequences, vocabulary] (float32) by inverting the CDF.

    The logprob of a token is that of the distribution it was drawn from (after rules, temperature, top_k,
    top_p, min_tokens), or the model's own where a request asks for ``raw_logprobs``. Greedy rows
    (temperature 0) report the logprob at temperature 1.
    """
    raw = logits.log_softmax(-1) if any(request.extras.raw_logprobs for request in requests) else None
    logits = apply_rules(logits, requests)
    logits = _forbid_early_stops(logits, requests)
    temperature = [request.sampling.temperature for request in requests]
    if any(value not in (0.0, 1.0) for value in temperature):
        divisor = torch.tensor([value or 1.0 for value in temperature], dtype=logits.dtype)
        logits = logits / divisor[:, None]
    logits = drop_unlikely(logits, requests)
    if any(request.sampling.top_k > 0 or request.sampling.top_p < 1.0 for request in requests):
        logits = _truncate(logits, requests)
    logprobs = logits.log_softmax(-1)
    chosen = _draw(logprobs, requests, temperature)
    if raw is not None:
        wanted = torch.tensor([request.extras.raw_logprobs for request in requests])
        logprobs = torch.where(wanted[:, None], raw, logprobs)
    return _report(logprobs, chosen, requests)


def _report(logprobs: Tensor, chosen: Tensor, requests: Sequence[Request]) -> StepOutput:
    picked = logprobs.gather(1, chosen[:, None])
    top = {
        row: most_likely(logprobs[row], request.top_logprobs)
        for row, request in enumerate(requests)
        if request.top_logprobs > 0
    }
    ranks: dict[int, int] = {}
    if any(request.extras.ranks for request in requests):
        counted = (logprobs >= picked).sum(-1).tolist()
        ranks = {row: counted[row] for row, request in enumerate(requests) if request.extras.ranks}
    return StepOutput(chosen.tolist(), picked[:, 0].tolist(), top, ranks)


def _draw(logprobs: Tensor, requests: Sequence[Request], temperature: list[float]) -> Tensor:
    greedy = [value == 0.0 for value in temperature]
    if all(greedy):
        return logprobs.argmax(-1)
    u = uniforms([request.sample_key for request in requests], [len(r.token_ids) for r in requests])
    cdf = logprobs.double().exp_().cumsum(-1)
    target = torch.from_numpy(u)[:, None] * cdf[:, -1:]
    chosen = torch.searchsorted(cdf, target, right=True)[:, 0]
    # Rounding may push a target to the very end of the CDF, where no token is.
    best = logprobs.argmax(-1)
    chosen = torch.where(chosen < logprobs.shape[1], chosen, best)
    return torch.where(torch.tensor(greedy), best, chosen) if any(greedy) else chosen


def _truncate(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Keeps the top_k largest, then the smallest set whose probability reaches top_p."""
    vocabulary = logits.shape[1]
    greedy = [request.sampling.temperature == 0.0 for request in requests]
    k = [
        vocabulary if g or r.sampling.top_k <= 0 else r.sampling.top_k
        for r, g in zip(requests, greedy, strict=True)
    ]
    p = [1.0 if g else r.sampling.top_p for r, g in zip(requests, greedy, strict=True)]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    drop = torch.arange(vocabulary)[None, :] >= torch.tensor(k)[:, None]
    ordered = ordered.masked_fill(drop, float("-inf"))
    probability = ordered.double().softmax(-1)
    before = probability.cumsum(-1) - probability
    limit = torch.tensor(p, dtype=torch.float64)[:, None]
    drop = (before >= limit) & (limit < 1.0)
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _forbid_early_stops(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    early = [
        (row, sorted(request.stop_token_ids))
        for row, request in enumerate(requests)
        if request.num_output_tokens < request.sampling.min_tokens and request.stop_token_ids
    ]
    if not early:
        return logits
    logits = logits.clone()
    for row, stops in early:
        logits[row, [token for token in stops if token < logits.shape[1]]] = float("-inf")
    return logits


def most_likely(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    values, ids = logprobs.topk(min(count, logprobs.shape[0]))
    return list(zip(ids.tolist(), values.tolist(), strict=True))
