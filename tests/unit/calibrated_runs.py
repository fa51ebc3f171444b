"""Runs of a cluster whose times are known, as run directories of a machine that has them."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

from grpo_lab.events import Record, RunDeclared
from grpo_lab.harness.calibration import (
    Calibration,
    EngineStepFit,
    LengthFit,
    RequestFit,
    Sharing,
    Source,
    Spread,
    SyncFit,
    TrainerStepFit,
)
from grpo_lab.harness.calibration_cluster import simulate_calibrated
from grpo_lab.harness.recipe import Recipe
from grpo_lab.harness.validation import cluster_of, recipe_parameters

KNOWN = Calibration(
    source=Source(("truth",), {"cpus": 2}, {"longest_completion_tokens": 48}),
    sharing=Sharing(cores=2, capacity=1.7, trainer_weight=0.5),
    engine_step=EngineStepFit(
        base_s=4e-3,
        prefill_token_s=4e-5,
        sequence_s=5e-5,
        context_token_s=2e-6,
        admitted_s=2e-4,
        finished_s=1e-4,
        jitter=0.05,
        n=0,
        relative_rms=0.0,
    ),
    trainer_step=TrainerStepFit(
        base_s=0.05,
        token_s=2e-4,
        computed_share=0.8,
        overhead_s=0.005,
        cv=0.02,
        token_error_s=0.0,
        n=0,
        relative_rms=0.0,
    ),
    requests=RequestFit(dispatch_s=4e-4, request_latency_s=1e-3, reply_s=5e-4, reply_latency_s=2e-3, n=0),
    reward=Spread(0.01, 0.003, 0),
    sync=SyncFit(
        other=Spread(0.004, 0.001, 0),
        pause=Spread(0.002, 0.0005, 0),
        transfer=Spread(0.010, 0.002, 0),
        resume=Spread(0.001, 0.0002, 0),
        total=Spread(0.0, 0.0, 0),
        bucket_s=1e-3,
        byte_s=1e-9,
        two_term=True,
        nbytes=2_000_000,
        buckets=2,
    ),
    lengths=LengthFit(
        quantiles=tuple(2.0 + 18.0 * step / 100 for step in range(101)),
        tail_from=0.9,
        threshold=20.0,
        tail_scale=6.0,
        tail_shape=0.1,
        censored_share=0.0,
        within_group_correlation=0.5,
        mean=0.0,
        n=0,
    ),
    prompt_quantiles=tuple(float(8 + step % 5) for step in range(101)),
)
RECIPE = Recipe(
    name="known", prompts_per_step=6, num_generations=8, max_inflight=64, queue_capacity=32, steps=24
)
LARGER = dataclasses.replace(RECIPE, prompts_per_step=16, max_inflight=128, steps=14, seed=1)
SYNCHRONOUS = dataclasses.replace(RECIPE, max_staleness=0, steps=14, seed=2)
"""The trainer computes alone: told apart from those in company, it says what company costs."""


UNDISTURBED = dataclasses.replace(KNOWN, sharing=Sharing(cores=8, capacity=8.0, trainer_weight=1.0))
"""As many cores as anybody wants: every time is what the trace says."""


def records_of(recipe: Recipe, known: Calibration = KNOWN) -> tuple[Record, ...]:
    """As a real run would have written them: the declaration says so."""
    return _records(recipe, known is KNOWN)


@cache
def _records(recipe: Recipe, disturbed: bool) -> tuple[Record, ...]:
    known = KNOWN if disturbed else UNDISTURBED
    cluster = cluster_of(recipe_parameters(recipe), known, seed=recipe.seed, steps=recipe.steps)
    return tuple(_real(record) for record in simulate_calibrated(cluster, known))


def _real(record: Record) -> Record:
    if not isinstance(record.event, RunDeclared):
        return record
    return dataclasses.replace(record, event=dataclasses.replace(record.event, world="real"))


def run_directory(
    path: Path, recipe: Recipe, *, steps: int | None = None, known: Calibration = KNOWN
) -> Path:
    """A run directory with the trace (of the first ``steps`` optimizer steps) and the recipe."""
    path.mkdir(parents=True)
    lines = [record.to_line() for record in records_of(recipe, known)]
    if steps is not None:
        applied = [n for n, line in enumerate(lines) if '"optimizer_step_applied"' in line]
        lines = lines[: applied[steps - 1] + 1]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    (path / "config.json").write_text(json.dumps(recipe.to_json()))
    return path
