"""The learning experiments: their points run in virtual time, and each of their claims can fail."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
import pytest

from experiments import learning_rate_vs_lag, staleness_vs_reward
from grpo_lab.events import Evaluated, GroupConsumed, OptimizerStepApplied, Record, StepPlanned
from grpo_lab.harness.experiment import Point, Scale, row_of
from grpo_lab.harness.learning_runs import (
    ESS,
    LEARNING,
    RATIO,
    LearningCurve,
    StepFigures,
    read_learning,
    room_for,
)
from grpo_lab.tasks import get_task
from grpo_lab.tasks.tiny_model import TinyModelSpec, build_model

STEPS = 8


def digits_used(completions, **_):
    """A reward that untrained samples differ in."""
    return [float(len(set(text))) for text in completions]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What a point leaves open, small enough for a test."""
    path = tmp_path_factory.mktemp("model")
    network, tokenizer = build_model(TinyModelSpec(num_layers=1, hidden_size=32), get_task("sort_digits"), 0)
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    small = {"prompts_per_step": 2, "num_generations": 2, "heldout_prompts": 8}
    return dataclasses.replace(LEARNING, model=str(path), reward=f"{__name__}:digits_used", **small)


def test_grids_are_of_the_size_that_was_agreed():
    for module, small, full in ((staleness_vs_reward, 7, 31), (learning_rate_vs_lag, 9, 30)):
        assert len(module.points(Scale(seeds=3))) == 3 * small
        assert len(module.points(Scale(seeds=5, full=True))) == 5 * full
        assert {point.label for point in module.points(Scale())} == {"hybrid"}


def test_a_point_runs_and_its_samples_are_as_stale_as_its_bound(tiny, tmp_path):
    settings = {"bound": 2, "correction": "tis", "learning_rate": 1e-3, "steps": 4}
    row = staleness_vs_reward.run_with(Point("e", settings), tmp_path, tiny)
    assert json.loads(row["staleness_series"]) == [0, 1, 2, 2]
    assert row["staleness_max"] == 2
    assert json.loads(row["accuracy_step_series"]) == [0, 4]
    ess = json.loads(row["ess_series"])
    assert ess[0] == pytest.approx(1.0, abs=1e-4)
    assert ess[-1] < ess[0]
    assert row_of(Point("e", settings), row)["virtual_s"] > 0


def test_a_point_of_the_other_experiment_runs(tiny, tmp_path):
    settings = {"lag": 1, "learning_rate": 1e-3, "steps": 2}
    row = learning_rate_vs_lag.run_with(Point("e", settings), tmp_path, tiny)
    assert json.loads(row["staleness_series"]) == [0, 1]


def test_a_trace_is_read_step_by_step():
    def consumed(t, step, version, first):
        groups = {"term": 1, "number": step, "prompt_index": step, "samples": ("s",)}
        return t, GroupConsumed(
            group=f"t1.g{step}",
            versions_first=(first,),
            versions_last=(first,),
            version=version,
            optimizer_step=step,
            **groups,
        )

    def applied(t, step, reward, metrics):
        common = {"term": 1, "version": step + 1, "loss": 0.0, "reward_mean": reward}
        return t, OptimizerStepApplied(optimizer_step=step, metrics=metrics, **common)

    def evaluated(t, step, accuracy):
        return t, Evaluated(split="heldout", accuracy=accuracy, optimizer_step=step, version=step, prompts=8)

    rows = [
        evaluated(0.0, 0, 0.2),
        (5.0, StepPlanned(term=1, optimizer_step=0, version=1, groups=("t1.g0",))),
        consumed(5.0, 0, 1, 1),
        applied(6.0, 0, 0.25, {ESS: 0.9, RATIO: 1.1}),
        consumed(6.0, 1, 2, 1),
        applied(8.0, 1, 0.5, {}),
        evaluated(8.0, 2, 0.4),
    ]
    curve = read_learning([Record(t, "trainer", seq, (), event) for seq, (t, event) in enumerate(rows)])
    assert curve.steps == (
        StepFigures(1.0, 0.25, 0.0, 0, 0.9, 1.1),
        StepFigures(3.0, 0.5, 1.0, 1, None, None),
    )
    assert curve.accuracies == ((0, 0.0, 0.2), (2, 3.0, 0.4))
    row = curve.row()
    assert row["accuracy_before"] == 0.2
    assert (row["ess_last"], row["staleness_last"]) == (None, 1.0)


def test_the_room_is_what_admission_lets_in():
    assert room_for(2, prompts_per_step=16, num_generations=8) == {
        "max_inflight": 384,
        "queue_capacity": 48,
    }


