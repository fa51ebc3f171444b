"""From samples to the distribution of their lengths: quantiles, a tail, and correlation within groups."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.stats import norm, rankdata

from grpo_lab.harness.calibration import LengthFit
from grpo_lab.harness.calibration_trace import Floats, Sample

QUANTILES = 101
TAIL_FROM = 0.9
MIN_TAIL = 30  # samples beyond the threshold


def fit_lengths(samples: Sequence[Sample]) -> LengthFit:
    """``samples`` in any order; those that ended at their longest are known to be at least so long."""
    lengths = np.array([sample.tokens for sample in samples], dtype=float)
    censored = np.array([sample.censored for sample in samples])
    threshold = float(np.quantile(lengths, TAIL_FROM, method="inverted_cdf"))
    beyond = lengths > threshold
    scale, shape, tail_from = 0.0, 0.0, 1.0
    if beyond.sum() >= MIN_TAIL and not censored[~beyond].any():
        scale, shape = fit_tail(lengths[beyond] - threshold, censored[beyond])
        tail_from = float(1.0 - beyond.mean())
    body = lengths[~beyond] if scale > 0 else lengths
    return LengthFit(
        quantiles=quantiles(body, 1.0),
        tail_from=tail_from,
        threshold=threshold,
        tail_scale=scale,
        tail_shape=shape,
        censored_share=float(censored.mean()),
        within_group_correlation=within_group_correlation(samples),
        mean=float(lengths.mean()),
        n=len(samples),
    )


def quantiles(values: Any, last: float) -> tuple[float, ...]:
    """At ``QUANTILES`` equal steps from 0 to ``last``, each one that occurs."""
    array = np.asarray(values, dtype=float)
    found = (
        np.quantile(array, np.linspace(0.0, last, QUANTILES), method="inverted_cdf") if len(array) else [1.0]
    )
    return tuple(float(value) for value in found)


def fit_tail(excess: Floats, censored: Any) -> tuple[float, float]:
    """Scale and shape of a generalised Pareto tail of whole tokens, by maximum likelihood.

    An excess k is any value in (k - 1, k]; a censored one is more than k - 1. The shape is kept in
    [-0.5, 1], where the likelihood is regular and the mean exists.
    """

    def survival(x: Floats, scale: float, shape: float) -> Floats:
        if abs(shape) < 1e-6:
            return np.exp(-x / scale)
        return np.asarray(np.maximum(1.0 + shape * x / scale, 0.0) ** (-1.0 / shape))

    def loss(parameters: Floats) -> float:
        scale, shape = math.exp(parameters[0]), float(np.clip(parameters[1], -0.5, 1.0))
        before = survival(excess - 1.0, scale, shape)
        after = np.where(censored, 0.0, survival(excess, scale, shape))
        return float(-np.log(np.maximum(before - after, 1e-12)).sum())

    starts = [np.array([math.log(excess.mean()), shape]) for shape in (-0.2, 0.0, 0.3)]
    best = min((minimize(loss, start, method="Nelder-Mead") for start in starts), key=lambda one: one.fun)
    return math.exp(best.x[0]), float(np.clip(best.x[1], -0.5, 1.0))


def within_group_correlation(samples: Sequence[Sample]) -> float:
    """Intraclass correlation (one-way analysis of variance; Shrout and Fleiss 1979) of normal scores."""
    if len(samples) < 2:
        return 0.0
    scores = norm.ppf((rankdata([sample.tokens for sample in samples]) - 0.5) / len(samples))
    groups: dict[str, list[float]] = defaultdict(list)
    for sample, score in zip(samples, scores, strict=True):
        groups[sample.group].append(score)
    rows = [np.array(values) for values in groups.values() if len(values) > 1]
    total = sum(len(row) for row in rows)
    if len(rows) < 2 or total <= len(rows):
        return 0.0
    grand = np.concatenate(rows).mean()
    between = sum(len(row) * (row.mean() - grand) ** 2 for row in rows) / (len(rows) - 1)
    within = sum(((row - row.mean()) ** 2).sum() for row in rows) / (total - len(rows))
    size = (total - sum(len(row) ** 2 for row in rows) / total) / (len(rows) - 1)
    spread_of_all = between + (size - 1.0) * within
    return float(np.clip((between - within) / spread_of_all, 0.0, 0.99)) if spread_of_all > 0 else 0.0
