"""``grpo-lab run --engine vllm``: it learns, breaks no rule, and serves what it has trained."""

from __future__ import annotations

import re

import pytest
from vllm_served import PYTHON, config_for, grpo_lab_run, largest_gap, served_by

from grpo_lab.events import EngineProved
from grpo_lab.harness.vllm_server import running_vllm
from grpo_lab.report.files import read_trace
from grpo_lab.tasks import get_task
from grpo_lab.tasks.tiny_model import TinyModelSpec, make_tiny_model

GAP = 1e-3
LEAST_GAIN = 0.35  # the simulated engine: 0.41 to 0.46 over three seeds, give or take 0.03 each (README)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-vllm: run `make venv-vllm`"),
]


def canary_gaps(run):
    """By version."""
    return {
        record.event.version: record.event.gap
        for record in read_trace(run / "events.jsonl")
        if isinstance(record.event, EngineProved) and record.event.proof == "canary"
    }


def test_it_learns_and_breaks_no_rule(tmp_path, capsys):
    code, output, summary = grpo_lab_run(tmp_path, "quickstart", "--engine", "vllm", "--final-sync")
    with capsys.disabled():
        print(output)  # noqa: T201
    assert code == 0, output
    assert summary["violations"] == 0
    assert summary["ended"] == "clean"
    assert summary["engine"] == "vllm"
    assert summary["heldout_accuracy_after"] - summary["heldout_accuracy_before"] >= LEAST_GAIN
    assert summary["weight_versions"] == 81
    assert summary["staleness_max_versions"] <= 1
    assert (summary["in_flight"], summary["queued"]) == (0, 0)
    assert summary["dispatched"] == summary["consumed"] + summary["dropped"]
    assert summary["proofs"]["hash"] == 81
    assert summary["proofs"].get("canary_fails", 0) == 0
    assert summary["logprob_gap_max"] < GAP
    gaps = canary_gaps(tmp_path / "latest")
    assert sorted(gaps) == list(range(1, 82))
    assert max(gaps.values()) < GAP
    assert "rules by what the engine can do" in output
    assert "n.a.: no events" in output
    assert re.search(r"v81 \d\.\de-", output)
    assert "token versions by source: engine:" in output


def test_a_run_leaves_on_the_server_what_it_saved(tmp_path):
    model = make_tiny_model(TinyModelSpec(), get_task("sort_digits"), 0).path
    options = ("--model", str(model), "--steps", "8", "--final-sync", "--heldout-prompts", "0")
    with running_vllm(config_for(model, tmp_path / "a.log", max_num_seqs=264)) as [server]:
        before = served_by(server.url)
        code, output, summary = grpo_lab_run(tmp_path, "quickstart", "--engine", server.url, *options)
        assert code == 0, output
        assert summary["violations"] == 0
        after = served_by(server.url)
    with running_vllm(config_for(tmp_path / "latest" / "checkpoint", tmp_path / "b.log")) as [server]:
        fresh = served_by(server.url)
    assert after.checksums == fresh.checksums
    assert largest_gap(after, fresh) == 0.0
    changed = [name for name in fresh.checksums if before.checksums[name] != fresh.checksums[name]]
    assert len(changed) == len(fresh.checksums)  # every one of them, linear weights and the packed head too
    assert len(set(fresh.checksums.values())) == len(fresh.checksums)
    assert any(name.endswith("lm_head.weight.packed") for name in changed)
