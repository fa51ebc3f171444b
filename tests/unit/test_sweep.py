"""Sweeps: every point counted once, also after a crash, an error or a kill; results written whole."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from grpo_lab.errors import ConfigError, DataError
from grpo_lab.harness.dry_run import dry_run
from grpo_lab.harness.executors import LocalExecutor
from grpo_lab.harness.experiment import (
    Point,
    Scale,
    grid,
    points_of,
    random_settings,
    row_of,
    successive_halving,
)
from grpo_lab.harness.plots import interval
from grpo_lab.harness.sweep import run_sweep, stamp_of
from grpo_lab.harness.sweep_folder import SweepFolder, load_experiment

TOY = '''
"""An experiment that takes no time."""
import os, time
from pathlib import Path
from grpo_lab.harness.experiment import Claim, Experiment, grid, points_of
from grpo_lab.harness.plots import curves, new_figure

def points(scale):
    return points_of("toy", grid({"x": [1, 2, 3], "way": ["a", "b"]}), scale)

def run(point, folder):
    log = Path(os.environ["TOY_LOG"])
    with log.open("a") as file:
        file.write(f"{point.hash}\\n")
    wanted = os.environ.get("TOY_FAULT", "")
    hit = point.settings == {"x": 2, "way": "a"} and point.seed == 0
    if hit and wanted == "raise":
        raise ValueError("no such thing")
    if hit and wanted == "crash":
        os._exit(9)
    if hit and wanted == "hang":
        time.sleep(120)
    (folder / "scratch").write_text("large")
    return {"y": point.settings["x"] * 10 + point.seed}

def figures(table):
    figure = new_figure()
    curves(figure.axes[0], table, x="x", y="y", by="way")
    return {"toy": figure}

def claims(table):
    return [Claim("y rises with x", bool(table.groupby("x")["y"].mean().is_monotonic_increasing), "means")]

EXPERIMENT = Experiment("toy", "Does y rise with x?", points, run, figures, claims, "Up is more.")
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The path of the experiment; every call of ``run`` adds a line to the file ``log``."""
    folder = tmp_path / f"toys_{tmp_path.name}"
    folder.mkdir()
    path = folder / "toy.py"
    path.write_text(TOY)
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def calls(tmp_path):
    return (tmp_path / "log").read_text().split()


def sweep(toy, out, *, resume=False, fresh=False, seeds=2, workers=2):
    folder = SweepFolder(out, "toy")
    folder.open(resume=resume, fresh=fresh)
    console = Console(quiet=True)
    return run_sweep(load_experiment(toy), Scale(seeds), LocalExecutor(workers), folder, console)


def test_a_sweep_writes_a_tidy_row_a_run_figures_and_a_guide(toy, tmp_path):
    result = sweep(toy, tmp_path / "out")
    assert result.exit_code == 0
    table = pd.read_parquet(tmp_path / "out" / "toy" / "results.parquet")
    assert len(table) == 12 == table["config"].nunique()
    assert set(table.columns) >= {"experiment", "config", "seed", "label", "x", "way", "y", "commit"}
    assert (table["y"] == table["x"] * 10 + table["seed"]).all()
    for suffix in ("svg", "png"):
        assert (tmp_path / "out" / "toy" / f"toy.{suffix}").stat().st_size > 1000
    svg = (tmp_path / "out" / "toy" / "toy.svg").read_text()
    assert re.search(
        r"simulated \(uncalibrated latencies\) · n = 2 seeds · configs [0-9a-f]{8} · commit \w+", svg
    )
    guide = (tmp_path / "out" / "toy" / "reading.md").read_text()
    assert "holds: y rises with x" in guide
    assert not list((tmp_path / "out" / "toy" / "work").iterdir()), "folders of finished points are gone"


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["measured"], "measured · n = 1 seed · "),
        (["hybrid"], "hybrid (learning measured, seconds simulated, uncalibrated latencies) · n = 1 seed · "),
        (["simulated", "measured"], "measured and simulated (uncalibrated latencies) · n = 1 seed · "),
    ],
)
def test_a_stamp_says_how_the_numbers_came_about(labels, words):
    rows = [{"label": label, "seed": 0, "config": "0123456789ab", "commit": ""} for label in labels]
    assert stamp_of(pd.DataFrame(rows)).startswith(words)
    assert stamp_of(pd.DataFrame(rows)).endswith(" · commit unknown")


def test_a_dry_run_tells_the_grid_and_keeps_nothing(toy, tmp_path, monkeypatch):
    console = Console(record=True, quiet=False, file=io.StringIO(), width=200)
    assert dry_run(load_experiment(toy), Scale(3), LocalExecutor(2), console) == 0
    said = console.export_text()
    for words in ("x: 1, 2, 3", "way: a, b", "18 points, 3 seeds, 2 at a time", "nothing was kept"):
        assert words in said
    assert len(calls(tmp_path)) == 2
    assert {path.name for path in tmp_path.iterdir()} <= {"log", toy.parent.name}


def test_a_dry_run_says_when_a_point_fails(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "no" / "such" / "folder"))
    console = Console(record=True, file=io.StringIO(), width=200)
    assert dry_run(load_experiment(toy), Scale(1), LocalExecutor(1), console) == 1
    assert "failed: FileNotFoundError" in console.export_text()


