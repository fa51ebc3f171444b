"""``grpo-lab run --world sim``: the real trainer, worker, coordinator and engines on the virtual clock."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from simulated_recipe import REWARD, tiny_recipe, untrained_model

from grpo_lab.check import check_trace
from grpo_lab.errors import ConfigError, WorkerStalled
from grpo_lab.events import GroupQueued, MemberDied, OptimizerStepApplied, SyncEnded
from grpo_lab.harness.outcome import Outcome
from grpo_lab.harness.run_dir import make_run_dir
from grpo_lab.harness.runner import declaration, run
from grpo_lab.harness.simulated import DEFAULT_SPEEDS, end_trace, simulate, trace_recorder
from grpo_lab.report.files import read_trace
from grpo_lab.sim import speeds as speeds_module
from grpo_lab.sim.speeds import Speeds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return untrained_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(model, tmp_path):
    return tiny_recipe(model, tmp_path)


@pytest.fixture(scope="module")
def whole_run(model, tmp_path_factory):
    """The recipe of a run that ended well, with all that it left behind."""
    out = tmp_path_factory.mktemp("whole")
    done = tiny_recipe(model, out, engines=2, pause_mode="abort", save_steps=2)
    assert run(done, Console(quiet=True)) == 0
    return done


def failing(completions, **_):
    raise RuntimeError("the judge is out")


def simulated(recipe, speeds=DEFAULT_SPEEDS, first_step=1):
    """(what it gave, its records), without a report."""
    recorder, directory, shown = trace_recorder(), make_run_dir(recipe.out, recipe.name), []
    declared = declaration(recipe)
    result = simulate(
        recipe,
        directory,
        Path(recipe.model),
        declared,
        recorder,
        lambda step, _: shown.append(step),
        speeds=speeds,
    )
    end_trace(recorder, Outcome("clean", "", 0), directory)
    assert shown == list(range(first_step, recipe.steps + 1))
    return result, recorder.records


def violations(records, directory):
    trace = directory / "violations.jsonl"
    trace.write_text("".join(record.to_line() + "\n" for record in records))
    return check_trace(trace).violations


def events(records, kind):
    return [record.event for record in records if isinstance(record.event, kind)]


def summary_of(recipe):
    return json.loads((recipe.out / "latest" / "summary.json").read_text())


def test_another_process_writes_the_same_bytes_under_another_hash_seed(whole_run, tmp_path):
    """Also with checkpoints, whose paths differ."""
    words = ["run", "smoke", "--world", "sim", "--model", whole_run.model, "--engines", "2"]
    words += ["--pause-mode", "abort", "--save-steps", "2", "--heldout-prompts", "8"]
    words += ["--reward", REWARD, "--out", str(tmp_path)]
    other_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lab", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": other_seed, "PYTHONPATH": str(Path(__file__).parent)},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "virtual seconds per wall second" in done.stdout
    ours, theirs = (out / "latest" / "events.jsonl" for out in (whole_run.out, tmp_path))
    assert ours.read_bytes() == theirs.read_bytes()
    assert ours.read_bytes().count(b"\n") > 300
    assert str(whole_run.out) not in ours.read_text()
    assert any(step.grad_norm for step in events(read_trace(ours), OptimizerStepApplied))


def test_a_run_leaves_what_a_real_one_leaves(whole_run):
    directory = whole_run.out / "latest"
    for name in ("config.json", "check.json", "metrics.parquet", "timeline.pftrace", "checkpoint"):
        assert (directory / name).exists()
    assert "simulated" in (directory / "report.html").read_text()
    summary = summary_of(whole_run)
    assert summary["world"] == "sim"
    assert summary["violations"] == 0
    assert len(summary["rules_evaluated"]) > 30
    assert summary["weight_versions"] == 3
    assert summary["virtual_s"] > 0.6
    assert summary["wall_s"] > 0
    assert summary["logprob_gap_max"] < 1e-4
    assert summary["dispatched"] == summary["consumed"] + summary["dropped"]
    assert (summary["in_flight"], summary["queued"]) == (0, 0)


def test_a_run_resumes_from_a_checkpoint_of_another(whole_run, tmp_path):
    checkpoint = (whole_run.out / "latest" / "checkpoints" / "checkpoint-2").resolve()
    resumed = dataclasses.replace(whole_run, resume_from=str(checkpoint), save_steps=0)
    _, records = simulated(resumed, first_step=3)
    assert [step.optimizer_step for step in events(records, OptimizerStepApplied)] == [2]
    assert violations(records, tmp_path) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"pause_mode": "wait", "staleness_policy": "window", "window": 3, "max_staleness": 2},
        {"pause_mode": "keep", "clear_cache": False, "staleness_policy": "drop", "max_staleness": 2},
        {"pause_mode": "abort", "staleness_policy": "freshest", "queue_capacity": 2},
        {"weight_sync_steps": 2, "steps": 5, "final_sync": True, "batch_invariant": True, "engines": 2},
    ],
    ids=["wait-window", "kept-kv-drop", "abort-freshest", "sync-every-2"],
)
def test_settings_keep_every_rule(recipe, changes):
    recipe = dataclasses.replace(recipe, **changes)
    _, records = simulated(recipe)
    assert len(events(records, OptimizerStepApplied)) == recipe.steps
    assert violations(records, recipe.out) == 0


def test_time_passes_at_the_given_speeds(recipe):
    speeds = Speeds(trainer_step_s=3.0, trainer_token_s=0.0, link_s=0.25, link_bytes_per_s=1e15)
    result, records = simulated(recipe, speeds)
    applied = events(records, OptimizerStepApplied)
    assert [step.duration_s for step in applied] == pytest.approx([3.0] * 3)
    syncs = events(records, SyncEnded)
    assert [sync.phases_s["wire"] for sync in syncs] == pytest.approx([0.25] * 3)
    assert result.virtual_s > 3 * 3.0 + 3 * 0.25
    _, slower = simulated(recipe, dataclasses.replace(speeds, trainer_token_s=1.0))
    assert all(
        late.duration_s > 3.0 + early.tokens
        for early, late in zip(applied, events(slower, OptimizerStepApplied), strict=True)
    )


def test_synchronous_training_waits_for_what_asynchronous_training_overlaps(recipe):
    recipe = dataclasses.replace(recipe, steps=6)
    overlapped, fast = simulated(recipe)
    synchronous, slow = simulated(dataclasses.replace(recipe, max_staleness=0))
    assert synchronous.virtual_s > 1.2 * overlapped.virtual_s
    waits = [sum(step.wait_s for step in events(r, OptimizerStepApplied)[2:]) for r in (fast, slow)]
    assert waits[1] > 0.2
    assert waits[0] < waits[1] / 2


def test_a_worker_that_brings_nothing_forward_is_stalled(recipe):
    recipe = dataclasses.replace(recipe, heartbeat_stale_after_s=5.0)
    with pytest.raises(WorkerStalled, match=r"no progress for 5\.0 virtual seconds .*it waits for: bound"):
        simulated(recipe, Speeds(engine_step_s=50.0))


def test_groups_wait_for_room_in_the_queue(recipe):
    recipe = dataclasses.replace(recipe, queue_capacity=1, staleness_policy="drop", max_staleness=4)
    _, records = simulated(recipe, Speeds(trainer_step_s=30.0))
    assert {event.depth for event in events(records, GroupQueued)} == {1}
    assert violations(records, recipe.out) == 0


def test_a_failing_reward_ends_the_run_in_words(recipe):
    recipe = dataclasses.replace(recipe, reward=f"{__name__}:failing")
    assert run(recipe, Console(quiet=True)) == 3
    trace = list(read_trace(recipe.out / "latest" / "events.jsonl"))
    assert "the judge is out" in events(trace, MemberDied)[0].detail
    ended = trace[-1].event
    assert ended.outcome == "failed"
    assert ended.detail.startswith("WorkerError: 8 groups in a row were lost")
    assert check_trace(recipe.out / "latest" / "events.jsonl").violations == 0


def test_an_interrupt_stops_the_simulation_and_keeps_its_trace(recipe, monkeypatch):
    def interrupted(self, tokens):
        raise KeyboardInterrupt

    monkeypatch.setattr(speeds_module.Speeds, "trainer_step", interrupted)
    assert run(recipe, Console(quiet=True)) == 130
    summary = summary_of(recipe)
    assert summary["ended"] == "interrupted"
    assert summary["violations"] == 0


def test_a_simulated_world_takes_no_running_server(recipe):
    with pytest.raises(ConfigError, match="sim in a simulated world"):
        run(dataclasses.replace(recipe, engine="http://127.0.0.1:1"), Console(quiet=True))


@pytest.mark.parametrize(
    ("name", "value"), [("engine_step_s", 0), ("link_s", -1), ("trainer_token_s", float("nan"))]
)
def test_speeds_that_cannot_be_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Speeds(**{name: value})
