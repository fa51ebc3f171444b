"""Two gloo ranks train as one would: same losses, same weights, one plan, no rank left behind."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from trainer_stub import OneSampleFactory, StubFactory, events, make_trainer

SCRIPT = Path(__file__).with_name("trainer_rank.py")
pytestmark = pytest.mark.timeout(180)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_ranks(folder, mode, ranks=2):
    """Starts one process a rank and returns what each wrote."""
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        command = [sys.executable, str(SCRIPT), str(folder), mode]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        outputs = [process.communicate(timeout=120)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, outputs
    return [json.loads((folder / f"{mode}-{rank}.json").read_text()) for rank in range(ranks)]


def test_two_ranks_train_save_and_resume_as_one(tmp_path):
    alone = make_trainer(
        tmp_path / "alone", make_worker=StubFactory(), correction="tis", token_budget=16, max_steps=3
    )
    alone.train()
    alone._make_worker = OneSampleFactory()
    alone.train()
    first, second = run_ranks(tmp_path, "fresh")
    assert first["error"] == second["error"] == ""
    expected = [step.loss for step in events(alone, "optimizer_step_applied")]
    assert first["losses"] == pytest.approx(expected, abs=1e-5)
    assert second["losses"] == [], "rank 0 tells of a step for all"
    assert first["weights"] == second["weights"]
    for name, one in alone.model.named_parameters():
        if "norm" in name:
            assert first["weights"][name] == pytest.approx(one.tolist(), abs=1e-5), name
    terms = [["connect", 1], ["sync", 0], ["sync", 1], ["sync", 2], ["close"]]
    terms += [["connect", 2], ["sync", 3], ["sync", 4], ["sync", 5], ["close"]]
    assert first["sync"] == second["sync"] == terms
    assert len(expected) == 6
    assert (first["workers"], second["workers"]) == (1, 0)
    assert [step for step, _ in first["passes"]] == [step for step, _ in second["passes"]]
    assert all(tokens <= 16 for _, tokens in first["passes"] + second["passes"])
    load = [sum(tokens for step, tokens in one["passes"] if step < 3) for one in (first, second)]
    assert abs(load[0] - load[1]) <= 0.1 * sum(load)
    idle = [tokens for step, tokens in first["passes"] + second["passes"] if step >= 3]
    assert idle.count(0) == 3, "one rank has nothing in each of the last steps"

    resumed = run_ranks(tmp_path, "resume")
    assert [one["error"] for one in resumed] == ["", ""]
    assert [one["term"] for one in resumed] == [2, 2]
    assert resumed[0]["losses"] == pytest.approx(expected[2:3], abs=1e-5)
    assert resumed[0]["weights"] == resumed[1]["weights"]


def test_a_failure_of_rank_zero_reaches_the_other(tmp_path):
    first, second = run_ranks(tmp_path, "starve")
    assert first["error"].startswith("WorkerStalled")
    assert second["error"].startswith("GrpoLabError: rank 0 failed: WorkerStalled")
    assert first["sync"][-1] == second["sync"][-1] == ["close"]
