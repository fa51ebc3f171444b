"""From a run's trace to a calibration: non-negative least squares, and distributions with their tails."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize, nnls
from scipy.stats import norm, rankdata

from grpo_lab.errors import DataError
from grpo_lab.harness.calibration import (
    Calibration,
    EngineStepFit,
    LengthFit,
    RequestFit,
    Source,
    Spread,
    SyncFit,
    TrainerStepFit,
)
from grpo_lab.harness.calibration_trace import Floats, RunTrace, Sample

WARM_STEPS = 2
"""Optimizer steps at the start that no fit sees: caches are cold, queues fill."""
MIN_OPTIMIZER_STEPS, MIN_ENGINE_STEPS, MIN_SAMPLES, MIN_SYNCS = 8, 100, 100, 3
MIN_VARIATION = 0.05  # of a share of time, below which a slowdown cannot be told from a longer step
QUANTILES = 101
TAIL_FROM = 0.9
MIN_TAIL = 30  # samples beyond the threshold


def fit(traces: Sequence[RunTrace], source: Source) -> Calibration:
    """Fits everything. Raises ``DataError`` for traces that are too short, saying what there is too little of."""
    _require_enough(traces)
    return Calibration(
        source=source,
        engine_step=fit_engine_steps(traces),
        trainer_step=fit_trainer_steps(traces),
        requests=fit_requests(traces),
        reward=fit_rewards(traces),
        sync=fit_syncs(traces),
        lengths=fit_lengths([sample for trace in traces for sample in trace.samples.values()]),
        prompt_quantiles=quantiles([n for trace in traces for n in trace.prompt_tokens.values()], 1.0),
    )


def _require_enough(traces: Sequence[RunTrace]) -> None:
    found = {
        "optimizer steps": (sum(len(t.trainer_steps) for t in traces), MIN_OPTIMIZER_STEPS),
        "engine steps": (sum(len(t.engine_steps().seconds) for t in traces), MIN_ENGINE_STEPS),
        "samples": (sum(len(t.samples) for t in traces), MIN_SAMPLES),
        "weight syncs": (sum(len(t.syncs) for t in traces), MIN_SYNCS),
    }
    short = [f"{have} {name} (at least {need})" for name, (have, need) in found.items() if have < need]
    if short:
        raise DataError(
            f"too short a trace to calibrate from: {', '.join(short)}. Run more steps; engines must write events"
        )


# -- steps ---------------------------------------------------------------------------------------------------


def fit_engine_steps(traces: Sequence[RunTrace]) -> EngineStepFit:
    steps = [trace.engine_steps() for trace in traces]

    def column(name: str) -> Floats:
        return np.concatenate([getattr(one, name) for one in steps])

    names = ("prefill_tokens", "sequences", "context_tokens", "admitted", "finished")
    features = np.stack([np.ones(len(column("seconds"))), *map(column, names)], axis=1)
    seconds = column("seconds")
    solution, slowdown, predicted = fit_slowed(features, column("training"), seconds)
    rms, cv = _residuals(seconds, predicted)
    return EngineStepFit(
        *solution, slowdown, jitter=min(0.95, math.sqrt(3.0) * cv), n=len(seconds), relative_rms=rms
    )


def fit_trainer_steps(traces: Sequence[RunTrace]) -> TrainerStepFit:
    steps = [step for trace in traces for step in trace.trainer_steps[WARM_STEPS:]]
    busy = np.concatenate(
        [trace.engines_busy([(s.begin_s, s.end_s) for s in trace.trainer_steps[WARM_STEPS:]]) for trace in traces]
    )
    tokens = np.array([step.tokens for step in steps])
    seconds = np.array([step.duration_s for step in steps])
    features = np.stack([np.ones(len(steps)), tokens], axis=1)
    solution, slowdown, predicted = fit_slowed(features, busy, seconds)
    rms, cv = _residuals(seconds, predicted)
    return TrainerStepFit(
        *solution,
        slowdown,
        computed_share=_computed_share(traces),
        overhead_s=float(np.mean([step.overhead_s for step in steps])),
        cv=cv,
        n=len(steps),
        relative_rms=rms,
    )


def _computed_share(traces: Sequence[RunTrace]) -> float:
    computed = consumed = 0.0
    for trace in traces:
        computed += sum(step.tokens for step in trace.trainer_steps)
        for _, group in trace.consumed:
            prompt = trace.prompt_tokens.get(group.group, 0)
            samples = [trace.samples[name] for name in group.samples if name in trace.samples]
            consumed += sum(prompt + sample.tokens for sample in samples)
    return computed / consumed if consumed and computed else 1.0


def fit_slowed(features: Floats, share: Floats, seconds: Floats) -> tuple[list[float], float, Floats]:
    """``seconds ~ (features @ x) * (1 + c * share)``, x and c not negative: (x, c, fitted seconds).

    Without enough variation of ``share`` c is 0, and x has the mean slowdown in it. Squared errors, so that
    the sum of the fitted times is right also where noise is one-sided.
    """
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    scaled = features / scale
    start, _ = nnls(scaled, seconds)
    if share.std() < MIN_VARIATION or len(seconds) <= features.shape[1] + 1:
        return [float(x) for x in start / scale], 0.0, scaled @ start
    unit = max(float(seconds.mean()), 1e-12)

    def residuals(x: Floats) -> Floats:
        found: Floats = ((scaled @ x[:-1]) * (1.0 + x[-1] * share) - seconds) / unit
        return found

    guess = np.concatenate([np.maximum(start, 1e-9), [0.1]])
    found = least_squares(residuals, guess, bounds=(0.0, np.inf), x_scale=np.maximum(guess, unit * 1e-3))
    x, slowdown = found.x[:-1], float(found.x[-1])
    fitted: Floats = (scaled @ x) * (1.0 + slowdown * share)
    return [float(value) for value in x / scale], slowdown, fitted


def _residuals(seconds: Floats, predicted: Floats) -> tuple[float, float]:
    """Root mean square over the mean, and the coefficient of variation of measured over fitted."""
    rms = float(np.sqrt(np.mean((seconds - predicted) ** 2)) / max(seconds.mean(), 1e-12))
    ratio = seconds / np.maximum(predicted, 1e-12)
    return rms, float(min(ratio.std(), rms))


# -- requests, rewards, syncs ------------------------------------------------------------------------------


def fit_requests(traces: Sequence[RunTrace]) -> RequestFit:
    """Time in which at least one request was on its way, over their number: the rate of the line's server."""
    out_s = back_s = 0.0
    sent = answered = 0
    for trace in traces:
        ways = [
            (request.dispatched_s, request.admitted_s)
            for request in trace.requests.values()
            if request.admitted_s >= request.dispatched_s
        ]
        replies = [
            (request.finished_s, trace.samples[name].completed_s)
            for name, request in trace.requests.items()
            if name in trace.samples and trace.samples[name].completed_s >= request.finished_s
        ]
        out_s, sent = out_s + _covered_s(ways), sent + len(ways)
        back_s, answered = back_s + _covered_s(replies), answered + len(replies)
    return RequestFit(out_s / max(sent, 1), back_s / max(answered, 1), sent)


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    total_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def fit_rewards(traces: Sequence[RunTrace]) -> Spread:
    """From a group's last completion to its rewards."""
    took = []
    for trace in traces:
        last: dict[str, float] = {}
        for sample in trace.samples.values():
            last[sample.group] = max(last.get(sample.group, -math.inf), sample.completed_s)
        took += [t - last[group] for group, t in trace.scored_s.items() if group in last]
    return spread([max(0.0, t) for t in took])


