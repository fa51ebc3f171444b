"""Runs of simulated clusters for experiments: a scenario in, a row of figures out; seconds are virtual."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_lab.errors import ConfigError
from grpo_lab.events import (
    GroupConsumed,
    GroupDropped,
    MemberDied,
    ModelStep,
    OptimizerStepApplied,
    Record,
    RequestFinished,
    SampleCompleted,
    SampleDispatched,
    SyncEnded,
)
from grpo_lab.harness.experiment import Point, Setting
from grpo_lab.sim.scenario import Scenario
from grpo_lab.sim.world import simulate

WARM_STEPS = 2
"""Optimizer steps at the start that figures leave out: queues fill, and staleness grows to its level."""


def run_cluster(scenario: Scenario, *, checked: bool = False) -> dict[str, Setting]:
    """Simulates it and returns ``cluster_figures``.

    Args:
        checked: also judge every event. Raises ``InvariantViolation`` for a broken rule.
    """
    return cluster_figures(records_of(scenario, checked=checked))


def records_of(scenario: Scenario, *, checked: bool = False) -> list[Record]:
    """The trace of ``run_cluster``, for figures of one's own beside ``cluster_figures``."""
    records: list[Record] = []
    simulate(scenario, records=records, checked=checked)
    return records


def cluster_figures(records: Iterable[Record], *, warm_steps: int = WARM_STEPS) -> dict[str, Setting]:
    """What a run cost and how stale it was.

    ``tokens_per_s`` counts tokens of consumed samples. Rates and shares are over the time from the end of
    optimizer step ``warm_steps`` to the end of the last; staleness is a mean over groups consumed then.
    Of the ``decoded_tokens``, ``consumed_tokens`` are in samples that were trained on, ``dropped_tokens`` in
    samples that were finished and thrown away before the end; the others were cut off. ``recomputed_tokens``
    were prefilled again after a pause or a preemption; no decoded token is in them.
    """
    tally = _Tally()
    for record in records:
        tally.see(record)
    return tally.figures(warm_steps)


