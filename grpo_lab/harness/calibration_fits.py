"""From a run's trace to a calibration: non-negative least squares, and distributions with their tails."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
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
MIN_VARIATION = 0.1  # of a share of time, below which a slowdown cannot be told from a longer step
MIN_PURE, MIN_PURE_SHARE = 10, 0.03  # rows near either end of the shares, for the same reason
ROUNDS = 5
MIN_SIZE_VARIATION = 0.05  # of bucket sizes, for the same reason
QUANTILES = 101
TAIL_FROM = 0.9
MIN_TAIL = 30  # samples beyond the threshold


def fit(traces: Sequence[RunTrace], source: Source) -> Calibration:
    """Fits everything. Raises ``DataError``, saying what there is too little of in the traces."""
    _require_enough(traces)
    return Calibration(
        source=source,
        engine_step=fit_engine_steps(traces),
        trainer_step=fit_trainer_steps(traces),
        requests=fit_requests(traces),
        reward=fit_rewards(traces),
        sync=fit_syncs(traces),
        lengths=fit_lengths(_samples(traces)),
        prompt_quantiles=quantiles([n for trace in traces for n in trace.prompt_tokens.values()], 1.0),
    )


def _samples(traces: Sequence[RunTrace]) -> list[Sample]:
    """Groups of two runs are two, also where their names are the same."""
    return [
        replace(sample, group=f"run {number} {sample.group}")
        for number, trace in enumerate(traces)
        for sample in trace.samples.values()
    ]


def _require_enough(traces: Sequence[RunTrace]) -> None:
    found = {
        "optimizer steps": (sum(len(t.trainer_steps) for t in traces), MIN_OPTIMIZER_STEPS),
        "engine steps": (sum(len(e.seconds) for t in traces for e in t.engine_steps()), MIN_ENGINE_STEPS),
        "samples": (sum(len(t.samples) for t in traces), MIN_SAMPLES),
        "weight syncs": (sum(len(t.syncs) for t in traces), MIN_SYNCS),
    }
    short = [f"{have} {name} (at least {need})" for name, (have, need) in found.items() if have < need]
    if short:
        raise DataError(f"too short a trace to calibrate from: {', '.join(short)}. Run more steps")


# -- steps ---------------------------------------------------------------------------------------------------


def fit_engine_steps(traces: Sequence[RunTrace]) -> EngineStepFit:
    """Which requests hold up a step depends on how long they do: both are found in turns."""
    engines = [steps for trace in traces for steps in trace.engine_steps()]

    def column(name: str) -> Floats:
        return np.concatenate([getattr(steps, name) for steps in engines])

    seconds, training = column("seconds"), column("training")
    known = [
        np.ones(len(seconds)),
        *map(column, ("prefill_tokens", "sequences", "context_tokens", "finished")),
    ]
    admitted = [steps.admitted() for steps in engines]
    for _ in range(ROUNDS):
        features = np.stack([*known, np.concatenate(admitted)], axis=1)
        x, slowdown, predicted = fit_slowed(features, training, seconds)
        admitted = [
            steps.admitted(x[-1] * before * (1.0 + slowdown * steps.training))
            for steps, before in zip(engines, admitted, strict=True)
        ]
    rms, cv = _residuals(seconds, predicted)
    return EngineStepFit(
        base_s=x[0],
        prefill_token_s=x[1],
        sequence_s=x[2],
        context_token_s=x[3],
        admitted_s=x[5],
        finished_s=x[4],
        trainer_slowdown=slowdown,
        jitter=min(0.95, math.sqrt(3.0) * cv),
        n=len(seconds),
        relative_rms=rms,
    )


def fit_trainer_steps(traces: Sequence[RunTrace]) -> TrainerStepFit:
    steps = [step for trace in traces for step in trace.trainer_steps[WARM_STEPS:]]
    busy = np.concatenate(
        [
            trace.engines_busy([(s.begin_s, s.end_s) for s in trace.trainer_steps[WARM_STEPS:]])
            for trace in traces
        ]
    )
    tokens = np.array([step.tokens for step in steps])
    seconds = np.array([step.duration_s for step in steps])
    features = np.stack([np.ones(len(steps)), tokens], axis=1)
    x, slowdown, predicted = fit_slowed(features, busy, seconds)
    rms, cv = _residuals(seconds, predicted)
    return TrainerStepFit(
        base_s=x[0],
        token_s=x[1],
        engine_slowdown=slowdown,
        computed_share=_computed_share(traces),
        overhead_s=float(np.mean([step.overhead_s for step in steps])),
        cv=cv,
        token_error_s=float(np.std(seconds - predicted) / max(tokens.std() * math.sqrt(len(steps)), 1e-12)),
        n=len(steps),
        relative_rms=rms,
    )


def _busy(trace: RunTrace) -> Floats:
    return trace.engines_busy([(step.begin_s, step.end_s) for step in trace.trainer_steps[WARM_STEPS:]])


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

    c is 0, and x has the mean slowdown in it, unless both shares near the least and near the largest occur
    often enough. Noise grows with the time, so errors are weighted by 1 / (fitted + mean); at last all is
    scaled so that the fitted times add up to the measured ones.
    """
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    scaled = features / scale
    rows = _pure(share)
    slowed = rows is not None and rows.sum() > 2 * features.shape[1]
    some, some_share, some_s = (
        (scaled[rows], share[rows], seconds[rows]) if slowed else (scaled, share, seconds)
    )
    x, c = nnls(some, some_s)[0], 0.0
    for _ in range(3):
        weight = 1.0 / ((some @ x) * (1.0 + c * some_share) + some_s.mean() + 1e-12)
        if slowed:
            x, c = _solved(some, some_share, some_s, weight, x)
        else:
            x = nnls(some * weight[:, None], some_s * weight)[0]
    fitted = (scaled @ x) * (1.0 + c * share)
    factor = seconds.sum() / max(fitted.sum(), 1e-12)
    return [float(value) for value in x * factor / scale], float(c), fitted * factor


