"""What one optimizer step maximises: advantages, token weights of a loss, off-policy corrections."""

from grpo_lab.algorithms.advantages import group_advantages
from grpo_lab.algorithms.corrections import (
    CORRECTIONS,
    Correction,
    CorrectionSettings,
    ScoredTokens,
    Surrogate,
)
from grpo_lab.algorithms.losses import LOSSES, token_weights
from grpo_lab.algorithms.objectives import OBJECTIVES, surrogate

__all__ = [
    "CORRECTIONS",
    "LOSSES",
    "OBJECTIVES",
    "Correction",
    "CorrectionSettings",
    "ScoredTokens",
    "Surrogate",
    "group_advantages",
    "surrogate",
    "token_weights",
]