@dataclass(slots=True)
class _Tally:
    tokens_of: dict[str, int] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    dispatched_s: dict[str, float] = field(default_factory=dict)
    waited_s: list[float] = field(default_factory=list)
    applied_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    consumed: list[list[GroupConsumed]] = field(default_factory=list)
    consumed_at_s: list[float] = field(default_factory=list)
    steps: list[tuple[float, ModelStep]] = field(default_factory=list)
    syncs: list[SyncEnded] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    recomputed: int = 0
    deaths: int = 0
    engines: set[str] = field(default_factory=set)

    def see(self, record: Record) -> None:
        match record.event:
            case ModelStep(shard=0) as step:
                self.steps.append((record.t, step))
                self.engines.add(step.engine)
            case SampleDispatched(sample=sample):
                self.dispatched_s.setdefault(sample, record.t)
            case SampleCompleted(sample=sample, tokens=tokens):
                self.tokens_of[sample] = tokens
            case GroupConsumed() as group:
                while len(self.consumed) <= group.optimizer_step:
                    self.consumed.append([])
                    self.consumed_at_s.append(record.t)
                self.consumed[group.optimizer_step].append(group)
            case GroupDropped(samples=samples, reason=reason):
                self.dropped[reason] += len(samples)
                self.dropped_tokens[reason] += sum(self.tokens_of.get(sample, 0) for sample in samples)
            case OptimizerStepApplied(wait_s=wait_s, duration_s=duration_s):
                self.applied_s.append(record.t)
                self.waited_s.append(wait_s)
                self.busy_s.append(duration_s)
            case SyncEnded() as sync:
                self.syncs.append(sync)
            case RequestFinished(recomputed_tokens=tokens):
                self.recomputed += tokens
            case MemberDied():
                self.deaths += 1

    def figures(self, warm_steps: int) -> dict[str, Setting]:
        first = min(warm_steps, len(self.applied_s) - 1)
        began_s, ended_s = self.applied_s[first - 1] if first else 0.0, self.applied_s[-1]
        window_s = max(ended_s - began_s, 1e-9)
        groups = [group for step in self.consumed[first:] for group in step]
        counted = [sample for group in groups for sample in group.samples]
        tokens = sum(self.tokens_of.get(sample, 0) for sample in counted)
        ages = [group.version - min(group.versions_first) for group in groups]
        ages_steps = [group.optimizer_step - group.optimizer_step_first for group in groups]
        in_window = [step for t, step in self.steps if began_s < t <= ended_s]
        busy_s = sum(step.duration_s for step in in_window)
        sequence_s = sum(step.duration_s * step.sequences for step in in_window)
        trained_on = [sample for step in self.consumed for group in step for sample in group.samples]
        decoded = sum(step.decode_tokens for _, step in self.steps)
        dropped = sum(self.dropped_tokens.values())
        totals = [sync.phases_s.get("total", 0.0) for sync in self.syncs]
        turnaround_s = [
            at_s - self.dispatched_s[sample]
            for step, at_s in zip(self.consumed[first:], self.consumed_at_s[first:], strict=True)
            for group in step
            for sample in group.samples
            if sample in self.dispatched_s
        ]
        return {
            "optimizer_steps": len(self.applied_s),
            "virtual_s": ended_s,
            "step_s": window_s / max(len(self.applied_s) - first, 1),
            "tokens_per_s": tokens / window_s,
            "samples_per_s": len(counted) / window_s,
            "trainer_idle_share": sum(self.waited_s[first:]) / window_s,
            "trainer_busy_share": sum(self.busy_s[first:]) / window_s,
            "engine_busy_share": busy_s / (window_s * max(len(self.engines), 1)),
            "sequences_mean": sequence_s / (window_s * max(len(self.engines), 1)),
            "staleness_versions_mean": _mean(ages),
            "staleness_versions_p99": float(np.percentile(ages, 99)) if ages else None,
            "staleness_versions_max": max(ages, default=None),
            "staleness_steps_mean": _mean(ages_steps),
            "staleness_steps_max": max(ages_steps, default=None),
            "turnaround_s_mean": _mean(turnaround_s),
            "sync_s_mean": _mean(totals),
            "sync_share": sum(totals) / max(ended_s, 1e-9),
            "decoded_tokens": decoded,
            "consumed_tokens": sum(self.tokens_of.get(sample, 0) for sample in trained_on),
            "dropped_tokens": dropped - self.dropped_tokens["shutdown"],
            "dropped_share": dropped / decoded if decoded else 0.0,
            "recomputed_tokens": self.recomputed,
            "samples_dropped": sum(self.dropped.values()) - self.dropped["shutdown"],
            "samples_dropped_stale": self.dropped["stale"],
            "consumed_length_mean": _mean([self.tokens_of.get(sample, 0) for sample in counted]),
            "deaths": self.deaths,
        }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def scenario_of(base: Scenario, settings: Mapping[str, Setting]) -> Scenario:
    """``base`` with other fields. Raises ``ConfigError`` for a setting that is no field, or cannot be."""
    try:
        return dataclasses.replace(base, **settings)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError("settings", dict(settings), f"fields of Scenario ({error})") from error


ABLATION_CLUSTER = Scenario(
    engines=2,
    slots=32,
    prompts_per_step=8,
    generations=4,
    max_staleness=2,
    max_inflight=64,
    queue_capacity=64,
    steps=40,
    lengths="lognormal",
    mean_tokens=150,
    max_tokens=600,
    prompt_tokens=50,
    kv_blocks=100_000,
    batch_tokens=8192,
    engine_mode="event",
    cache_outputs=False,
    step_s=3.0,
    token_s=0.01,
    jitter=0.5,
    bandwidth_bytes_s=4e3,
    checkpoint_every_steps=0,
)
"""What the ablations start from: an optimizer step of 32 samples takes 3 s, their generation about 2 s on
busy engines and 6 s for the longest, a weight sync 0.5 s. The seconds are chosen, not measured: read ratios.
"""


def scenario_at(point: Point, base: Scenario = ABLATION_CLUSTER) -> Scenario:
    """``base`` with a point's settings and seed."""
    return scenario_of(base, {**point.settings, "seed": point.seed})