def _pure(share: Floats) -> Any:
    """Which rows tell a slowdown from a longer time: those near the ends of the range, if enough are."""
    low, high = share < share.min() + MIN_VARIATION, share > share.max() - MIN_VARIATION
    enough = max(MIN_PURE, MIN_PURE_SHARE * len(share))
    apart = share.max() - share.min() > 2 * MIN_VARIATION
    return low | high if apart and min(low.sum(), high.sum()) >= enough else None


def _solved(
    features: Floats, share: Floats, seconds: Floats, weight: Floats, start: Floats
) -> tuple[Floats, float]:
    def residuals(x: Floats) -> Floats:
        found: Floats = ((features @ x[:-1]) * (1.0 + x[-1] * share) - seconds) * weight
        return found

    guess = np.concatenate([np.maximum(start, 1e-6 * seconds.mean()), [0.1]])
    found = least_squares(
        residuals, guess, bounds=(0.0, np.inf), x_scale=np.maximum(guess, 1e-3 * seconds.mean())
    )
    return found.x[:-1], float(found.x[-1])


def _residuals(seconds: Floats, predicted: Floats) -> tuple[float, float]:
    """Root mean square over the mean, and the coefficient of variation of measured over fitted."""
    rms = float(np.sqrt(np.mean((seconds - predicted) ** 2)) / max(seconds.mean(), 1e-12))
    ratio = seconds / np.maximum(predicted, 1e-12)
    return rms, float(min(ratio.std(), rms))


# -- requests, rewards, syncs ------------------------------------------------------------------------------


def fit_requests(traces: Sequence[RunTrace]) -> RequestFit:
    """From dispatch to the engine's queue, and from the engine's last word to the worker's hands."""
    ways = []
    for trace in traces:
        rows = [(r.dispatched_s, r.admitted_s, 0.0) for r in trace.requests.values()]
        rows += [
            (r.finished_s, trace.samples[name].completed_s, 1.0)
            for name, r in trace.requests.items()
            if name in trace.samples
        ]
        ways.append(np.array(sorted(row for row in rows if row[1] >= row[0])).reshape(-1, 3))
    return fit_line(ways)


def fit_line(ways: Sequence[Floats]) -> RequestFit:
    """The worker takes one thing after the other, requests (kind 0) and answers (kind 1), each kind with a
    service time; a constant time on the way is added.

    Each of ``ways`` has rows (entered, left, kind) in order of entering. Service times have the least
    absolute error, so that single stalls do not move them; the constant is the median of what is left.
    """
    delays = np.concatenate([rows[:, 1] - rows[:, 0] for rows in ways])
    kinds = np.concatenate([rows[:, 2] for rows in ways]) > 0
    if not len(delays):
        return RequestFit(0.0, 0.0, 0.0, 0.0, 0)

    def left_over(services_s: Floats) -> Floats:
        waits = [line_s(rows[:, 0], np.where(rows[:, 2] > 0, services_s[1], services_s[0])) for rows in ways]
        return delays - np.concatenate(waits)

    def constant(left: Floats) -> float:
        return max(0.0, float(np.median(left))) if len(left) else 0.0

    def loss(logs: Floats) -> float:
        left = left_over(np.exp(logs))
        parts = (left[~kinds], left[kinds])
        return float(sum(np.abs(part - constant(part)).sum() for part in parts) / len(left))

    starts = [np.log([first, second]) for first in (1e-5, 2e-4, 1e-3) for second in (1e-5, 2e-4, 1e-3)]
    start = min(starts, key=loss)
    best = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-9})
    services = np.exp(best.x)
    left = left_over(services)
    out, back = constant(left[~kinds]), constant(left[kinds])
    return RequestFit(float(services[0]), out, float(services[1]), back, int((~kinds).sum()))


def line_s(entered_s: Floats, service_s: Floats) -> Floats:
    """Seconds that each spends in a line with a single server, first come, first served (Lindley 1952)."""
    done = np.cumsum(service_s)
    left: Floats = np.maximum.accumulate(entered_s - (done - service_s)) + done
    return left - entered_s


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
    if nbytes.std() < MIN_SIZE_VARIATION * nbytes.mean():
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