def fit_syncs(traces: Sequence[RunTrace]) -> SyncFit:
    syncs = [sync for trace in traces for sync in (trace.syncs[1:] or trace.syncs)]  # the first has no load
    rows = np.array([pair for sync in syncs for pair in sync.buckets], dtype=float).reshape(-1, 2)
    bucket_s, byte_s, two_term = fit_buckets(rows[:, 0], rows[:, 1])
    fixed = [
        max(0.0, sync.transfer_s - bucket_s * len(sync.bucket_nbytes) - byte_s * sum(sync.bucket_nbytes))
        for sync in syncs
    ]
    newest = syncs[-1]
    return SyncFit(
        other=spread([sync.other_s for sync in syncs]),
        pause=spread([sync.pause_s for sync in syncs]),
        transfer=spread(fixed),
        resume=spread([sync.resume_s for sync in syncs]),
        total=spread([sync.total_s for sync in syncs]),
        bucket_s=bucket_s,
        byte_s=byte_s,
        two_term=two_term,
        nbytes=sum(newest.bucket_nbytes),
        buckets=len(newest.bucket_nbytes),
    )


def fit_buckets(nbytes: Floats, seconds: Floats) -> tuple[float, float, bool]:
    """(overhead of a bucket, seconds of a byte, whether sizes vary enough to tell the two apart)."""
    if len(nbytes) < MIN_SYNCS:
        return 0.0, 0.0, False
    if nbytes.std() < MIN_VARIATION * nbytes.mean():
        return float(np.mean(seconds)), 0.0, False
    features = np.stack([np.ones(len(nbytes)), nbytes / nbytes.max()], axis=1)
    (bucket_s, largest_s), _ = nnls(features, seconds)
    return float(bucket_s), float(largest_s / nbytes.max()), True


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0.0, 0.0, 0)
    return Spread(float(np.mean(values)), float(np.std(values)), len(values))


# -- lengths -----------------------------------------------------------------------------------------------


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
    found = np.quantile(array, np.linspace(0.0, last, QUANTILES), method="inverted_cdf") if len(array) else [1.0]
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
