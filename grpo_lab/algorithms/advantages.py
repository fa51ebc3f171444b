"""Group-relative advantages: how much better a completion is than the others of its prompt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

ScaleRewards = Literal["group", "batch", "none"]


def group_advantages(
    groups: Sequence[Sequence[float | None]],
    scale: ScaleRewards = "group",
    epsilon: float = 1e-4,
) -> list[list[float | None]]:
    """Advantage of every sample: ``(R - mean) / (std + epsilon)`` over its group.

    The formula is GRPO's (DeepSeekMath, arXiv 2402.03300, section 4.1.2); the standard deviation is the
    unbiased one. ``scale`` says which rewards the standard deviation is taken over: those of the group,
    those of the whole step ("batch"), or that nothing is divided ("none", Dr. GRPO, arXiv 2503.20783).

    A sample without a reward (None) is left out of mean and standard deviation and has no advantage
    (None). A group with one reward, or with equal ones, has advantages of exactly 0: no signal.

    Args:
        groups: rewards, a row a group.
        epsilon: keeps groups of nearly equal rewards from getting huge advantages.

    >>> group_advantages([[1.0, 0.0, None], [0.5, 0.5]], scale="none")
    [[0.5, -0.5, None], [0.0, 0.0]]
    """
    batch_std = _std([reward for group in groups for reward in group if reward is not None])
    return [_of_group(group, scale, epsilon, batch_std) for group in groups]


def _of_group(
    rewards: Sequence[float | None], scale: ScaleRewards, epsilon: float, batch_std: float
) -> list[float | None]:
    known = [reward for reward in rewards if reward is not None]
    if len(set(known)) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(known) / len(known)
    divisor = {"group": _std(known) + epsilon, "batch": batch_std + epsilon, "none": 1.0}[scale]
    return [None if reward is None else (reward - mean) / divisor for reward in rewards]


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
