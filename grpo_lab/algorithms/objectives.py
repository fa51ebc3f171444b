"""What a loss maximises: most leave it to the correction, some bring an importance ratio of their own."""

from __future__ import annotations

import torch

from grpo_lab.algorithms.corrections import (
    CORRECTIONS,
    Correction,
    CorrectionSettings,
    ScoredTokens,
    Surrogate,
)

CORRECTION_METRICS = ("importance_sum", "importance_squares", "truncated", "masked", "clipped")


def gspo(tokens: ScoredTokens, settings: CorrectionSettings) -> Surrogate:
    """PPO's clip on the ratio of whole sequences: ``min(s A, clip(s, 1 - eps, 1 + eps_high) A)``.

    ``s = (pi(y) / mu(y)) ** (1 / |y|)``, the geometric mean of the tokens' ratios. GSPO, arXiv 2507.18071,
    equations 5 and 7; it is meant for much smaller bounds than PPO's (the paper: 3e-4 and 4e-4).
    """
    log_ratio = tokens.sequence_sums(tokens.logp - tokens.behaviour) / tokens.lengths
    ratio = tokens.per_token(torch.exp(log_ratio))
    free = ratio * tokens.advantage
    clipped = ratio.clamp(1.0 - settings.epsilon, 1.0 + settings.epsilon_high) * tokens.advantage
    return Surrogate(torch.minimum(free, clipped), {"clipped": float((clipped < free).sum())})


def cispo(tokens: ScoredTokens, settings: CorrectionSettings) -> Surrogate:
    """Clips the importance weight, not the update: ``min(sg(pi) / mu, 1 + eps_high) * A * log pi``.

    Every token keeps a gradient. CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5, with the lower
    bound left out as in the paper's runs.
    """
    ratio = tokens.importance
    high = 1.0 + settings.epsilon_high
    weight = ratio.clamp(max=high)
    return Surrogate(weight * tokens.advantage * tokens.logp, {"clipped": float((ratio > high).sum())})


OBJECTIVES: dict[str, Correction] = {"gspo": gspo, "cispo": cispo}
"""Losses that bring their own importance ratio, and so take no correction."""


def surrogate_name(loss_type: str, correction: str) -> str:
    """Which of ``OBJECTIVES`` or ``CORRECTIONS`` a pair of settings means."""
    return loss_type if loss_type in OBJECTIVES else correction


def surrogate(
    loss_type: str, correction: str, tokens: ScoredTokens, settings: CorrectionSettings
) -> Surrogate:
    """What these tokens add to the objective.

    Its metrics are sums over the tokens: of the importance ratios ``sg(pi) / mu`` and of their squares,
    whatever the correction, and of the tokens that it ``truncated``, ``masked`` or ``clipped``.
    """
    name = surrogate_name(loss_type, correction)
    result = (OBJECTIVES | CORRECTIONS)[name](tokens, settings)
    importance = tokens.importance.double()
    sums = {
        "importance_sum": float(importance.sum()),
        "importance_squares": float(importance.square().sum()),
    }
    return Surrogate(result.per_token, sums | result.metrics)
