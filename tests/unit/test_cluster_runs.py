"""Figures of simulated clusters against what a cluster of known numbers must give."""

from __future__ import annotations

import pytest

from grpo_lab.errors import ConfigError
from grpo_lab.harness.cluster_runs import run_cluster, scenario_of
from grpo_lab.sim.scenario import Scenario

# Every sample has 20 tokens, every step 4 x 2 samples, and the trainer is by far the slowest part.
BASE = Scenario(
    engines=2,
    slots=8,
    prompts_per_step=4,
    generations=2,
    max_inflight=64,
    queue_capacity=64,
    steps=12,
    lengths="fixed",
    mean_tokens=20,
    max_tokens=20,
    token_s=0.01,
    step_s=5.0,
    jitter=0.0,
    engine_mode="event",
)


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_a_trainer_that_is_the_bottleneck_sets_throughput_and_trains_at_the_bound(bound):
    figures = run_cluster(scenario_of(BASE, {"max_staleness": bound}), checked=True)
    assert figures["optimizer_steps"] == 12
    assert figures["consumed_tokens"] == 12 * 8 * 20
    assert figures["consumed_length_mean"] == 20
    assert figures["step_s"] == pytest.approx(5.0, rel=0.05)
    assert figures["tokens_per_s"] == pytest.approx(8 * 20 / 5.0, rel=0.05)
    assert figures["trainer_busy_share"] == pytest.approx(1.0, abs=0.05)
    assert figures["staleness_versions_max"] == bound
    assert figures["staleness_versions_mean"] == pytest.approx(bound, abs=0.35)
    assert figures["dropped_tokens"] == figures["samples_dropped"] == figures["deaths"] == 0


def test_synchronous_steps_add_generation_and_training():
    figures = run_cluster(scenario_of(BASE, {"max_staleness": 0}))
    assert figures["staleness_versions_max"] == 0
    assert figures["step_s"] > 5.0 + 20 * 0.01
    share = figures["trainer_idle_share"] + figures["trainer_busy_share"]
    assert share == pytest.approx(1.0, abs=0.06), "a synchronous trainer trains, waits or syncs"
    assert 20 * 0.01 < figures["turnaround_s_mean"] < 2.0


def test_free_generation_with_drop_wastes_what_it_drops():
    figures = run_cluster(scenario_of(BASE, {"staleness_policy": "drop", "step_s": 1.0}))
    assert figures["samples_dropped_stale"] > 0
    assert figures["dropped_tokens"] == 20 * figures["samples_dropped"]
    assert figures["decoded_tokens"] >= figures["consumed_tokens"] + figures["dropped_tokens"]


def test_a_setting_that_is_no_field_is_refused():
    with pytest.raises(ConfigError, match="fields of Scenario"):
        scenario_of(BASE, {"no_such_field": 1})
    with pytest.raises(ConfigError, match="max_staleness"):
        scenario_of(BASE, {"max_staleness": -1})
