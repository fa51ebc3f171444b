"""`bench sync`: real processes are measured and gone afterwards; fits and goals follow from the rows."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from grpo_lab.cli import bench_sync
from grpo_lab.errors import TransportError
from grpo_lab.harness import sync_benchmark_report as report
from grpo_lab.harness.sync_benchmark import PHASES, SyncCase, SyncRow, measure, receiver_processes


def segments():
    return {path.name for path in Path("/dev/shm").glob("grpo_lab_*")}


def row(
    transport="shm", mode="pipelined", receivers=1, buckets=10, model_bytes=10**9, total_s=1.0, phase_s=0.3
):
    phases = dict.fromkeys(PHASES, 0.01) | {"pack": phase_s, "verify": phase_s, "load": phase_s}
    return SyncRow(
        receivers, model_bytes, model_bytes // buckets, transport, mode, buckets, total_s, phases, 5
    )


def test_whole_syncs_are_measured_between_processes(tmp_path, monkeypatch, capsys):
    before = segments()
    few = [SyncCase(receivers, 6_000_000, bucket) for receivers in (1, 2) for bucket in (1 << 20, 1 << 21)]
    monkeypatch.setattr(bench_sync, "cases", lambda quick: few)
    out, plot = tmp_path / "sync.json", tmp_path / "sync.svg"
    assert bench_sync.main(["--repeats", "1", "--json", str(out), "--plot", str(plot)]) == 0
    assert segments() == before
    data = json.loads(out.read_text())
    assert set(data) == {"machine", "rows", "fits", "goals"}
    ways = {(r["transport"], r["mode"], r["receivers"], r["bucket_bytes"]) for r in data["rows"]}
    assert len(ways) == len(data["rows"]) == 16
    for measured in data["rows"]:
        assert list(measured["phases_s"]) == list(PHASES)
        assert all(seconds > 0 for seconds in measured["phases_s"].values()), measured
        if measured["mode"] == "sequential":  # nothing overlaps, so the phases are parts of the whole
            assert sum(measured["phases_s"].values()) < measured["total_s"] * measured["receivers"] * 1.05
    assert len(data["fits"]) == 8
    assert plot.read_text().lstrip().startswith("<?xml")
    assert "bandwidth GB/s" in capsys.readouterr().out


def test_a_dead_receiver_is_an_error_at_once_and_leaves_nothing():
    before, began_s = segments(), time.monotonic()

    async def killed():
        with receiver_processes(1, 1) as processes:
            processes[0]._process.kill()
            await measure(SyncCase(1, 1_000_000, 1 << 20), processes, repeats=1, num_threads=1)

    with pytest.raises(TransportError):
        asyncio.run(killed())
    assert time.monotonic() - began_s < 30
    assert segments() == before


def test_a_receivers_error_is_told():
    async def unknown():
        with receiver_processes(1, 1) as processes:
            processes[0].ask("receive", "never joined", None, {})
            await processes[0].answer()

    with pytest.raises(TransportError, match="a receiver failed: KeyError"):
        asyncio.run(unknown())


def test_the_fit_finds_both_costs():
    rows = [
        row(buckets=n, model_bytes=size, total_s=n * 0.002 + size / 5e9)
        for n, size in [(1, 10**7), (4, 10**7), (10, 10**9), (200, 10**9)]
    ]
    found = report.fit(rows)
    assert found.overhead_s == pytest.approx(0.002)
    assert found.bytes_per_s == pytest.approx(5e9)
    assert found.worst_error == pytest.approx(0, abs=1e-9)


def test_no_cost_of_a_fit_is_negative():
    found = report.fit([row(buckets=1, total_s=1.0), row(buckets=100, total_s=0.5)])
    assert found.overhead_s == 0
    assert 1e9 < found.bytes_per_s < 2e9
    assert found.worst_error > 0.1


@pytest.mark.parametrize(
    ("total_s", "cores", "phase", "stage"),
    [(0.34, 4, True, True), (0.6, 4, False, True), (0.8, 4, False, False), (0.8, 1, None, None)],
)
def test_the_pipeline_is_judged_where_cores_allow(total_s, cores, phase, stage):
    rows = [row(total_s=total_s), row(mode="sequential", total_s=0.95)]
    found = report.goals(rows, cores, load=0.0)
    assert [goal.met for goal in found] == [phase, stage]


def test_transports_are_compared_case_by_case():
    rows = [
        row(total_s=0.1),
        row("gloo", total_s=0.3),
        row(total_s=0.1, buckets=2),
        row("gloo", total_s=0.15, buckets=2),
    ]
    rates = [goal for goal in report.goals(rows, 4, 0.0) if "rate" in goal.name]
    assert [(goal.measured, goal.met) for goal in rates] == [("2.25", True)]
