"""Sweeps on a real Ray cluster of this machine, bound to loopback; skipped where Ray is not installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
from rich.console import Console

from grpo_lab.errors import ConfigError
from grpo_lab.harness.executors import RayExecutor
from grpo_lab.harness.experiment import Scale
from grpo_lab.harness.sweep import run_sweep
from grpo_lab.harness.sweep_folder import SweepFolder, load_experiment

ray_constants = pytest.importorskip("ray._private.ray_constants", reason="grpo-lab[ray] is not installed")

START_S = 90.0
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0: Ray keeps 127.0.0.1 as the node's address, as on a Mac, where it would take the network's."""
TOY = '''
"""An experiment whose points say where they ran, or do not end well."""
import os
from grpo_lab.harness.experiment import Claim, Experiment, grid, points_of
from grpo_lab.harness.plots import curves, new_figure

def points(scale):
    return points_of("toy", grid({"x": [1, 2, 3, 4], "fault": [FAULT]}), scale)

def run(point, folder):
    if point.settings["x"] == 2 and point.seed == 0:
        if point.settings["fault"] == "raise":
            raise ValueError("no such thing")
        if point.settings["fault"] == "crash":
            os._exit(9)
    (folder / "scratch").write_text("large")
    return {"y": point.settings["x"] * 10 + point.seed, "process": os.getpid()}

def figures(table):
    figure = new_figure()
    curves(figure.axes[0], table, x="x", y="y")
    return {"toy": figure}

def claims(table):
    return [Claim("y rises with x", bool(table.groupby("x")["y"].mean().is_monotonic_increasing), "means")]

EXPERIMENT = Experiment("toy", "Does y rise with x?", points, run, figures, claims, "Up is more.")
'''


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster of two cores whose every listener is on loopback."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets' paths must be short
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2", "--num-gpus=0"]
    command += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    command += [f"--object-store-memory={100 * 2**20}"]
    log = folder / "start.log"
    with pytest.MonkeyPatch.context() as patch, log.open("w") as output:
        patch.setenv(LOOPBACK_ONLY, "0")
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # what this process read at its import
        head = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + START_S
            while "Ray runtime started" not in log.read_text():
                assert head.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            head.send_signal(signal.SIGTERM)
            try:
                head.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
                head.wait(10)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def executor(cluster):
    found = RayExecutor(cluster)
    yield found
    found.close()


@pytest.fixture
def toy(tmp_path, request, monkeypatch):
    folder = tmp_path / f"toys_{tmp_path.name}"
    folder.mkdir()
    path = folder / "toy.py"
    path.write_text(TOY.replace("FAULT", repr(getattr(request, "param", ""))))
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def sweep(toy, out, executor, seeds=2):
    folder = SweepFolder(out, "toy")
    folder.open(resume=True, fresh=False)
    return run_sweep(load_experiment(toy), Scale(seeds), executor, folder, Console(quiet=True))


@pytest.mark.parametrize("toy", [""], indirect=True)
def test_points_run_as_tasks_and_the_results_are_those_of_a_sweep(toy, tmp_path, executor):
    assert executor.workers == 2
    result = sweep(toy, tmp_path / "out", executor)
    assert [failed.error for failed in result.failed] == []
    assert result.exit_code == 0
    table = pd.read_parquet(tmp_path / "out" / "toy" / "results.parquet")
    assert (table["y"] == table["x"] * 10 + table["seed"]).all()
    assert len(table) == 8
    assert os.getpid() not in set(table["process"])
    assert sweep(toy, tmp_path / "out", executor, seeds=3).ran == 4, "finished points are skipped here too"


@pytest.mark.parametrize(
    ("toy", "words"),
    [("raise", "ValueError: no such thing"), ("crash", "WorkerCrashedError")],
    indirect=["toy"],
)
def test_a_point_that_fails_is_reported_and_costs_no_other(toy, tmp_path, executor, words):
    result = sweep(toy, tmp_path / "out", executor)
    (failed,) = result.failed
    assert words in failed.error
    assert (failed.point.settings["x"], failed.point.seed) == (2, 0)
    assert len(result.table) == 7
    assert result.exit_code == 1


def test_a_simulated_cluster_runs_on_ray_as_it_does_here(tmp_path, executor):
    experiment = load_experiment(Path("experiments/sync_interval.py"))
    points = experiment.points(Scale(seeds=1))[:2]
    results = {result.point.hash: result for result in executor.run(experiment.run, points, tmp_path)}
    for point in points:
        assert results[point.hash].error == ""
        assert dict(results[point.hash].figures) == dict(experiment.run(point, tmp_path))


def test_nothing_of_the_cluster_listens_to_the_network(cluster, executor):
    port = int(cluster.rpartition(":")[2])
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    (head,) = {c.pid for c in listening if c.laddr.port == port}
    family = psutil.Process(psutil.Process(head).ppid()).children(recursive=True)
    own = {process.pid for process in family}
    places = {c.laddr.ip.removeprefix("::ffff:") for c in listening if c.pid in own}
    assert places == {"127.0.0.1"}


def test_an_address_without_a_cluster_is_refused():
    with pytest.raises(ConfigError, match="the address of a running Ray cluster"):
        RayExecutor(f"127.0.0.1:{free_port()}")
