"""Causal attention over sequences that lie one behind the other in a single row, without padding.

Importing this module registers the attention function ``grpo_lab_varlen`` with transformers. It acts
when the caller passes ``cu_seq_lens_q`` (as ``packed_logprobs`` does) and is plain SDPA otherwise, so a
model that was switched to it still evaluates and generates as before.

Attention dropout is never applied: the engines that sampled the tokens have none.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION_NAME = "grpo_lab_varlen"
Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value
_MAX_PADDING = 2.0  # padded / real tokens above which sequences are attended to one by one


def varlen_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers calls.

    Args:
        query: (1, heads, tokens, head size); key and value may have fewer heads (grouped queries).
        attention_mask: ignored for packed rows: the boundaries say everything.
        cu_seq_lens_q: (sequences + 1) int32, where each sequence begins, and the number of tokens.
        max_length_q: the longest sequence.

    Returns:
        (1, tokens, heads, head size), and no attention weights.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=0.0, scaling=scaling, **kwargs
        )
        return output, None
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window), None
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    rows = _rows(query), _rows(key), _rows(value)
    starts = cu_seq_lens_q.tolist()
    sequences = len(starts) - 1
    if sequences * max_length_q > _MAX_PADDING * starts[-1]:
        return _one_by_one(rows, starts, scaling, sliding_window), None
    return _padded(rows, cu_seq_lens_q, max_length_q, scaling, sliding_window), None


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - exists in GPU builds only

    left = -1 if sliding_window is None else sliding_window - 1
    output = varlen_attn(
        _rows(query).contiguous(),
        _rows(key).contiguous(),
        _rows(value).contiguous(),
        cu_seq_lens,
        cu_seq_lens,
        longest,
        longest,
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)  # no auxiliary outputs were asked for
    return output.unsqueeze(0)


def _rows(heads: Tensor) -> Tensor:
    """(1, heads, tokens, size) -> (tokens, heads, size)."""
    return heads[0].transpose(0, 1)


def _padded(
    rows: Heads, cu_seq_lens: Tensor, longest: int, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """All sequences in one call, padded on the right: a causal mask keeps real tokens from padding."""
    lengths = cu_seq_lens.diff()
    sequences = lengths.numel()
    sequence = torch.repeat_interleave(torch.arange(sequences, device=lengths.device), lengths)
    place = torch.arange(int(cu_seq_lens[-1]), device=lengths.device) - cu_seq_lens[sequence]
    index = sequence * longest + place

    def pad(tensor: Tensor) -> Tensor:
        empty = tensor.new_zeros(sequences * longest, *tensor.shape[1:])
        return empty.index_copy(0, index, tensor).view(sequences, longest, *tensor.shape[1:]).transpose(1, 2)

    query, key, value = rows
    output = (
        _causal((pad(query), pad(key), pad(value)), scaling, sliding_window).transpose(1, 2).flatten(0, 1)
    )
    return output.index_select(0, index).unsqueeze(0)


def _one_by_one(rows: Heads, starts: list[int], scaling: float | None, sliding_window: int | None) -> Tensor:
    outputs = []
    for start, end in itertools.pairwise(starts):
        query, key, value = (tensor[start:end].transpose(0, 1).unsqueeze(0) for tensor in rows)
        outputs.append(_causal((query, key, value), scaling, sliding_window)[0].transpose(0, 1))
    return torch.cat(outputs).unsqueeze(0)


def _causal(heads: Heads, scaling: float | None, sliding_window: int | None) -> Tensor:
    query, key, value = heads
    length = query.shape[2]
    if sliding_window is None or length <= sliding_window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    place = torch.arange(length, device=query.device)
    age = place[:, None] - place[None, :]
    mask = (age >= 0) & (age < sliding_window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


AttentionInterface.register(ATTENTION_NAME, varlen_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
