"""The ablations on simulated clusters: each runs on a tiny grid, and its reading guide's claims can fail."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pandas as pd
import pytest

from grpo_lab.harness.experiment import Experiment, Point, Scale, row_of

NAMES = ("sync_interval", "pause_mode", "admission", "cluster_split", "faults", "scale")

TINY: dict[str, dict[str, tuple[object, ...]]] = {
    "sync_interval": {"max_staleness": (0, 1), "weight_sync_steps": (1, 4)},
    "pause_mode": {"length_sigma": (0.4, 1.2)},
    "admission": {"max_staleness": (1,), "max_inflight": (128,)},
    "cluster_split": {"trainers": (1, 4), "queue_capacity": (8,), "max_inflight": (16, 128)},
    "faults": {"deaths": (0, 2), "restart_s": (5.0, 10.0), "checkpoint_every_steps": (4, 16)},
    "scale": {"engines": (1, 64)},
}


def experiment(name: str) -> Experiment:
    found = importlib.import_module(f"experiments.{name}").EXPERIMENT
    assert isinstance(found, Experiment)
    assert found.name == name
    return found


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    return {}


def is_tiny(name: str, point: Point) -> bool:
    if name == "pause_mode" and point.settings["prefix_policy"] != "versioned":
        return point.settings["way"] == "abort" and point.settings["length_sigma"] == 0.4
    return all(point.settings[axis] in values for axis, values in TINY[name].items())


def table_of(name: str, tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    if name not in tables:
        points = [point for point in experiment(name).points(Scale(seeds=1)) if is_tiny(name, point)]
        tables[name] = pd.DataFrame([row_of(p, experiment(name).run(p, Path("unused"))) for p in points])
    return tables[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_holds_on_a_tiny_grid_and_figures_are_drawn(name, tables):
    table = table_of(name, tables)
    claims = experiment(name).claims(table)
    assert claims
    assert not [f"{claim.words}: {claim.evidence}" for claim in claims if not claim.holds]
    drawn = experiment(name).figures(table)
    assert drawn
    assert all(axes.get_xlabel() and axes.get_ylabel() for figure in drawn.values() for axes in figure.axes)


BENT = [
    ("sync_interval", "no sample is older", {"staleness_versions_max": 9}),
    ("pause_mode", "keep loses no", {"lost_tokens": 1}),
    ("admission", "admission starves no", {"prompts_starved": 1}),
    ("cluster_split", "mean staleness", {"staleness_versions_mean": 9.0}),
    ("faults", "repeats no more", {"steps_repeated": 99}),
    ("scale", "closed form", {"wire_s": 9.0}),
    ("scale", "switch together", {"lag_versions_max": 1}),
    ("scale", "switch together", {"ahead_versions_max": 1}),
    ("scale", "no engine is behind", {"lag_versions_max": 1}),
    ("scale", "no engine is behind", {"ahead_versions_max": 2}),
    ("scale", "no engine is behind", {"ahead_versions_max": 0}),
    ("scale", "as long as the only one", {"paused_s": lambda table: table["engines"] * 0.01}),
]


@pytest.mark.parametrize(("name", "words", "bent"), BENT)
def test_a_claim_that_the_results_do_not_bear_out_does_not_hold(name, words, bent, tables):
    claims = experiment(name).claims(table_of(name, tables).assign(**bent))
    (claim,) = [claim for claim in claims if words in claim.words]
    assert not claim.holds


@pytest.mark.parametrize("name", NAMES)
def test_the_large_grid_has_more_points_and_all_are_different(name):
    small, full = (experiment(name).points(Scale(2, full)) for full in (False, True))
    assert len({point.hash for point in full}) > len({point.hash for point in small})
    assert {point.seed for point in small} == {0, 1}
    assert {point.label for point in full} == {"simulated"}


def test_a_lost_token_is_counted():
    pause_mode = importlib.import_module("experiments.pause_mode")
    point = Point("pause_mode", {"pause_mode": "keep"}, 0)
    cluster = dataclasses.replace(pause_mode.CLUSTER, steps=3)
    records = pause_mode.records_of(pause_mode.scenario_at(point, cluster))
    assert pause_mode.pause_figures(records)["lost_tokens"] == 0
    finished = [i for i, record in enumerate(records) if type(record.event).__name__ == "RequestFinished"]
    at = finished[len(finished) // 2]
    shorter = dataclasses.replace(records[at].event, tokens=records[at].event.tokens - 40)
    records[at] = dataclasses.replace(records[at], event=shorter)
    assert pause_mode.pause_figures(records)["lost_tokens"] >= 40


def test_the_closed_form_of_lengths_and_rates():
    split = importlib.import_module("experiments.cluster_split")
    fixed = dataclasses.replace(split.CLUSTER, length_sigma=0.0, mean_tokens=100, reward_s=0.0, network_s=0.0)
    mean, longest = split.lengths(fixed)
    assert mean == longest == pytest.approx(100, abs=1)
    # No scoring and no network: 4 groups of 4 samples keep 8 sequences in each of 2 engines.
    assert split.generation_rate(fixed, 4) == pytest.approx(4 / (mean * 0.01 * (1 + 0.01 * 8)), rel=1e-6)
