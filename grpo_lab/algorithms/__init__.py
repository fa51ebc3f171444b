"""What one optimizer step maximises: advantages, token weights of a loss, off-policy corrections."""

from grpo_lab.algorithms.advantages import group_advantages
from grpo_lab.algorithms.corrections import CORRECTIONS, Correction, CorrectionSettings, Surrogate
from grpo_lab.algorithms.losses import LOSSES, token_weights

__all__ = [
    "CORRECTIONS",
    "LOSSES",
    "Correction",
    "CorrectionSettings",
    "Surrogate",
    "group_advantages",
    "token_weights",
]
