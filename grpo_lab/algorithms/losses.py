"""How the tokens of an optimizer step are averaged: a loss is a weight for each of its tokens.

With ``w`` the weights below, ``A`` the advantages and ``s`` the surrogate of a correction, the loss of a
step is ``-sum over samples i and tokens t of w[i] * s(A[i], token t)``. The sums run over *all* samples
of the step on all ranks, so the gradient does not depend on how the step is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from grpo_lab.errors import ConfigError

LossType = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"]
TokenWeights = Callable[[Sequence[int], int], list[float]]


def grpo(lengths: Sequence[int], max_completion_length: int) -> list[float]:
    """Mean over the tokens of a sequence, then over sequences: ``w[i] = 1 / (N * |o_i|)``.

    DeepSeekMath, arXiv 2402.03300, equation 3.
    """
    return [1.0 / (len(lengths) * length) if length else 0.0 for length in lengths]


def dapo(lengths: Sequence[int], max_completion_length: int) -> list[float]:
    """Mean over all tokens of the step: ``w[i] = 1 / sum_j |o_j|``. DAPO, arXiv 2503.14476, equation 8."""
    total = sum(lengths)
    return [1.0 / total if total else 0.0] * len(lengths)


def dr_grpo(lengths: Sequence[int], max_completion_length: int) -> list[float]:
    """A constant divisor, free of length bias: ``w[i] = 1 / (N * max_completion_length)``.

    Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    return [1.0 / (len(lengths) * max_completion_length) for _ in lengths]


LOSSES: dict[str, TokenWeights] = {
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": grpo,  # a mean over sequences: arXiv 2507.18071, equation 5
    "cispo": dapo,  # a mean over all tokens: arXiv 2506.13585, equation 4
}


def token_weights(
    loss_type: str, completion_lengths: Sequence[int], max_completion_length: int
) -> list[float]:
    """The weight of every token of each sequence of an optimizer step.

    Args:
        completion_lengths: tokens of every scored completion of the step, those without signal too.

    >>> token_weights("dapo", [1, 3], max_completion_length=8)
    [0.25, 0.25]
    """
    if loss_type not in LOSSES:
        raise ConfigError("loss_type", loss_type, f"one of {', '.join(get_args(LossType))}")
    return LOSSES[loss_type](completion_lengths, max_completion_length)