def curve(stale, ess, gain, step_s):
    """A run that gains evenly; samples age by one a step up to ``stale``."""
    steps = tuple(
        StepFigures((i + 1) * step_s, 0.2, min(i, stale), min(i, stale), ess if i else 1.0, 1.0)
        for i in range(STEPS)
    )
    looks = (0, STEPS // 2, STEPS)
    return LearningCurve(
        steps, tuple((step, step * step_s, round(0.3 + gain * step / STEPS, 5)) for step in looks)
    )


def reward_table(**changes):
    """Results that bear out all claims of ``staleness_vs_reward``, and what ``changes`` does to them."""
    ess = {0: 1.0, 1: 0.9, 4: 0.5}
    gains = {(0, "none"): 0.4, (4, "none"): 0.0}
    arms = [(0, "none"), *((bound, name) for bound in (1, 4) for name in ("none", "tis", "clip"))]
    rows = []
    for seed in range(3):
        for bound, name in arms:
            own = {
                "stale": bound,
                "ess": ess[bound],
                "gain": gains.get((bound, name), 0.38) + 0.01 * seed,
                "step_s": 1.0 if bound else 1.6,
                **changes.get(f"{name}{bound}", {}),
            }
            point = Point("staleness_vs_reward", {"bound": bound, "correction": name}, seed, "hybrid")
            rows.append(row_of(point, curve(**own).row()))
    return pd.DataFrame(rows)


def test_claims_hold_on_results_that_bear_them_out():
    table = reward_table()
    assert [claim.words for claim in staleness_vs_reward.claims(table) if not claim.holds] == []
    assert len(staleness_vs_reward.figures(table)) == 3


@pytest.mark.parametrize(
    ("arm", "change", "words"),
    [
        ("tis4", {"stale": 2}, "as stale as the bound lets them be"),
        ("tis1", {"stale": 4}, "as stale as the bound lets them be"),
        ("none0", {"ess": 0.9}, "importance ratio is 1"),
        ("none4", {"ess": 0.95}, "effective sample size is smaller"),
        ("none4", {"gain": 0.6}, "ends below bound 0"),
        ("clip4", {"gain": -0.1}, "tis and clip end above"),
        ("tis1", {"step_s": 3.0}, "in less virtual time"),
        ("tis1", {"gain": 0.1}, "in less virtual time"),
    ],
)
def test_each_claim_can_fail(arm, change, words):
    failed = [
        claim.words for claim in staleness_vs_reward.claims(reward_table(**{arm: change})) if not claim.holds
    ]
    assert any(words in claim for claim in failed), failed


@pytest.mark.parametrize("module", [staleness_vs_reward, learning_rate_vs_lag])
def test_a_missing_run_spoils_no_report(module):
    table = reward_table() if module is staleness_vs_reward else lag_table()
    for missing in range(len(table) // 3):
        rest = table.drop(index=missing)
        assert [claim.words for claim in module.claims(rest) if not claim.holds] == []
    assert module.figures(rest)


def lag_table(drift=lambda lag, rate: 5e2 * lag * rate, gain=lambda lag, rate: 0.4 - 400 * lag * rate, **own):
    rows = []
    for seed in range(3):
        for lag in (0, 2, 4):
            for rate in (2.5e-5, 5e-5, 1e-4):
                ess = 1 / (1 + drift(lag, rate) ** 2 * (1 + 0.01 * seed))
                values = {"stale": lag, "ess": ess, "gain": gain(lag, rate), "step_s": 1.0, **own}
                point = Point("learning_rate_vs_lag", {"lag": lag, "learning_rate": rate}, seed, "hybrid")
                rows.append(row_of(point, curve(**values).row()))
    return pd.DataFrame(rows)


def test_the_product_law_is_seen_where_it_holds():
    table = lag_table()
    assert [claim.words for claim in learning_rate_vs_lag.claims(table) if not claim.holds] == []
    lag, rate = learning_rate_vs_lag.exponents(learning_rate_vs_lag.measured(table), "lag", "learning_rate")
    assert (lag, rate) == (pytest.approx(1.0, abs=0.02), pytest.approx(1.0, abs=0.02))
    assert len(learning_rate_vs_lag.figures(table)) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stale": 1}, "as old as the lag says"),
        ({"drift": lambda lag, rate: 10 * (lag * rate) ** 0.5}, "exponent is 1"),
        ({"drift": lambda lag, rate: 5e2 * lag**3 * rate}, "equal product"),
        ({"gain": lambda lag, rate: 0.2 + 400 * lag * rate}, "rank correlation"),
    ],
)
def test_the_product_law_can_fail(changes, words):
    failed = [claim.words for claim in learning_rate_vs_lag.claims(lag_table(**changes)) if not claim.holds]
    assert any(words in claim for claim in failed), failed
