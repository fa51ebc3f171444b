"""Penalties, biases and min_p on logits, as vLLM defines them. Rows without rules are left untouched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lab.engine.request import LogitRules, Request


def apply_rules(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Allowed tokens, biases and penalties of ``logits`` [sequences, vocabulary]; before temperature."""
    rows = [(row, r.extras.rules, r) for row, r in enumerate(requests) if r.extras.rules is not None]
    if not rows:
        return logits
    logits = logits.clone()
    for row, rules, request in rows:
        if rules.allowed:
            allowed = torch.full_like(logits[row], float("-inf"))
            allowed[list(rules.allowed)] = 0.0
            logits[row] += allowed
        if rules.bias:
            ids, values = zip(*rules.bias, strict=True)
            logits[row, list(ids)] += torch.tensor(values, dtype=logits.dtype)
        if rules.penalise:
            logits[row] = _penalised(logits[row], rules, request)
    return logits


def drop_unlikely(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """min_p: drops tokens below ``min_p`` times the likeliest one's probability; after temperature."""
    least = [r.extras.rules.min_p if r.extras.rules is not None else 0.0 for r in requests]
    if not any(least):
        return logits
    floor = torch.tensor(least, dtype=logits.dtype).log()[:, None] + logits.max(-1, keepdim=True).values
    return logits.masked_fill(logits < floor, float("-inf"))


def _penalised(row: Tensor, rules: LogitRules, request: Request) -> Tensor:
    vocabulary = row.shape[0]
    output = torch.bincount(torch.tensor(request.output_token_ids, dtype=torch.long), minlength=vocabulary)
    seen = torch.bincount(torch.tensor(request.token_ids, dtype=torch.long), minlength=vocabulary) > 0
    if rules.repetition_penalty != 1.0:
        scaled = torch.where(row > 0, row / rules.repetition_penalty, row * rules.repetition_penalty)
        row = torch.where(seen, scaled, row)
    return row - rules.frequency_penalty * output - rules.presence_penalty * (output > 0)
