"""``grpo-lab run`` with real processes, and what can happen to each of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo_lab.harness.recipe import RECIPES
from grpo_lab.tasks import get_task
from grpo_lab.tasks.tiny_model import TinyModelSpec, build_model
from grpo_lab.transport.segment import SHM_DIRECTORY

BOUND_S = 60
WRITTEN = (
    "config.json",
    "env.json",
    "events.jsonl",
    "check.json",
    "metrics.parquet",
    "timeline.pftrace",
    "report.html",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained model: these tests are not about learning."""
    path = tmp_path_factory.mktemp("model")
    network, tokenizer = build_model(TinyModelSpec(num_layers=1, hidden_size=32), get_task("sort_digits"), 0)
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


class Run:
    """A run in the background, with its processes."""

    def __init__(self, out: Path, model: Path, *options: str) -> None:
        self.out = out
        arguments = ["run", "smoke", "--model", str(model), "--out", str(out), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_lab.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.family: list[psutil.Process] = []

    @property
    def directory(self) -> Path:
        return self.out / "latest"

    def wait_for(self, actor: str, kind: str) -> None:
        """Until the trace has an event of this kind."""
        part = self.directory / "events" / f"{actor}.jsonl"
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if part.exists() and f'"kind":"{kind}"' in part.read_text():
                self.family = psutil.Process(self.process.pid).children(recursive=True)
                return
            time.sleep(0.05)
        raise AssertionError(f"no {kind} of {actor}: {self.process.communicate(timeout=5)[0]}")

    def pid_of(self, word: str) -> int:
        (process,) = [one for one in self.family if word in " ".join(one.cmdline())]
        return process.pid

    def end(self) -> tuple[int, str]:
        """Exit code and output, within ``BOUND_S`` from now: no fault may take the waits it does not need."""
        output, _ = self.process.communicate(timeout=BOUND_S)
        return self.process.returncode, output

    def summary(self) -> dict:
        return json.loads((self.directory / "summary.json").read_text())

    def assert_nothing_left(self) -> None:
        _, alive = psutil.wait_procs(self.family, timeout=10)
        assert not alive
        assert not [
            name for name in os.listdir(SHM_DIRECTORY) if name.startswith(f"grpo_lab_{self.process.pid}_")
        ]


@pytest.fixture
def start(tmp_path, model):
    runs: list[Run] = []

    def begin(*options: str) -> Run:
        runs.append(Run(tmp_path / "runs", model, *options))
        return runs[-1]

    yield begin
    for run in runs:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(run.process.pid).children(recursive=True):
                one.kill()
        run.process.kill()
        run.process.wait(10)
        run.process.stdout.close()


def test_a_clean_run_leaves_a_whole_directory(start):
    run = start()
    run.wait_for("worker", "sample_completed")
    code, output = run.end()
    assert code == 0, output
    summary = run.summary()
    assert summary["ended"] == "clean"
    assert summary["violations"] == 0
    assert summary["dispatched"] == summary["consumed"] + summary["dropped"] > 0
    assert (summary["in_flight"], summary["queued"]) == (0, 0)
    assert summary["weight_versions"] == RECIPES["smoke"][1].steps
    for name in WRITTEN:
        assert (run.directory / name).stat().st_size > 0
    assert (run.directory / "checkpoint" / "config.json").exists()
    run.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_in_seconds_with_its_report(start, number):
    run = start("--steps", "10000")
    run.wait_for("trainer", "optimizer_step_applied")
    run.process.send_signal(number)
    code, output = run.end()
    assert code == 130, output
    assert run.summary()["ended"] == "interrupted"
    assert run.summary()["violations"] == 0, output
    assert (run.directory / "report.html").exists()
    run.assert_nothing_left()


def test_a_killed_worker_is_noticed_and_named(start):
    run = start("--steps", "10000")
    run.wait_for("trainer", "optimizer_step_applied")
    os.kill(run.pid_of("spawn_main"), signal.SIGKILL)
    code, output = run.end()
    assert code == 3, output
    assert "was killed by SIGKILL" in output
    assert run.summary()["ended"] == "failed"
    run.assert_nothing_left()


def test_two_ranks_train_as_one_run(start):
    run = start("--trainer-ranks", "2")
    run.wait_for("worker", "sample_completed")
    code, output = run.end()
    assert code == 0, output
    assert run.summary()["violations"] == 0
    assert run.summary()["weight_versions"] == RECIPES["smoke"][1].steps
    trace = (run.directory / "events.jsonl").read_text()
    assert '"actor":"trainer-r1"' in trace
    run.assert_nothing_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_and_is_named(start, rank):
    run = start("--steps", "10000", "--trainer-ranks", "2")
    run.wait_for("trainer", "optimizer_step_applied")
    children = psutil.Process(run.process.pid).children()
    ranks = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
    sorted(ranks, key=psutil.Process.create_time)[rank].kill()
    code, output = run.end()
    assert code == 3, output
    assert f"trainer rank {rank} was killed by SIGKILL" in output
    assert run.summary()["ended"] == "failed"
    run.assert_nothing_left()


def test_interrupted_ranks_end_cleanly(start):
    run = start("--steps", "10000", "--trainer-ranks", "2")
    run.wait_for("trainer", "optimizer_step_applied")
    run.process.send_signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130, output
    assert run.summary()["ended"] == "interrupted"
    assert run.summary()["violations"] == 0, output
    run.assert_nothing_left()


def test_a_killed_engine_ends_the_run_and_is_named(start):
    run = start("--steps", "10000")
    run.wait_for("trainer", "optimizer_step_applied")
    os.kill(run.pid_of("grpo_lab.cli.serve"), signal.SIGKILL)
    code, output = run.end()
    assert code == 3, output
    assert "engine-0 was killed by SIGKILL" in output
    run.assert_nothing_left()


def test_one_of_two_killed_engines_is_fenced_and_the_run_goes_on(start):
    run = start("--steps", "25", "--engines", "2")
    run.wait_for("trainer", "optimizer_step_applied")
    os.kill(run.pid_of("--name engine-1"), signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output
    trace = (run.directory / "events.jsonl").read_text()
    assert '"kind":"engine_fenced","engine":"engine-1"' in trace
    assert run.summary()["weight_versions"] == 25
    run.assert_nothing_left()


def test_a_killed_trainer_leaves_no_process_and_no_shared_memory(start):
    run = start("--steps", "10000")
    run.wait_for("trainer", "optimizer_step_applied")
    run.process.kill()
    run.process.wait(10)
    run.assert_nothing_left()


def test_a_reward_that_always_raises_ends_the_run_with_its_words(start, tmp_path, monkeypatch):
    source = "def always(prompts, **columns):\n    raise KeyError('no such answer')\n"
    (tmp_path / "bad_reward.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = start("--reward", "bad_reward:always")
    run.wait_for("worker", "group_dropped")
    code, output = run.end()
    assert code == 3, output
    assert "reward function always raised KeyError('no such answer')" in " ".join(output.split())
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "0"), "steps=0"),
        (("--max-staleness", "-1"), "max_staleness=-1"),
        (("--task", "no_such_file.jsonl"), "no_such_file.jsonl"),
        (("--reward", "no_module:reward"), "no_module:reward"),
        (("--engine", "ftp://somewhere"), "engine='ftp://somewhere'"),
        (("--out", "/proc/nowhere"), "/proc/nowhere"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(start, options, words):
    run = start(*options)
    code, output = run.end()
    assert code == 2, output
    assert words in output.replace("\n", "")
    assert "Traceback" not in output
    assert not run.directory.exists()
