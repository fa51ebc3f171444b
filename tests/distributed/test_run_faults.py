"""``grpo-lab run`` with real processes, and what can happen to each of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from grpo_lab.events import Record, VersionCommitted
from grpo_lab.harness.engine_process import EngineProcess, ServerCommand
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

    def rows(self, actor: str) -> list[dict]:
        """What an actor has written so far."""
        part = self.directory / "events" / f"{actor}.jsonl"
        lines = part.read_text().splitlines(keepends=True) if part.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_line(self, actor: str, wanted: Callable[[dict], bool]) -> dict:
        """The first such event."""
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for row in self.rows(actor):
                if wanted(row):
                    return row
            time.sleep(0.1)
        raise AssertionError(f"it never came: {self.process.communicate(timeout=5)[0]}")

    def pid_of(self, word: str) -> int:
        """The newest of these processes: what checks the trace was started before all others."""
        found = [one for one in self.family if word in " ".join(one.cmdline())]
        return max(found, key=psutil.Process.create_time).pid

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


def plant_a_violation(run):
    """A part of the trace in which an actor of its own commits a version out of order."""
    event = VersionCommitted(term=1, version=999, attempt=1, view=1, members=("engine-0",))
    record = Record(0.0, "planted", 0, (), event)
    (run.directory / "events" / "planted.jsonl").write_text(record.to_line() + "\n")


def test_a_strict_run_stops_at_the_first_violation(start):
    run = start("--steps", "10000", "--strict")
    run.wait_for("trainer", "optimizer_step_applied")
    plant_a_violation(run)
    code, output = run.end()
    assert code == 1, output
    assert re.search(r"strict: S(1|11) was violated", " ".join(output.split())), output
    assert run.summary()["ended"] == "failed"
    run.assert_nothing_left()


def test_a_violation_is_shown_while_the_run_goes_on(start):
    run = start("--steps", "10000")
    run.wait_for("trainer", "optimizer_step_applied")
    plant_a_violation(run)
    shown = next(line for line in run.process.stdout if "violated" in line)
    assert re.match(r"S(1|11) violated: ", shown)
    run.process.send_signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130, output
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
    spawned = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
    _, *ranks = sorted(spawned, key=psutil.Process.create_time)  # the first checks the trace
    ranks[rank].kill()
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


@contextlib.contextmanager
def server(model: Path, log: Path, port: int = 0):
    """A ``grpo-lab serve`` of one's own; gives its port and a way to kill it."""
    options = ("--port", str(port), "--parent-pid", str(os.getpid()), "--rl-routes")
    command = (sys.executable, "-m", "grpo_lab.cli.serve", str(model), *options)
    engine = EngineProcess(ServerCommand(log.stem, command, log))
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


@pytest.mark.timeout(300)
def test_an_engine_that_restarts_on_its_address_is_taken_in_again(start, model, tmp_path):
    """It is fenced when it dies, gets the next version after its restart, and only then rollouts."""
    with server(model, tmp_path / "first.log") as first, server(model, tmp_path / "second.log") as second:
        run = start("--steps", "10000", "--engine", f"{first.url},{second.url}")
        run.wait_for("worker", "sample_completed")
        os.kill(second.pid, signal.SIGKILL)
        run.wait_for("trainer", "engine_fenced")
        with server(model, tmp_path / "again.log", int(second.url.rsplit(":", 1)[1])):
            back = run.wait_for_line(
                "trainer", lambda row: row["kind"] == "engine_admitted" and row["version"] > 1
            )
            committed = run.wait_for_line(
                "trainer",
                lambda row: row["kind"] == "version_committed" and row["version"] == back["version"],
            )
            assert "engine-1" in committed["members"]
            served = run.wait_for_line(
                "worker",
                lambda row: (
                    row["kind"] == "sample_completed"
                    and row["engine"] == "engine-1"
                    and row["spans"][0][1] >= back["version"]
                ),
            )
            assert served["version_source"] == "engine"
            run.process.send_signal(signal.SIGINT)
            code, output = run.end()
    assert code == 130, output
    assert run.summary()["violations"] == 0, output
    (fenced,) = [row for row in run.rows("trainer") if row["kind"] == "engine_fenced"]
    assert (fenced["engine"], back["engine"]) == ("engine-1", "engine-1")
    assert fenced["start"] != back["start"]
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
