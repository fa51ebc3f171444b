"""The gradient of one optimizer step, added up over micro-batches."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from grpo_lab.algorithms import CorrectionSettings, ScoredTokens, surrogate
from grpo_lab.trainer.batching import (
    StepPlan,
    TrainSample,
    pack,
    packed_logprobs,
    same_weights_mask,
    split_by_tokens,
)
from grpo_lab.trainer.config import AsyncGRPOConfig

MicroBatchHook = Callable[[int, Sequence[TrainSample], int], None]


@dataclass
class StepTotals:
    """Sums over the tokens of a step, on one rank until ``reduced``.

    ``gap_*`` compare behaviour logprobs with the trainer's own, over tokens of equal weights only.
    """

    loss: float = 0.0
    tokens: int = 0
    passes: int = 0
    gap_max: float = 0.0
    gap_sum: float = 0.0
    gap_tokens: int = 0
    correction: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def reduced(self, accelerator: Accelerator, names: Sequence[str]) -> StepTotals:
        """The totals of all ranks. Every rank must call it, with the same ``names`` of correction metrics."""
        if accelerator.num_processes == 1:
            return self
        sums = [self.loss, float(self.tokens), self.gap_sum, float(self.gap_tokens)]
        sums += [self.correction[name] for name in names]
        row = torch.tensor([*sums, self.gap_max], dtype=torch.float64, device=accelerator.device)
        rows = accelerator.gather(row.unsqueeze(0))
        total = rows.sum(dim=0).tolist()
        correction = dict(zip(names, total[4:-1], strict=True))
        gap_max = float(rows[:, -1].max())
        return StepTotals(
            total[0],
            int(total[1]),
            self.passes,
            gap_max,
            total[2],
            int(total[3]),
            defaultdict(float, correction),
        )


def accumulate_gradient(
    model: nn.Module,
    accelerator: Accelerator,
    args: AsyncGRPOConfig,
    plan: StepPlan,
    samples: Sequence[TrainSample],
    began: MicroBatchHook,
) -> StepTotals:
    """Forward and backward over this rank's share of ``samples``; leaves the step's gradient in the model.

    The gradient (after averaging over ranks, as DDP does) is that of the whole step's loss in one batch.
    All ranks run the same number of passes, and gradients are exchanged in the last one only. A step
    without signal has a gradient of zeros, which still moves an optimizer with momentum.
    """
    totals = StepTotals()
    if samples:
        lengths = [sample.input_tokens for sample in samples]
        shares = split_by_tokens(lengths, accelerator.num_processes, args.token_budget)
        share = shares[accelerator.process_index]
        for number, indices in enumerate(share):
            micro_batch = [samples[index] for index in indices]
            began(number, micro_batch, sum(lengths[index] for index in indices))
            last = number == len(share) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                loss = _micro_batch_loss(model, accelerator, args, plan, micro_batch, totals)
                accelerator.backward(loss * accelerator.num_processes)
            totals.loss += float(loss.detach())
            totals.passes += 1
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return totals


def _micro_batch_loss(
    model: nn.Module,
    accelerator: Accelerator,
    args: AsyncGRPOConfig,
    plan: StepPlan,
    micro_batch: Sequence[TrainSample],
    totals: StepTotals,
) -> Tensor:
    device = accelerator.device
    if not micro_batch:  # this rank has nothing, but the others wait for its part of the exchange
        return packed_logprobs(model, pack([((0,), (0,))], device)).sum() * 0.0
    pairs = [(item.sample.prompt_token_ids, item.sample.completion_token_ids) for item in micro_batch]
    batch = pack(pairs, device)
    with accelerator.autocast():
        logp = packed_logprobs(model, batch, args.temperature)
    rows = [row for item in micro_batch for row in item.sample.behaviour_logprobs]
    behaviour = torch.tensor(rows, device=device)
    lengths = torch.tensor([len(item.sample.completion_token_ids) for item in micro_batch], device=device)
    advantage = torch.tensor([item.advantage for item in micro_batch], device=device)
    weight = torch.tensor([item.token_weight for item in micro_batch], device=device)
    scored = ScoredTokens(logp, behaviour, advantage.repeat_interleave(lengths), lengths)
    objective = surrogate(args.loss_type, args.correction, scored, _settings(args))
    for name, value in objective.metrics.items():
        totals.correction[name] += value
    totals.tokens += len(rows)
    if plan.weights_are_version and args.samples_untruncated:
        _measure_gap(logp.detach(), behaviour, plan, micro_batch, totals)
    return -(objective.per_token * weight.repeat_interleave(lengths)).sum()


def _settings(args: AsyncGRPOConfig) -> CorrectionSettings:
    return CorrectionSettings(
        epsilon=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        delta=args.delta,
        tis_cap=args.tis_cap,
        mis_cap=args.mis_cap,
        icepop_low=args.icepop_low,
        icepop_high=args.icepop_high,
    )


def _measure_gap(
    logp: Tensor, behaviour: Tensor, plan: StepPlan, micro_batch: Sequence[TrainSample], totals: StepTotals
) -> None:
    mask = [same for item in micro_batch for same in same_weights_mask(item.sample, plan.term, plan.version)]
    if any(mask):
        gap = (logp - behaviour).abs()[torch.tensor(mask, device=logp.device)]
        totals.gap_max = max(totals.gap_max, float(gap.max()))
        totals.gap_sum += float(gap.sum())
        totals.gap_tokens += gap.numel()
