"""Predicts a run from its declared parameters and a calibration, and compares it with what was measured."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import wasserstein_distance

from grpo_lab.errors import ConfigError, DataError
from grpo_lab.events import Record
from grpo_lab.harness.calibration import Calibration
from grpo_lab.harness.calibration_cluster import Cluster, simulate_calibrated
from grpo_lab.harness.calibration_runs import SETTINGS, RealRun, machine
from grpo_lab.harness.calibration_trace import RunTrace
from grpo_lab.harness.cluster_runs import WARM_STEPS, cluster_figures
from grpo_lab.harness.recipe import Recipe
from grpo_lab.harness.validation_figures import COMPARED, Figures
from grpo_lab.sim.scenario import SHARED_FIELDS, Scenario

SLOTS, BATCH_TOKENS, KV_BLOCKS = 128, 2048, 2048  # of `grpo-lab serve`, which runs start
WHOLE_MODEL_BYTES = 1 << 20  # one bucket for the simulated weights
MAX_STEPS = 40
"""Optimizer steps of a prediction, at most: more tell nothing new of a run in its steady state."""


def figures_of(records: Sequence[Record]) -> Figures:
    """Raises ``DataError`` for a trace with fewer than four optimizer steps."""
    trace = RunTrace(records)
    steps = trace.trainer_steps
    if len(steps) <= WARM_STEPS + 1:
        raise DataError(
            f"too short a run: {len(steps)} optimizer steps, at least {WARM_STEPS + 2} are needed"
        )
    common = cluster_figures(records)
    groups = [group for step, group in trace.consumed if step >= WARM_STEPS]
    ages = Counter(group.version - min(group.versions_first) for group in groups)
    began_s, ended_s = steps[WARM_STEPS - 1].end_s, steps[-1].end_s
    rows = [row for row in trace.token_times() if began_s <= row[0] <= ended_s]
    gaps = [(last - first) / (tokens - 1) for _, first, last, tokens in rows if tokens > 1]
    totals = [sync.total_s for sync in trace.syncs[1:]]
    values = list(ages.elements())

    def number(name: str) -> float:
        value = common[name]
        return float(value) if isinstance(value, int | float) else 0.0

    return Figures(
        tokens_per_s=number("tokens_per_s"),
        step_s=number("step_s"),
        sync_s=_mean(totals),
        staleness_mean=float(np.mean(values)),
        staleness_p99=float(np.percentile(values, 99)),
        staleness_max=max(values),
        staleness_steps_mean=number("staleness_steps_mean"),
        ttft_s=_mean([first - sent for sent, first, _, _ in rows]),
        tpot_s=_mean(gaps),
        trainer_idle_share=number("trainer_idle_share"),
        engine_busy_share=number("engine_busy_share"),
        dropped_share=number("dropped_share"),
        staleness=dict(sorted(ages.items())),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# -- prediction ----------------------------------------------------------------------------------------------


def recipe_parameters(recipe: Recipe) -> dict[str, Any]:
    """As a run of the recipe declares them."""
    return {
        **recipe.to_json(),
        "groups_per_step": recipe.prompts_per_step,
        "max_inflight_tasks": recipe.max_inflight,
    }


def cluster_of(
    parameters: Mapping[str, Any], calibration: Calibration, *, seed: int, steps: int = 0
) -> Cluster:
    """The simulated cluster for a run's declared parameters.

    Args:
        steps: optimizer steps; 0: the run's own, at most ``MAX_STEPS``.

    Raises:
        DataError: the parameters lack something, or ask for what the simulation does not have.
    """
    try:
        inflight = parameters["max_inflight_tasks"]
        fit = calibration.engine_step
        longest = calibration.source.settings.get("longest_completion_tokens", 1)
        slots = SLOTS if parameters["engine"] == "sim" else inflight + 1
        scenario = Scenario(
            **{name: parameters[name] for name in (*SHARED_FIELDS, "engines") if name in parameters},
            sync_scope=parameters.get("scope", "global"),
            prompts_per_step=parameters["groups_per_step"],
            generations=parameters["num_generations"],
            max_inflight=inflight,
            steps=steps or min(int(parameters.get("steps", MAX_STEPS)), MAX_STEPS),
            max_tokens=parameters.get("max_completion_length") or longest,
            slots=slots,
            batch_tokens=BATCH_TOKENS,
            kv_blocks=max(KV_BLOCKS, slots),
            lengths="fixed",  # the calibrated policy draws its own
            prompt_tokens=int(max(calibration.prompt_quantiles)),
            token_s=max(fit.base_s + fit.sequence_s * slots, 1e-6),  # for limits of time only
            network_s=0.0,
            bucket_bytes=WHOLE_MODEL_BYTES,
            checkpoint_every_steps=0,
            seed=seed,
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"the run does not declare what a prediction needs: {error}") from error
    except ConfigError as error:
        raise DataError(f"the run cannot be simulated: {error}") from error
    return Cluster(scenario, int(parameters.get("bucket_bytes") or calibration.sync.nbytes or 1))


def predict(
    parameters: Mapping[str, Any], calibration: Calibration, seeds: int, steps: int = 0
) -> list[Figures]:
    """Figures of one simulated run for each seed."""
    return [
        figures_of(
            simulate_calibrated(cluster_of(parameters, calibration, seed=seed, steps=steps), calibration)
        )
        for seed in range(seeds)
    ]


# -- comparison ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity: means over the predicted runs and over the measured ones, and their deviations."""

    quantity: str
    predicted: float | None
    predicted_sd: float
    measured: float | None
    measured_sd: float

    @property
    def error(self) -> float | None:
        """Predicted minus measured."""
        return None if self.predicted is None or self.measured is None else self.predicted - self.measured

    @property
    def relative(self) -> float | None:
        return self.error / self.measured if self.error is not None and self.measured else None

    def to_json(self) -> dict[str, Any]:
        names = ("quantity", "predicted", "predicted_sd", "measured", "measured_sd", "error", "relative")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Comparison:
    """``wasserstein_versions`` is the distance between the two distributions of staleness, in versions."""

    rows: tuple[Row, ...]
    wasserstein_versions: float
    staleness_predicted: Mapping[int, float]
    staleness_measured: Mapping[int, float]

    def row(self, quantity: str) -> Row:
        return next(row for row in self.rows if row.quantity == quantity)

    def errors(self) -> dict[str, float]:
        """By quantity, for ``Calibration.held_out``: relative, or in versions where it is staleness."""
        found = {row.quantity: row.relative for row in self.rows if row.quantity != "staleness_mean"}
        found["staleness_mean"] = self.row("staleness_mean").error
        known = {name: value for name, value in found.items() if value is not None}
        return {**known, "staleness_distance": self.wasserstein_versions}

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [row.to_json() for row in self.rows],
            "staleness": {
                "wasserstein_versions": self.wasserstein_versions,
                "predicted": {str(age): share for age, share in self.staleness_predicted.items()},
                "measured": {str(age): share for age, share in self.staleness_measured.items()},
            },
        }