def test_finished_points_are_skipped_and_a_new_seed_is_added(toy, tmp_path):
    sweep(toy, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"the 12 finished points that are there\. Use --resume"):
        sweep(toy, tmp_path / "out")
    result = sweep(toy, tmp_path / "out", resume=True, seeds=3)
    assert result.ran == 6
    assert len(result.table) == 18
    assert len(calls(tmp_path)) == len(set(calls(tmp_path))) == 18
    assert sweep(toy, tmp_path / "out", fresh=True).ran == 12


@pytest.mark.parametrize(
    ("fault", "words"), [("raise", "ValueError: no such thing"), ("crash", "its process died")]
)
def test_a_point_that_fails_is_reported_and_costs_no_other(toy, tmp_path, monkeypatch, fault, words):
    monkeypatch.setenv("TOY_FAULT", fault)
    result = sweep(toy, tmp_path / "out")
    (failed,) = result.failed
    assert words in failed.error
    assert (dict(failed.point.settings), failed.point.seed) == ({"x": 2, "way": "a"}, 0)
    assert len(result.table) == 11
    assert result.exit_code == 1
    monkeypatch.delenv("TOY_FAULT")
    assert sweep(toy, tmp_path / "out", resume=True).ran == 1


def test_a_killed_sweep_loses_the_running_points_only(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_FAULT", "hang")
    command = [sys.executable, "-m", "grpo_lab.cli.main", "sweep", str(toy), "--workers", "2", "--seeds", "2"]
    command += ["--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{tmp_path}"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    points = tmp_path / "out" / "toy" / "points"
    try:
        deadline = time.monotonic() + 90
        while len(list(points.glob("*.json"))) < 11 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    assert len(list(points.glob("*.json"))) == 11
    monkeypatch.delenv("TOY_FAULT")
    result = sweep(toy, tmp_path / "out", resume=True)
    assert result.ran == 1
    assert len(result.table) == 12


def test_workers_end_with_a_killed_sweep(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_FAULT", "hang")
    command = [sys.executable, "-m", "grpo_lab.cli.main", "sweep", str(toy), "--workers", "2", "--seeds", "1"]
    command += ["--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{tmp_path}"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE)
    finished = tmp_path / "out" / "toy" / "points"
    try:
        deadline = time.monotonic() + 90
        while len(list(finished.glob("*.json"))) < 5 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
        process.communicate(timeout=60)  # ends when the last process that can write to the pipe does
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_damaged_point_runs_again(toy, tmp_path):
    sweep(toy, tmp_path / "out")
    victim = next((tmp_path / "out" / "toy" / "points").glob("*.json"))
    victim.write_text('{"config": ')
    assert sweep(toy, tmp_path / "out", resume=True).ran == 1
    assert json.loads(victim.read_text())["config"] == victim.stem


def test_equal_points_have_equal_hashes_and_no_others():
    one = Point("e", {"a": 1, "b": "x"}, 0)
    assert one.hash == Point("e", {"b": "x", "a": 1}, 0).hash
    others = [
        Point("f", {"a": 1, "b": "x"}, 0),
        Point("e", {"a": 1, "b": "x"}, 1),
        Point("e", {"a": True, "b": "x"}, 0),
        Point("e", {"a": 1.5, "b": "x"}, 0),
        Point("e", {"a": 1, "b": "x"}, 0, "measured"),
    ]
    assert len({point.hash for point in [one, *others]}) == 6


def test_a_figure_may_not_hide_a_setting():
    with pytest.raises(ConfigError, match="not those of settings"):
        row_of(Point("e", {"tokens": 1}), {"tokens": 2})


def test_grids_and_draws():
    axes = {"a": [1, 2, 3], "b": ["x", "y"]}
    assert len(grid(axes)) == 6
    drawn = random_settings(axes, 4, seed=3)
    assert drawn == random_settings(axes, 4, seed=3)
    assert len({tuple(row.values()) for row in drawn}) == 4
    assert random_settings(axes, 99, seed=0) == grid(axes)
    points = points_of("e", drawn, Scale(seeds=2))
    assert [point.seed for point in points] == [0] * 4 + [1] * 4


def test_successive_halving_spends_most_on_the_best():
    spent = []

    def score(settings, budget):
        spent.append((len(settings), budget))
        return [math.nan if row["x"] == 8 else -abs(row["x"] - 6) for row in settings]

    ranked = successive_halving(grid({"x": list(range(9))}), [1, 3, 9], score)
    assert ranked == [({"x": 6}, 0)]
    assert spent == [(9, 1), (3, 3), (1, 9)]
    for budgets, keep in (([], 0.5), ([3, 1], 0.5), ([1], 1.0)):
        with pytest.raises(ConfigError):
            successive_halving([{"x": 1}], budgets, score, keep)


def test_the_interval_is_students():
    mean, half = interval(pd.Series([1.0, 2.0, 3.0]))
    assert mean == pytest.approx(2.0)
    assert half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)  # t(0.975, 2) = 4.3027, std = 1
    assert interval(pd.Series([5.0])) == (5.0, 0.0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.py", None, "expected an experiment's file"),
        ("empty.py", "x = 1\n", "has no EXPERIMENT"),
        ("broken.py", "import no_such_module_anywhere\n", "cannot be imported"),
        ("raises.py", "1 / 0\n", "ZeroDivisionError"),
        ("syntax.py", "def (\n", "SyntaxError"),
        ("exits.py", "raise SystemExit(7)\n", "SystemExit: 7"),
        ("notes.txt", "x", "expected an experiment's file"),
    ],
)
def test_what_is_no_experiment_is_refused(tmp_path, name, text, words):
    folder = tmp_path / f"wrong_{tmp_path.name}"
    folder.mkdir()
    path = folder / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=words):
        load_experiment(path)
