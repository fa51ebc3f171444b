"""What ``experiments.overlap_simulated`` reads out of traces."""

import json

import pytest
from rich.console import Console
from simulated_recipe import tiny_recipe, untrained_model

from experiments.overlap_simulated import Curve, ratio_of, ratio_until, read_curve, run_mode, table
from grpo_lab.events import Evaluated, OptimizerStepApplied, Record, StepPlanned


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return untrained_model(tmp_path_factory.mktemp("model"))


def evaluated(t, step, accuracy):
    return t, Evaluated(split="heldout", accuracy=accuracy, optimizer_step=step, version=step, prompts=8)


def applied(t, step):
    return t, OptimizerStepApplied(term=1, optimizer_step=step, version=1, loss=0.0)


def curve(mode, step_s, *points):
    return Curve(mode, 1.0, step_s, points, 1.0)


def test_time_counts_from_the_first_plan():
    rows = [
        evaluated(1.0, 0, 0.9),
        (10.0, StepPlanned(term=1, optimizer_step=0, version=1, groups=("t1.g0",))),
        applied(13.0, 0),
        evaluated(13.0, 1, 0.4),
        applied(16.0, 1),
        evaluated(16.0, 2, 0.6),
    ]
    records = [Record(t, "trainer", seq, (), event) for seq, (t, event) in enumerate(rows)]
    found = read_curve(records, "synchronous", 1.0, wall_s=5.0)
    assert found == Curve("synchronous", 1.0, 3.0, ((3.0, 1, 0.4), (6.0, 2, 0.6)), 5.0)
    assert found.reached(0.5) == (6.0, 2)
    assert found.reached(0.7) is None


def test_ratios_are_synchronous_over_asynchronous():
    fast = curve("asynchronous", 1.0, (2.0, 2, 0.5), (4.0, 4, 0.8))
    slow = curve("synchronous", 1.5, (3.0, 2, 0.6), (6.0, 4, 0.7))
    assert ratio_of([fast, slow], 1.0) == 1.5
    assert ratio_until([fast, slow], 0.5) == 1.5
    assert ratio_until([fast, slow], 0.8) is None


def test_a_run_gives_a_curve(model, tmp_path):
    recipe = tiny_recipe(model, tmp_path, steps=4)
    fast = run_mode(recipe, "asynchronous", 2, Console(quiet=True))
    slow = run_mode(recipe, "synchronous", 2, Console(quiet=True), trainer_factor=4.0)
    assert [step for _, step, _ in fast.points] == [2, 4]
    assert slow.step_s > 2 * fast.step_s
    assert table([fast, slow], 0.5).row_count == 2
    (trace,) = tmp_path.glob("asynchronous-*/events/simulation.jsonl")
    assert '"kind":"run_ended"' in trace.read_text().splitlines()[-1]


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_staleness_is_what_sets_the_modes_apart(mode, model, tmp_path):
    run_mode(tiny_recipe(model, tmp_path), mode, 9, Console(quiet=True))
    (trace,) = tmp_path.glob(f"{mode}-*/events/simulation.jsonl")
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    stale = [row["version"] - min(row["versions_first"]) for row in rows if row["kind"] == "group_consumed"]
    assert max(stale) == (1 if mode == "asynchronous" else 0)
