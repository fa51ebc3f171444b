"""A real model as tokens' source: paged KV cache, batched prefill and decode on one thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_lab.engine.block_pool import BLOCK_TOKENS
from grpo_lab.engine.model import EMBEDDING, HEAD, CausalLM, Weights, read_weights
from grpo_lab.engine.model_config import ModelConfig
from grpo_lab.engine.request import PromptScore, Scheduled, StepOutput
from grpo_lab.engine.sampling import most_likely, sample


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences whose new tokens are attended to together, padded to the longest.

    Attributes:
        tokens: slice of the packed batch that holds their new tokens.
        rows: [sequences, new tokens] places in the packed batch (None for one new token each).
        valid: [sequences, new tokens], False where padded (None likewise).
        blocks: [sequences * blocks] block numbers, flat.
        mask: [sequences, 1, new tokens, context], additive.
    """

    tokens: slice
    rows: Tensor | None
    valid: Tensor | None
    blocks: Tensor
    mask: Tensor


class TorchPolicy:
    """Llama or Qwen2 from a Hugging Face directory, float32.

    KV cache: [layers, 2, blocks, 16, kv_heads, head_dim]. A step packs all new tokens into one batch
    for the linear layers; attention gathers each sequence's blocks, decode and prefill apart.

    ``batch_invariant=True`` computes every token of every sequence alone, with shapes that depend only
    on its position: its numbers do not depend on neighbours, chunking or preemption, bit for bit. It
    costs about ten times the time at 64 sequences.

    Raises ``ModelError`` for a directory that is missing or holds another kind of model.
    """

    def __init__(
        self,
        directory: Path | str,
        num_blocks: int = 1024,
        max_model_len: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        path = Path(directory)
        config = ModelConfig.read(path)
        self.config = config
        self.batch_invariant = batch_invariant
        self.num_blocks = num_blocks
        self.max_model_len = min(max_model_len or config.max_positions, config.max_positions)
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self.tied: Mapping[str, str] = {HEAD: EMBEDDING} if config.tied else {}
        self._model = CausalLM(config, self.max_model_len)
        self._served, self._staging = Weights(config), Weights(config)
        self._served.copy_from(dict(read_weights(path)))
        shape = (config.num_layers, 2, num_blocks, BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
        self._cache = torch.zeros(shape)
        self._tainted = False
        self._by_block = self._cache.view(config.num_layers, 2, num_blocks, -1)
        self._by_token = self._cache.view(config.num_layers, 2, num_blocks * BLOCK_TOKENS, -1)

    def parameters(self) -> Mapping[str, Tensor]:
        return self._served.named

    def staging(self) -> Mapping[str, Tensor]:
        return self._staging.named

    def activate(self) -> None:
        self._served, self._staging = self._staging, self._served
        if self._tainted:  # masked places have weight 0, and 0 * NaN would be NaN under good weights too
            self._cache.zero_()
            self._tainted = False

    @torch.inference_mode()
    def step(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        output = self._step(scheduled)
        for item in scheduled:
            request = item.request
            if request.extras.prompt_logprobs is not None and item.samples and request.prompt_scores is None:
                request.prompt_scores = self._prompt_scores(
                    request.prompt_token_ids, request.extras.prompt_logprobs
                )
        if not math.isfinite(sum(output.logprobs)):
            self._tainted = True
        return output

    def _step(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        sampled = [item for item in scheduled if item.samples]
        if self.batch_invariant:
            rows = [self._alone(item) for item in scheduled]
            logits = [row for row, item in zip(rows, scheduled, strict=True) if item.samples]
            outputs = [sample(row, [item.request]) for row, item in zip(logits, sampled, strict=True)]
            return StepOutput(
                [output.token_ids[0] for output in outputs],
                [output.logprobs[0] for output in outputs],
                {row: output.top[0] for row, output in enumerate(outputs) if output.top},
                {row: output.ranks[0] for row, output in enumerate(outputs) if output.ranks},
            )
        if not sampled:
            self._logits(scheduled)
            return StepOutput([], [])
        return sample(self._logits(scheduled), [item.request for item in sampled])

    def _alone(self, item: Scheduled) -> Tensor:
        """Token by token: the only shapes that no chunking can change. Returns the last token's logits."""
        for position in range(item.start, item.start + item.count):
            logits = self._logits([Scheduled(item.request, position, 1)], all_rows=True)
        return logits

    def _logits(self, scheduled: Sequence[Scheduled], all_rows: bool = False) -> Tensor:
        """Logits [sampling sequences, vocabulary], in the order of ``scheduled``."""
        order = sorted(range(len(scheduled)), key=lambda i: (_bucket(scheduled[i].count), i))
        items = [scheduled[i] for i in order]
        ids: list[int] = []
        positions: list[int] = []
        for item in items:
            ids += item.request.token_ids[item.start : item.start + item.count]
            positions += range(item.start, item.start + item.count)
        ends = torch.tensor([item.count for item in items]).cumsum(0) - 1
        place = torch.tensor(positions)
        groups, slots = self._groups(items, place)
        attend = _PagedAttention(self, groups, slots)
        hidden = self._model.hidden_states(self._served, torch.tensor(ids), place, attend)
        last = {index: int(end) for index, end in zip(order, ends.tolist(), strict=True)}
        wanted = [last[i] for i, item in enumerate(scheduled) if all_rows or item.samples]
        rows = hidden if len(wanted) == hidden.shape[0] and wanted == sorted(wanted) else hidden[wanted]
        return self._model.logits(self._served, rows)

    def _groups(self, items: Sequence[Scheduled], positions: Tensor) -> tuple[list[_Group], Tensor]:
        """Groups by number of new tokens (next power of two), and the cache slot of every new token."""
        groups: list[_Group] = []
        slots: list[Tensor] = []
        first = 0
        while first < len(items):
            bucket = _bucket(items[first].count)
            last = first
            while last < len(items) and _bucket(items[last].count) == bucket:
                last += 1
            offset = sum(s.shape[0] for s in slots)
            group, group_slots = self._group(items[first:last], offset, positions)
            groups.append(group)
            slots.append(group_slots)
            first = last
        return groups, torch.cat(slots)

    def _group(self, items: Sequence[Scheduled], offset: int, positions: Tensor) -> tuple[_Group, Tensor]:
        longest = max(item.start + item.count for item in items)
        width = -(-longest // BLOCK_TOKENS)
        tables = torch.tensor([_padded(item.request.block_table, width) for item in items])
        counts = torch.tensor([item.count for item in items])
        new, total = int(counts.max()), int(counts.sum())
        context = torch.arange(width * BLOCK_TOKENS)
        tokens = slice(offset, offset + total)
        place = positions[tokens]
        if new == 1:
            rows = valid = None
            slot = (
                tables.gather(1, (place // BLOCK_TOKENS)[:, None])[:, 0] * BLOCK_TOKENS + place % BLOCK_TOKENS
            )
            seen = context[None, :] <= place[:, None]
            mask = torch.where(seen, 0.0, float("-inf"))[:, None, None, :]
        else:
            step = torch.arange(new)
            valid = step[None, :] < counts[:, None]
            starts = torch.tensor([item.start for item in items])
            rows = (counts.cumsum(0) - counts)[:, None] + torch.minimum(step[None, :], counts[:, None] - 1)
            at = starts[:, None] + torch.minimum(step[None, :], counts[:, None] - 1)
            slot = (tables.gather(1, at // BLOCK_TOKENS) * BLOCK_TOKENS + at % BLOCK_TOKENS)[valid]
            mask = torch.where(context[None, None, :] <= at[:, :, None], 0.0, float("-inf"))[:, None]
        return _Group(tokens, rows, valid, tables.flatten(), mask), slot

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Teacher forcing without the KV cache: padded batches, causal mask."""
        together = 1 if self.batch_invariant else 32
        scores: list[list[float]] = []
        for first in range(0, len(sequences), together):
            scores += self._score(sequences[first : first + together])
        return scores

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        longest = max(len(ids) for ids in sequences)
        if longest < 2:
            return [[] for _ in sequences]
        ids = torch.tensor([_padded(sequence, longest) for sequence in sequences])
        picked = self._all_logprobs(ids).gather(2, ids[:, 1:, None])[..., 0].tolist()
        return [row[: len(ids) - 1] for row, ids in zip(picked, sequences, strict=True)]

    def _all_logprobs(self, ids: Tensor) -> Tensor:
        """Logprobs [sequences, length - 1, vocabulary] of what follows each place but the last."""
        count, longest = ids.shape
        positions = torch.arange(longest).repeat(count)
        attend = _CausalAttention(count, longest)
        hidden = self._model.hidden_states(self._served, ids.flatten(), positions, attend)
        hidden = hidden.view(count, longest, -1)[:, :-1].reshape(count * (longest - 1), -1)
        return self._model.logits(self._served, hidden).log_softmax(-1).view(count, longest - 1, -1)

    def _prompt_scores(self, prompt: Sequence[int], top: int) -> list[PromptScore]:
        """Of every prompt token but the first; ``top`` -1 is the whole vocabulary."""
        if len(prompt) < 2:
            return []
        rows = self._all_logprobs(torch.tensor([prompt]))[0]
        picked = rows.gather(1, torch.tensor(prompt[1:])[:, None])
        ranks = (rows >= picked).sum(-1).tolist()
        count = self.vocab_size if top < 0 else top
        return [
            PromptScore(value, rank, most_likely(row, count) if count else [])
            for value, rank, row in zip(picked[:, 0].tolist(), ranks, rows, strict=True)
        ]

    def keep_tied_head(self) -> None:
        """Gives a tied head memory of its own: later writes to the embedding do not reach it.

        A vLLM on CPU behaves so, as it packs the head once, when the model is first loaded.
        """
        self._served.head = self._served.embedding.clone()


class _PagedAttention:
    """Writes new keys and values into the cache, then attends to each sequence's gathered blocks."""

    def __init__(self, policy: TorchPolicy, groups: Sequence[_Group], slots: Tensor) -> None:
        self._by_block, self._by_token = policy._by_block, policy._by_token
        self._groups, self._slots = groups, slots
        self._kv_heads, self._head_dim = policy.config.num_kv_heads, policy.config.head_dim

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = q.shape[0]
        self._by_token[layer, 0].index_copy_(0, self._slots, k.reshape(count, -1))
        self._by_token[layer, 1].index_copy_(0, self._slots, v.reshape(count, -1))
        parts = [self._attend(layer, group, q[group.tokens]) for group in self._groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, group: _Group, q: Tensor) -> Tensor:
        sequences, heads = group.mask.shape[0], q.shape[1]
        shape = (sequences, group.mask.shape[-1], self._kv_heads, self._head_dim)
        k = F.embedding(group.blocks, self._by_block[layer, 0]).view(shape).transpose(1, 2)
        v = F.embedding(group.blocks, self._by_block[layer, 1]).view(shape).transpose(1, 2)
        if group.rows is None or group.valid is None:
            # One new token: the query heads of a key head take the place of query positions.
            q = q.reshape(sequences, self._kv_heads, heads // self._kv_heads, self._head_dim)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
            return out.reshape(sequences, -1)
        if heads != self._kv_heads:
            k = k.repeat_interleave(heads // self._kv_heads, dim=1)
            v = v.repeat_interleave(heads // self._kv_heads, dim=1)
        out = F.scaled_dot_product_attention(q[group.rows].transpose(1, 2), k, v, attn_mask=group.mask)
        return out.transpose(1, 2)[group.valid].flatten(1)


class _CausalAttention:
    """Attention within [sequences, length] padded at the end, for scoring."""

    def __init__(self, sequences: int, length: int) -> None:
        self._sequences, self._length = sequences, length

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.reshape(self._sequences, self._length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        if q.shape[1] != k.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(self._sequences * self._length, -1)


def _bucket(count: int) -> int:
    """Sequences of one bucket are padded to each other: at most twice their tokens."""
    return (count - 1).bit_length()


def _padded(ids: Sequence[int], length: int) -> list[int]:
    if len(ids) >= length:
        return list(ids[:length])
    return [*ids, *([0] * (length - len(ids)))]
