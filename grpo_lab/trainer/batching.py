"""From an optimizer step's groups to packed micro-batches, the same number on every rank."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_lab.algorithms import group_advantages, token_weights
from grpo_lab.algorithms.advantages import ScaleRewards
from grpo_lab.errors import ConfigError, InvariantViolation
from grpo_lab.types import RolloutGroup, RolloutSample


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What optimizer step ``optimizer_step`` (the number of steps applied before it) consumes.

    Rank 0 decides it when the step begins, under ``version``; all ranks get the same plan.
    ``weights_are_version`` says that the parameters are still exactly those of ``version``, ``cause`` is
    rank 0's newest event.
    """

    term: int
    optimizer_step: int
    version: int
    groups: tuple[RolloutGroup, ...]
    weights_are_version: bool = False
    wait_s: float = 0.0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A sample with signal: its advantage, and the weight of each of its tokens in the step's loss."""

    sample: RolloutSample
    group_id: str
    advantage: float
    token_weight: float

    @property
    def input_tokens(self) -> int:
        """Tokens that go through the model: the last one predicts nothing."""
        return len(self.sample.prompt_token_ids) + len(self.sample.completion_token_ids) - 1


def train_samples(
    plan: StepPlan,
    *,
    loss_type: str,
    scale_rewards: ScaleRewards,
    advantage_epsilon: float,
    max_completion_length: int,
) -> list[TrainSample]:
    """The samples of a plan that have a gradient, in the plan's order.

    Token weights count every sample that has a reward, also those without signal, which are then left
    out: their surrogate is proportional to an advantage of 0, so the gradient is the same without them.

    Raises:
        InvariantViolation: behaviour logprobs that are not finite, or not one per token (S24).
    """
    rewards = [[sample.reward for sample in group.samples] for group in plan.groups]
    advantages = group_advantages(rewards, scale_rewards, advantage_epsilon)
    scored = [
        (sample, group.group_id, advantage)
        for group, row in zip(plan.groups, advantages, strict=True)
        for sample, advantage in zip(group.samples, row, strict=True)
        if advantage is not None
    ]
    lengths = [len(sample.completion_token_ids) for sample, _, _ in scored]
    weights = token_weights(loss_type, lengths, max_completion_length)
    kept = []
    for (sample, group_id, advantage), weight in zip(scored, weights, strict=True):
        _check_logprobs(sample)
        if advantage != 0.0 and sample.completion_token_ids:
            kept.append(TrainSample(sample, group_id, advantage, weight))
    return kept


def _check_logprobs(sample: RolloutSample) -> None:
    tokens, logprobs = len(sample.completion_token_ids), sample.behaviour_logprobs
    if len(logprobs) != tokens or not all(map(math.isfinite, logprobs)):
        raise InvariantViolation(
            f"sample {sample.sample_id} has {tokens} tokens and {len(logprobs)} behaviour logprobs; "
            "there must be one finite logprob per token",
            rule="S24",
        )


def same_weights_mask(sample: RolloutSample, term: int, version: int) -> list[bool]:
    """Which tokens ``version`` sampled, with no older KV behind them.

    Their behaviour logprobs must equal those of a trainer that holds exactly this version.
    """
    count = len(sample.completion_token_ids)
    if not sample.spans:
        return [sample.version_first == sample.version_last == version] * count
    mask = [False] * count
    for span in sample.spans:
        if (span.term, span.version) == (term, version) and span.kv_version in (None, version):
            mask[span.start : span.end] = [True] * (min(span.end, count) - span.start)
    return mask


def split_by_tokens(lengths: Sequence[int], ranks: int, token_budget: int) -> list[list[list[int]]]:
    """Micro-batches of sample indices: ``result[rank][micro_batch]``, equally many on every rank.

    Longest first into the emptiest bin (Graham 1969), with as few bins a rank as the budget allows, so
    ranks get nearly equal numbers of tokens. A micro-batch may be empty when samples are few.

    Raises:
        ConfigError: one sample alone is larger than ``token_budget``.

    >>> split_by_tokens([5, 3, 2, 4], ranks=2, token_budget=8)
    [[[0, 2]], [[3, 1]]]
    """
    longest = max(lengths, default=0)
    if longest > token_budget:
        raise ConfigError(
            "token_budget",
            token_budget,
            f"at least {longest}, the tokens of the longest sample of this step",
            "Raise token_budget, or shorten prompts or max_completion_length",
        )
    passes = max(1, math.ceil(sum(lengths) / (token_budget * ranks)))
    while True:
        bins = _fill(lengths, passes * ranks)
        if all(sum(lengths[index] for index in one) <= token_budget for one in bins):
            return [bins[rank::ranks] for rank in range(ranks)]
        passes += 1


def _fill(lengths: Sequence[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for sample in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        tokens, index = heapq.heappop(heap)
        bins[index].append(sample)
        heapq.heappush(heap, (tokens + lengths[sample], index))
    return bins


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences one behind the other in one row, and what is known about each completion token.

    ``input_ids`` and ``position_ids`` have shape (1, tokens); ``cu_seq_lens`` (sequences + 1) holds where
    each begins. ``logit_places`` (completion tokens) are the places whose logits predict ``targets``.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seq_lens: Tensor
    longest: int
    logit_places: Tensor
    targets: Tensor

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]


def pack(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str) -> PackedBatch:
    """Packs (prompt, completion) pairs; each prompt and each completion has at least one token.

    A completion's last token is a target only, so it is not fed.
    """
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    places: list[int] = []
    targets: list[int] = []
    for prompt, completion in sequences:
        first = starts[-1] + len(prompt) - 1
        places.extend(range(first, first + len(completion)))
        targets.extend(completion)
        ids.extend(prompt)
        ids.extend(completion[:-1])
        positions.extend(range(len(prompt) + len(completion) - 1))
        starts.append(len(ids))
    longest = max(end - start for start, end in itertools.pairwise(starts))
    return PackedBatch(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        cu_seq_lens=torch.tensor(starts, dtype=torch.int32, device=device),
        longest=longest,
        logit_places=torch.tensor(places, device=device),
        targets=torch.tensor(targets, device=device),
    )


def packed_logprobs(model: nn.Module, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
    """Log-probability of every target under ``softmax(logits / temperature)``; shape (targets,), fp32.

    The model must use the attention ``grpo_lab_varlen``.
    """
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        # A mask of four dimensions is passed through as it is: no mask of tokens x tokens is built.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device),
        cu_seq_lens_q=batch.cu_seq_lens,
        cu_seq_lens_k=batch.cu_seq_lens,
        max_length_q=batch.longest,
        max_length_k=batch.longest,
        use_cache=False,
        logits_to_keep=batch.logit_places,
    ).logits[0]
    if temperature != 1.0:
        logits = logits / temperature
    return -nn.functional.cross_entropy(logits.float(), batch.targets, reduction="none")


@torch.no_grad()
def score_sequences(
    model: nn.Module, sequences: Sequence[Sequence[int]], device: torch.device | str
) -> list[list[float]]:
    """Log-probability of every token but the first of each sequence, at temperature 1."""
    scorable = [(ids[:1], ids[1:]) for ids in sequences if len(ids) > 1]
    flat: list[float] = []
    if scorable:
        flat = packed_logprobs(model, pack(scorable, device)).tolist()
    rows, taken = [], 0
    for ids in sequences:
        count = max(len(ids) - 1, 0)
        rows.append(flat[taken : taken + count])
        taken += count
    return rows
