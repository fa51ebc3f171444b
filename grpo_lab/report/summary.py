"""The figures of a run: ``summary.json``, and ``metrics.parquet`` with a row for each optimizer step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from grpo_lab.events import Record
from grpo_lab.report.digest import Digest
from grpo_lab.report.sync_log import PROOFS

METRICS_SCHEMA = pa.schema(
    [
        ("term", pa.int64()),
        ("step", pa.int64()),
        ("version", pa.int64()),
        ("t", pa.float64()),
        ("loss", pa.float64()),
        ("reward_mean", pa.float64()),
        ("grad_norm", pa.float64()),
        ("tokens", pa.int64()),
        ("groups", pa.int64()),
        ("samples", pa.int64()),
        ("duration_s", pa.float64()),
        ("wait_s", pa.float64()),
        ("weight_sync_time_s", pa.float64()),
        ("queue_depth_groups", pa.int64()),
        ("staleness_versions_mean", pa.float64()),
        ("staleness_versions_max", pa.int64()),
        ("staleness_steps_mean", pa.float64()),
        ("staleness_steps_max", pa.int64()),
        ("logprob_gap_max", pa.float64()),
    ]
)

UNCALIBRATED = "uncalibrated latencies"
"""Stands beside simulated seconds that were chosen, not measured: nobody knows how far they are off."""


def summarise(
    records: Iterable[Record] | Digest,
    *,
    checked: Mapping[str, Any] | None = None,
    wall_s: float | None = None,
    package_version: str = "",
    commit: str = "",
) -> dict[str, Any]:
    """Every figure of ``summary.json``. One pass over ``records``, which may be an iterator.

    Args:
        checked: the checker's result as JSON data; without it the rule figures are None.
        wall_s: real seconds that the run took, where the trace's clock is virtual. A real run's
            wall time is the time of its last event.

    Numbers that the trace does not contain are None. Counts are in samples (completions).
    """
    digest = records if isinstance(records, Digest) else Digest(records)
    return {
        **_rules(checked),
        **_learning(digest),
        **_staleness(digest),
        **_conservation(digest),
        **_syncs(digest),
        **_speed(digest, wall_s),
        "ended": digest.outcome,
        "world": digest.declared.world if digest.declared else None,
        "engine": digest.declared.engine if digest.declared else None,
        "seed": digest.declared.seed if digest.declared else None,
        "version": package_version,
        "commit": commit,
    }


def metrics_table(records: Iterable[Record] | Digest) -> pa.Table:
    """One row per optimizer step, in the order in which the steps were applied.

    ``t`` is seconds since the run began at the end of the step; ``weight_sync_time_s`` is what syncs
    took since the step before; staleness is over the samples that the step consumed.
    """
    digest = records if isinstance(records, Digest) else Digest(records)
    rows = [
        {
            **{name: getattr(step, name) for name in METRICS_SCHEMA.names if hasattr(step, name)},
            "staleness_versions_mean": mean(step.staleness_versions),
            "staleness_versions_max": max(step.staleness_versions, default=None),
            "staleness_steps_mean": mean(step.staleness_steps),
            "staleness_steps_max": max(step.staleness_steps, default=None),
        }
        for step in digest.training.steps
    ]
    return pa.Table.from_pylist(rows, schema=METRICS_SCHEMA)


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there, or None for none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean_of(counts: Counter[int]) -> float | None:
    total = counts.total()
    return sum(value * count for value, count in counts.items()) / total if total else None


def not_applicable(checked: Mapping[str, Any]) -> list[str]:
    """Rules that were checked for nothing: no evidence in this trace, or a parameter was missing."""
    return [rule["id"] for rule in checked["rules"] if rule.get("status") in ("n.a.", "not evaluable")]


def _rules(checked: Mapping[str, Any] | None) -> dict[str, Any]:
    if checked is None:
        return {"violations": None, "rules_evaluated": None, "rules_not_applicable": None}
    return {
        "violations": checked["violations"],
        "rules_evaluated": {
            rule["id"]: rule["evaluations"] for rule in checked["rules"] if rule["evaluations"]
        },
        "rules_not_applicable": not_applicable(checked),
    }


def _learning(digest: Digest) -> dict[str, Any]:
    heldout = [item for item in digest.training.evaluations if item.split == "heldout"]
    before = [item.accuracy for item in heldout if item.before_training]
    after = [item.accuracy for item in heldout if not item.before_training]
    rewards = [step.reward_mean for step in digest.training.steps if step.reward_mean is not None]
    return {
        "heldout_accuracy_before": before[0] if before else None,
        "heldout_accuracy_after": after[-1] if after else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "reward_first_5_mean": mean(rewards[:5]),
        "reward_last_5_mean": mean(rewards[-5:]),
        "optimizer_steps": len(digest.training.steps),
        "weight_versions": len(digest.syncs.commits),
    }


def _staleness(digest: Digest) -> dict[str, Any]:
    versions, steps = digest.training.staleness_versions, digest.training.staleness_steps
    gaps = [gap for _, gap, _ in digest.training.gaps]
    # A NaN gap is the worst of all: max() would lose it.
    worst = math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps, default=None)
    return {
        "staleness_max_versions": max(versions, default=None),
        "staleness_max_steps": max(steps, default=None),
        "staleness_mean_versions": _mean_of(versions),
        "staleness_mean_steps": _mean_of(steps),
        "logprob_gap_max": worst,
    }


def _conservation(digest: Digest) -> dict[str, Any]:
    rollouts = digest.rollouts
    return {
        "dispatched": rollouts.dispatched,
        "consumed": rollouts.consumed,
        "dropped": rollouts.dropped.total(),
        "dropped_by_reason": dict(sorted(rollouts.dropped.items())),
        "in_flight": rollouts.in_flight,
        "queued": rollouts.queued,
        "provisional_dropped": rollouts.provisional_dropped,
    }


def _syncs(digest: Digest) -> dict[str, Any]:
    proofs = digest.syncs.proofs
    return {
        "sync_s": digest.syncs.mean_s(),
        "proofs": {name: proofs[name] for name in (*PROOFS, *sorted(set(proofs) - set(PROOFS)))},
        "syncs": len(digest.syncs.syncs),
        "syncs_aborted": sum(sync.outcome == "aborted" for sync in digest.syncs.syncs),
    }


def _speed(digest: Digest, wall_s: float | None) -> dict[str, Any]:
    rollouts, busy = digest.rollouts, digest.busy_fractions()
    span = (rollouts.last_completion_t or 0.0) - (rollouts.first_dispatch_t or 0.0)
    return {
        "tokens_per_s": rollouts.tokens / span if span > 0 else None,
        "tokens_generated": rollouts.tokens,
        "tokens_trained": sum(step.tokens for step in digest.training.steps),
        "wall_s": wall_s if wall_s is not None or digest.simulated else digest.end_t,
        "virtual_s": digest.end_t if digest.simulated else None,
        "trainer_busy_fraction": busy["trainer"],
        "engine_busy_fraction": busy["engine"],
        "overlap_fraction": busy["both"],
    }
