"""Corrections for samples that an older policy (or another kernel) generated.

A correction turns log-probabilities into the per-token surrogate that is maximised. ``pi`` is the
policy that is trained, ``mu`` the behaviour policy that sampled the token, ``A`` the advantage, ``sg``
stops the gradient. To add one, write a function of the same form and put it into ``CORRECTIONS``.

Every surrogate here is proportional to ``A``: a sample without advantage has no gradient, and the
trainer leaves it out of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

CorrectionName = Literal["none", "tis", "clip"]


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """``epsilon`` and ``epsilon_high`` bound PPO's ratio; ``tis_cap`` truncates importance weights."""

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    tis_cap: float = 2.0


@dataclass(frozen=True, slots=True)
class Surrogate:
    """``per_token`` is maximised (shape: tokens); ``metrics`` holds sums over these tokens."""

    per_token: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


Correction = Callable[[Tensor, Tensor, Tensor, CorrectionSettings], Surrogate]


def none(logp: Tensor, behaviour: Tensor, advantage: Tensor, settings: CorrectionSettings) -> Surrogate:
    """No correction: ``A * pi / sg(pi)``. The ratio is held at 1, so its gradient is ``A * grad log pi``.

    The samples are treated as if the current policy had drawn them (REINFORCE, Williams 1992). The
    behaviour policy's logprobs are not used at all, and PPO's clip can never act at a ratio of 1.
    """
    return Surrogate(torch.exp(logp - logp.detach()) * advantage)


def tis(logp: Tensor, behaviour: Tensor, advantage: Tensor, settings: CorrectionSettings) -> Surrogate:
    """Truncated importance sampling: ``min(sg(pi) / mu, tis_cap) * A * pi / sg(pi)``.

    Token-level truncation of Ionides 2008 (doi 10.1198/106186008X320456), as used between inference and
    training engines by Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training". The weight carries no gradient.
    """
    ratio = torch.exp(logp.detach() - behaviour)
    weight = ratio.clamp(max=settings.tis_cap)
    metrics = {"ratio_sum": float(ratio.sum()), "truncated": float((ratio > settings.tis_cap).sum())}
    return Surrogate(weight * torch.exp(logp - logp.detach()) * advantage, metrics)


def clip(logp: Tensor, behaviour: Tensor, advantage: Tensor, settings: CorrectionSettings) -> Surrogate:
    """PPO's clipped ratio on the behaviour policy: ``min(r A, clip(r, 1 - eps, 1 + eps_high) A)``.

    ``r = pi / mu``. Schulman et al. 2017 (arXiv 1707.06347, equation 7), with the upper bound apart as in
    DAPO
    (arXiv 2503.14476, equation 10).
    """
    ratio = torch.exp(logp - behaviour)
    clipped = ratio.clamp(1.0 - settings.epsilon, 1.0 + settings.epsilon_high)
    unbounded, bounded = ratio * advantage, clipped * advantage
    metrics = {"ratio_sum": float(ratio.detach().sum()), "clipped": float((bounded < unbounded).sum())}
    return Surrogate(torch.minimum(unbounded, bounded), metrics)


CORRECTIONS: dict[str, Correction] = {"none": none, "tis": tis, "clip": clip}
USES_BEHAVIOUR_LOGPROBS = frozenset({"tis", "clip"})
