"""A long sweep of simulated runs is killed in its middle: what it loses is what ran at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

WORKERS, POINTS, KILL_AFTER = 2, 210, 100
BOUND_S = 1200.0
SWEEP = ("sweep", "experiments/sync_interval.py", "--full", "--seeds", "5", "--workers", f"{WORKERS}")


def start(out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "grpo_lab.cli.main", *SWEEP, "--out", str(out), *words]
    return subprocess.Popen(command, start_new_session=True, text=True, stdout=subprocess.PIPE)


def kill_at(process: subprocess.Popen[str], points: Path, count: int) -> None:
    """SIGKILL to all of its processes when so many points are finished."""
    deadline = time.monotonic() + BOUND_S
    try:
        while len(list(points.glob("*.json"))) < count:
            assert process.poll() is None, "the sweep ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def results(out: Path) -> pd.DataFrame:
    table = pd.read_parquet(out / "sync_interval" / "results.parquet")
    return table.drop(columns=["point_wall_s"]).sort_values("config", ignore_index=True)


@pytest.mark.nightly
@pytest.mark.timeout(3 * BOUND_S)
def test_a_killed_sweep_of_two_hundred_runs_loses_those_that_ran(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_at(start(killed), killed / "sync_interval" / "points", KILL_AFTER)
    folder = killed / "sync_interval"
    kept = {path.stem for path in (folder / "points").glob("*.json")}
    begun = {path.name for path in (folder / "work").iterdir()}
    finished = len(kept)
    assert KILL_AFTER <= finished < POINTS
    assert len(begun - kept) <= WORKERS, "lost: begun, and not kept"

    resumed = start(killed, "--resume")
    said, _ = resumed.communicate(timeout=BOUND_S)
    assert resumed.returncode == 0, said
    assert f"{finished} of {POINTS} points are there already" in said
    assert f"{POINTS - finished} points in" in said

    unharmed = start(whole)
    said, _ = unharmed.communicate(timeout=BOUND_S)
    assert unharmed.returncode == 0, said
    pd.testing.assert_frame_equal(results(killed), results(whole))
    assert len(results(whole)) == POINTS
