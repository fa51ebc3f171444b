"""Corrections for samples that an older policy (or another kernel) generated.

A correction turns log-probabilities into the per-token surrogate that is maximised. ``pi`` is the
policy that is trained, ``mu`` the behaviour policy that sampled the token, ``A`` the advantage, ``sg``
stops the gradient. To add one, write a function of the same form and put it into ``CORRECTIONS``.

Every surrogate is proportional to ``A``: a sample without advantage has no gradient, and the trainer
leaves it out of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

CorrectionName = Literal["none", "tis", "mis", "icepop", "decoupled", "clip"]


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """``epsilon`` and ``epsilon_high`` bound PPO's ratio, ``delta`` does where the advantage is negative.

    ``tis_cap`` and ``mis_cap`` are the largest importance weights of ``tis`` and ``mis``; ``icepop`` keeps
    those between ``icepop_low`` and ``icepop_high``.
    """

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    tis_cap: float = 2.0
    mis_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Completion tokens, sequence behind sequence.

    ``logp`` (with gradient), ``behaviour`` and ``advantage`` have shape (tokens,); ``lengths``, of shape
    (sequences,) and adding up to tokens, says where a sequence ends.
    """

    logp: Tensor
    behaviour: Tensor
    advantage: Tensor
    lengths: Tensor

    @property
    def policy_gradient(self) -> Tensor:
        """``A * pi / sg(pi)``: worth ``A``, with the gradient of ``A * log pi``."""
        return torch.exp(self.logp - self.logp.detach()) * self.advantage

    @property
    def importance(self) -> Tensor:
        """``sg(pi) / mu`` of every token, without gradient."""
        return torch.exp(self.logp.detach() - self.behaviour)

    def sequence_sums(self, values: Tensor) -> Tensor:
        """The sum over each sequence, differentiable; shape (sequences,)."""
        sequence = torch.repeat_interleave(self.lengths)
        sums = values.new_zeros(len(self.lengths))
        return sums.index_add(0, sequence, values)

    def per_token(self, values: Tensor) -> Tensor:
        """A value per sequence, repeated for each of its tokens."""
        return values.repeat_interleave(self.lengths)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """``per_token`` is maximised (shape: tokens); ``metrics`` holds sums over these tokens."""

    per_token: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


Correction = Callable[[ScoredTokens, CorrectionSettings], Surrogate]


def none(tokens: ScoredTokens, settings: CorrectionSettings) -> Surrogate:
    """No correction: ``A * pi / sg(pi)``. The ratio is held at 1, so its gradient is ``A * grad log pi``.

    The samples are treated as if the current policy had drawn them (REINFORCE, Williams 1992). The
    behaviour policy's logprobs are not used at all, and PPO's clip can never act at a ratio of 1.
    """
    return Surrogate(tokens.policy_gradient)


def tis(tokens: ScoredTokens, settings: CorrectionSettings) -> Surrogate:
    """Truncated importance sampling: ``min(sg(pi) / mu, tis_cap) * A * pi / sg(pi)``.

    Token-level truncation of Ionides 2008 (doi 10.1198/106186008X320456), as used between inference and
    training engines by Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training". The weight carries no gradient.
    """
    ratio = tokens.importance
    truncated = {"truncated": float((ratio > settings.tis_cap).sum())}
    return Surrogate(ratio.clamp(max=settings.tis_cap) * tokens.policy_gradient, truncated)


def mis(tokens: ScoredTokens, settings: CorrectionSettings) -> Surrogate:
    """Masked importance sampling, per sequence: ``rho * 1[rho <= mis_cap] * A * pi / sg(pi)``.

    ``rho = prod_t sg(pi_t) / mu_t`` is the weight of the whole sequence, so it is unbiased but for the
    mask, and its variance grows with the length. Liu et al. 2025, "When speed kills stability:
    demystifying RL collapse from the training-inference mismatch" (sequence-level MIS).
    """
    log_rho = tokens.sequence_sums(tokens.logp.detach() - tokens.behaviour)
    rho = tokens.per_token(torch.exp(log_rho))
    kept = rho <= settings.mis_cap
    weight = torch.where(kept, rho, torch.zeros_like(rho))
    return Surrogate(weight * tokens.policy_gradient, {"masked": float((~kept).sum())})


def icepop(tokens: ScoredTokens, settings: CorrectionSettings) -> Surrogate:
    """Tokens whose ratio left a band are masked: ``k * 1[low <= k <= high] * A * pi / sg(pi)``.

    ``k = sg(pi) / mu`` per token. IcePop, Ring-1T technical report (arXiv 2510.18855).
    """
    ratio = tokens.importance
    kept = (ratio >= settings.icepop_low) & (ratio <= settings.icepop_high)
    weight = torch.where(kept, ratio, torch.zeros_like(ratio))
    return Surrogate(weight * tokens.policy_gradient, {"masked": float((~kept).sum())})


def decoupled(tokens: ScoredTokens, settings: CorrectionSettings) -> Surrogate:
    """Decoupled PPO: ``sg(prox) / mu * min(r A, clip(r, 1 - eps, 1 + eps_high) A)`` with ``r = pi / prox``.

    AReaL, arXiv 2505.24298, equation 5. The proximal policy ``prox`` is the policy when the optimizer step
    begins, as there; a step here is one update, so ``r`` is 1 while its gradient is taken, the clip rests,
    and what is left is the importance weight ``prox / mu``, which nothing truncates.
    """
    ratio = torch.exp(tokens.logp - tokens.logp.detach())
    clipped = ratio.clamp(1.0 - settings.epsilon, 1.0 + settings.epsilon_high)
    bounded = torch.minimum(ratio * tokens.advantage, clipped * tokens.advantage)
    return Surrogate(tokens.importance * bounded)


def clip(tokens: ScoredTokens, settings: CorrectionSettings) -> Surrogate:
    """PPO's clipped ratio on the behaviour policy: ``min(r A, clip(r, 1 - eps, 1 + eps_high) A)``.

    ``r = pi / mu``. Schulman et al. 2017 (arXiv 1707.06347, equation 7), with the upper bound apart as in
    DAPO (arXiv 2503.14476, equation 10). With ``delta`` the first term is ``min(r, delta) A``: a bad token
    that became much likelier pushes no harder than that (two-sided clipping, INTELLECT-2, arXiv 2505.07291).
    """
    ratio = torch.exp(tokens.logp - tokens.behaviour)
    clipped = ratio.clamp(1.0 - settings.epsilon, 1.0 + settings.epsilon_high) * tokens.advantage
    free = (ratio if settings.delta is None else ratio.clamp(max=settings.delta)) * tokens.advantage
    held = (clipped < free) | (free != ratio * tokens.advantage)
    return Surrogate(torch.minimum(free, clipped), {"clipped": float(held.sum())})


CORRECTIONS: dict[str, Correction] = {
    "none": none,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
    "decoupled": decoupled,
    "clip": clip,
}
