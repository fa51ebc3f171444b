"""Processes that share cores: how fast each goes while others compute, read from a trace.

Trainer, rollout worker and engines are processes that keep one core busy each while they compute. What a
thing takes is its seconds times the speed of its process meanwhile (``Sharing.speeds``): core-seconds, which
do not depend on the company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from grpo_lab.harness.calibration import Sharing
from grpo_lab.harness.calibration_trace import Floats, RunTrace
from grpo_lab.report.spans import Span, merged

CAPACITIES = 21  # that are tried, from one core's to all cores'
WEIGHTS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1)
DISTURBANCES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
Misfit = Callable[[Sharing], float]


class Company:
    """Who computes at each time of a run: the trainer, and how many others."""

    def __init__(self, trainer: Iterable[Span], others: Iterable[Iterable[Span]]) -> None:
        rows = [(t, change, 0) for t, change in _changes(trainer)]
        rows += [(t, 0, change) for spans in others for t, change in _changes(spans)]
        times, training, company = np.array(sorted(rows) or [(0.0, 0, 0)]).T
        self._times = times
        self._training = np.cumsum(training).astype(int)
        self._others = np.cumsum(company).astype(int)

    def speed(self, spans: Sequence[Span], sharing: Sharing, *, trainer: bool = False) -> Floats:
        """Mean speed over each span, in which the trainer, or else another process, computes."""
        if not len(spans):
            return np.empty(0)
        most = int(self._others.max())
        table = np.array(
            [[sharing.speeds(t, n)[not trainer] for n in range(most + 1)] for t in (False, True)]
        )
        speeds = table[self._training, self._others]
        done = np.concatenate([[0.0], np.cumsum(speeds[:-1] * np.diff(self._times))])
        begins, ends = np.array(spans).T
        went = np.interp(ends, self._times, done) - np.interp(begins, self._times, done)
        length = ends - begins
        mean: Floats = np.where(length > 1e-9, went / np.maximum(length, 1e-9), 1.0)
        return np.clip(mean, table.min(), 1.0)


def _changes(spans: Iterable[Span]) -> Iterable[tuple[float, int]]:
    return ((t, change) for begin, end in merged(spans) for t, change in ((begin, 1), (end, -1)))


def company(trace: RunTrace, worker: Sequence[Span]) -> Company:
    """Of a run whose worker was busy in these spans."""
    return Company(trace.training, [worker, *(engine.spans for engine in trace.engine_steps())])


def best_sharing(cores: int, trainer_misfit: Misfit, engine_misfit: Misfit) -> Sharing:
    """Capacity and weight with the least misfit of the trainer's steps, then the disturbance with the least
    of the engines'; of equals that in which others disturb least.
    """
    tried = [
        Sharing(cores, float(capacity), weight)
        for capacity in np.linspace(cores, 1.0, CAPACITIES).round(2)
        for weight in WEIGHTS
    ]
    found = min(tried, key=trainer_misfit)
    return min((replace(found, trainer_disturbs=part) for part in DISTURBANCES), key=engine_misfit)
