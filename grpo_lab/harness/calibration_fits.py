"""From a run's trace to a calibration: who shared the cores, and least squares with no negative term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize, nnls

from grpo_lab.errors import DataError
from grpo_lab.harness.calibration import (
    Calibration,
    EngineStepFit,
    RequestFit,
    Sharing,
    Source,
    Spread,
    SyncFit,
    TrainerStepFit,
)
from grpo_lab.harness.calibration_contention import Company, best_sharing, company
from grpo_lab.harness.calibration_lengths import fit_lengths, quantiles
from grpo_lab.harness.calibration_trace import EngineSteps, Floats, RunTrace, Sample, TrainerStep
from grpo_lab.report.spans import Span

WARM_STEPS = 2
"""Optimizer steps at the start that no fit sees: caches are cold, queues fill."""
MIN_OPTIMIZER_STEPS, MIN_ENGINE_STEPS, MIN_SAMPLES, MIN_SYNCS = 8, 100, 100, 3
ROUNDS = 5
MIN_SIZE_VARIATION = 0.05  # of bucket sizes, below which overhead and bytes cannot be told apart
QUARTILES_OF_SD = 1.349  # between the quartiles of a normal distribution


def fit(traces: Sequence[RunTrace], source: Source) -> Calibration:
    """Fits everything. Raises ``DataError``, saying what there is too little of in the traces."""
    _require_enough(traces)
    requests = fit_requests(traces)
    runs = [Run(trace, requests) for trace in traces]
    sharing = fit_sharing(runs, int(source.machine.get("cpus") or 1))
    return Calibration(
        source=source,
        sharing=sharing,
        engine_step=fit_engine_steps(runs, sharing)[0],
        trainer_step=fit_trainer_steps(runs, sharing),
        requests=_alone(requests, runs, sharing),
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


class Run:
    """A trace with who computed when; the worker was busy as its line says."""

    def __init__(self, trace: RunTrace, requests: RequestFit) -> None:
        self.trace = trace
        self.worker = _worker_spans(trace, requests)
        self.company: Company = company(trace, self.worker)
        self.engines: list[EngineSteps] = trace.engine_steps()
        self.steps: list[TrainerStep] = trace.trainer_steps[WARM_STEPS:]


def fit_sharing(runs: Sequence[Run], cores: int) -> Sharing:
    """That with which equal work takes equal core-seconds in all company: of the trainer an optimizer step,
    of the engines all that they do from one to the next.

    Runs that always have the same company say nothing: then nobody disturbs anybody.
    """
    return best_sharing(
        cores,
        lambda sharing: round(fit_trainer_steps(runs, sharing).relative_rms, 5),
        lambda sharing: round(fit_engine_steps(runs, sharing)[1], 5),
    )


def fit_engine_steps(runs: Sequence[Run], sharing: Sharing) -> tuple[EngineStepFit, float]:
    """The fit, and how far it is off from one optimizer step to the next (root mean square, relative).

    Which requests hold up a step depends on how long they do: both are found in turns.
    """
    engines = [steps for run in runs for steps in run.engines]
    speeds = [run.company.speed(steps.spans, sharing) for run in runs for steps in run.engines]

    def column(name: str) -> Floats:
        return np.concatenate([getattr(steps, name) for steps in engines])

    work = column("seconds") * np.concatenate(speeds)
    known = [
        np.ones(len(work)),
        *map(column, ("prefill_tokens", "sequences", "context_tokens", "finished")),
    ]
    admitted = [steps.admitted() for steps in engines]
    for _ in range(ROUNDS):
        features = np.stack([*known, np.concatenate(admitted)], axis=1)
        x, predicted = fit_work(features, work)
        admitted = [
            steps.admitted(x[-1] * before / speed)
            for steps, speed, before in zip(engines, speeds, admitted, strict=True)
        ]
    rms, cv = _residuals(work, predicted)
    found = EngineStepFit(
        base_s=x[0],
        prefill_token_s=x[1],
        sequence_s=x[2],
        context_token_s=x[3],
        admitted_s=x[5],
        finished_s=x[4],
        jitter=min(0.95, math.sqrt(3.0) * cv),
        n=len(work),
        relative_rms=rms,
    )
    return found, _off_between_steps(runs, work, predicted)


def _off_between_steps(runs: Sequence[Run], work: Floats, predicted: Floats) -> float:
    off, first = [], 0
    for run in runs:
        ends_s = np.array([step.end_s for step in run.steps])
        for steps in run.engines:
            rows = slice(first, first := first + len(steps.spans))
            place = np.searchsorted(ends_s, [begin for begin, _ in steps.spans])
            sums = [np.bincount(place, values[rows], len(ends_s) + 1)[1:-1] for values in (work, predicted)]
            both = (sums[0] > 0) & (sums[1] > 0)
            off.append(sums[1][both] / sums[0][both] - 1.0)
    return float(np.sqrt(np.mean(np.concatenate(off) ** 2)))


def fit_trainer_steps(runs: Sequence[Run], sharing: Sharing) -> TrainerStepFit:
    steps = [step for run in runs for step in run.steps]
    spans = [[(step.begin_s, step.end_s) for step in run.steps] for run in runs]
    speed = np.concatenate(
        [run.company.speed(own, sharing, trainer=True) for run, own in zip(runs, spans, strict=True)]
    )
    tokens = np.array([step.tokens for step in steps])
    work = np.array([step.duration_s for step in steps]) * speed
    x, predicted = fit_work(np.stack([np.ones(len(steps)), tokens], axis=1), work)
    rms, cv = _residuals(work, predicted)
    return TrainerStepFit(
        base_s=x[0],
        token_s=x[1],
        computed_share=_computed_share([run.trace for run in runs]),
        overhead_s=float(np.mean([step.overhead_s for step in steps])),
        cv=cv,
        token_error_s=float(np.std(work - predicted) / max(tokens.std() * math.sqrt(len(steps)), 1e-12)),
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


def fit_work(features: Floats, work: Floats) -> tuple[list[float], Floats]:
    """``work ~ features @ x``, x not negative: (x, fitted work).

    Noise grows with the work, so errors are weighted by 1 / (fitted + mean); at last all is scaled so that
    the fitted work adds up to the measured one.
    """
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    scaled = features / scale
    x = nnls(scaled, work)[0]
    for _ in range(3):
        weight = 1.0 / (scaled @ x + work.mean() + 1e-12)
        x = nnls(scaled * weight[:, None], work * weight)[0]
    fitted = scaled @ x
    factor = work.sum() / max(fitted.sum(), 1e-12)
    return [float(value) for value in x * factor / scale], fitted * factor


def _residuals(seconds: Floats, predicted: Floats) -> tuple[float, float]:
    """Root mean square over the mean, and the coefficient of variation of measured over fitted."""
    rms = float(np.sqrt(np.mean((seconds - predicted) ** 2)) / max(seconds.mean(), 1e-12))
    ratio = seconds / np.maximum(predicted, 1e-12)
    return rms, float(min(ratio.std(), rms))


# -- requests, rewards, syncs ------------------------------------------------------------------------------


def fit_requests(traces: Sequence[RunTrace]) -> RequestFit:
    """From dispatch to the engine's queue, and from the engine's last word to the worker's hands."""
    return fit_line([_ways(trace) for trace in traces])