def compare(predicted: Sequence[Figures], measured: Sequence[Figures]) -> Comparison:
    """Both not empty."""
    shares = [_shares(figures) for figures in (predicted, measured)]
    distance = wasserstein_distance(*(list(s) for s in shares), *(list(s.values()) for s in shares))
    return Comparison(
        rows=tuple(
            Row(name, *_mean_and_sd(predicted, name), *_mean_and_sd(measured, name)) for name in COMPARED
        ),
        wasserstein_versions=float(distance),
        staleness_predicted=shares[0],
        staleness_measured=shares[1],
    )


def _mean_and_sd(figures: Sequence[Figures], name: str) -> tuple[float | None, float]:
    values = [value for one in figures if (value := getattr(one, name)) is not None]
    if not values:
        return None, 0.0
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _shares(figures: Sequence[Figures]) -> dict[int, float]:
    total: Counter[int] = Counter()
    for one in figures:
        total.update(one.staleness)
    return {age: count / total.total() for age, count in sorted(total.items())}


def caveats(run: RealRun, calibration: Calibration) -> list[str]:
    """Why this comparison may say less than it seems to."""
    found = []
    if run.path.resolve().name in calibration.source.runs:
        found.append("the calibration was fitted to this very run: this is no prediction")
    parameters, known = run.parameters, calibration.source.settings
    for name in SETTINGS:
        if name in known and name in parameters and parameters[name] != known[name]:
            found.append(f"{name} is {parameters[name]!r} here and was {known[name]!r} in the calibration")
    here = machine()
    for name in ("cpus", "processor"):
        if here[name] != calibration.source.machine.get(name):
            found.append(f"calibrated on another machine ({name} {calibration.source.machine.get(name)!r})")
    if run.declared.parameters.get("trainer_ranks", 1) != 1:
        found.append("a light trainer has one rank; collectives of several are not in the prediction")
    return found
