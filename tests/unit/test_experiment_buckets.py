"""The bucket experiment: a point is measured between real processes, and each of its claims can fail."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from experiments import buckets
from grpo_lab.harness.experiment import Point, Scale, row_of
from grpo_lab.harness.sync_benchmark import PHASES


def test_grids_are_of_the_size_that_was_agreed():
    small, full = buckets.points(Scale(seeds=3)), buckets.points(Scale(seeds=5, full=True))
    assert (len(small), len(full)) == (3 * 16, 5 * 90)
    assert {point.label for point in small} == {"measured"}
    assert buckets.EXPERIMENT.workers == 1


@pytest.mark.parametrize(("transport", "buffers"), [("shm", 2), ("gloo", 1)])
def test_a_point_is_measured_and_leaves_nothing(transport, buffers):
    def segments():
        return {path.name for path in Path("/dev/shm").glob("grpo_lab_*")}

    before = segments()
    settings = {"model_mb": 4, "bucket_kib": 1024, "buffers": buffers, "transport": transport}
    point = Point("buckets", settings, 0, "measured")
    row = row_of(point, buckets.run_with(point, repeats=1))
    assert segments() <= before
    assert row["buckets"] >= 3
    assert row["bytes"] == pytest.approx(4e6, rel=0.1)
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["total_s"] / 1e9)
    assert all(row[f"{phase}_s"] > 0 for phase in PHASES)


OVERHEAD_S, RATE = {"shm": 1e-4, "gloo": 2e-4}, {"shm": 2e9, "gloo": 1e9}


def table(scale=lambda **_: 1.0, phases=0.95):
    """Results of a sync that costs two terms; ``scale`` changes the time of a setting."""
    rows = []
    for point in buckets.points(Scale(seeds=2)):
        chosen = point.settings
        size = int(chosen["model_mb"]) * 10**6
        count = -(-size // (int(chosen["bucket_kib"]) << 10))
        speedup = 1.5 if chosen["buffers"] == 2 else 1.0
        total_s = count * OVERHEAD_S[chosen["transport"]] + size / RATE[chosen["transport"]]
        total_s *= scale(**chosen) / speedup * (1 + 0.01 * point.seed)
        figures = {"buckets": count, "bytes": size, "total_s": total_s, "gb_per_s": size / total_s / 1e9}
        parts = {f"{phase}_s": total_s * phases / len(PHASES) for phase in PHASES}
        rows.append(row_of(point, {**figures, **parts, "load_average": 0.0}))
    return pd.DataFrame(rows)


def test_claims_hold_on_results_that_bear_them_out():
    results = table()
    assert [claim.words for claim in buckets.claims(results) if not claim.holds] == []
    assert set(buckets.figures(results)) == {"sync_time", "phases"}
    found = buckets.fits(results)["gloo", 1]
    assert found.overhead_s == pytest.approx(2e-4, rel=0.02)
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": lambda bucket_kib, **_: 3.0 if bucket_kib == 4096 else 1.0}, "buckets x overhead"),
        ({"scale": lambda bucket_kib, **_: 0.1 if bucket_kib == 256 else 1.0}, "not the best choice"),
        ({"phases": 0.5}, "the phases add up"),
        ({"phases": 1.2}, "the phases add up"),
        ({"scale": lambda transport, **_: 5.0 if transport == "shm" else 1.0}, "faster than gloo"),
        ({"scale": lambda buffers, **_: float(buffers)}, "second buffer"),
    ],
)
def test_each_claim_can_fail(changes, words):
    failed = [claim.words for claim in buckets.claims(table(**changes)) if not claim.holds]
    assert any(words in claim for claim in failed), failed