def _ways(trace: RunTrace) -> Floats:
    """Rows (entered, left, kind) of the worker's line."""
    rows = [(r.dispatched_s, r.admitted_s, 0.0) for r in trace.requests.values()]
    rows += [
        (r.finished_s, trace.samples[name].completed_s, 1.0)
        for name, r in trace.requests.items()
        if name in trace.samples
    ]
    return np.array(sorted(row for row in rows if row[1] >= row[0])).reshape(-1, 3)


def _worker_spans(trace: RunTrace, fit: RequestFit) -> list[Span]:
    ways = _ways(trace)
    service_s = np.where(ways[:, 2] > 0, fit.reply_s, fit.dispatch_s)
    ends_s = ways[:, 0] + line_s(ways[:, 0], service_s)
    return list(zip((ends_s - service_s).tolist(), ends_s.tolist(), strict=True))


def _alone(fit: RequestFit, runs: Sequence[Run], sharing: Sharing) -> RequestFit:
    """Core-seconds instead of the seconds in the company that there was."""
    speeds = [run.company.speed(run.worker, sharing) for run in runs if run.worker]
    speed = float(np.concatenate(speeds).mean()) if speeds else 1.0
    return replace(fit, dispatch_s=fit.dispatch_s * speed, reply_s=fit.reply_s * speed)


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
        other=typical([sync.other_s for sync in syncs]),
        pause=typical([sync.pause_s for sync in syncs]),
        transfer=typical(fixed),
        resume=typical([sync.resume_s for sync in syncs]),
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


def typical(values: Sequence[float]) -> Spread:
    """Median, and the deviation that the quartiles say."""
    low, middle, high = (float(value) for value in np.quantile(values, (0.25, 0.5, 0.75)))
    return Spread(middle, (high - low) / QUARTILES_OF_SD, len(values))
