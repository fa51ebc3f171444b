"""``grpo-lab run --engine URL --transport stock`` against an engine that answers like a stock vLLM.

Such an engine proves nothing itself: the canary does. It holds where the weights have arrived, and does not
where the engine's CPU build keeps a tied head (the contract's row ``stock-tied-head-stays-old``).
"""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch
from contract_servers import free_port, start
from transformers import AutoModelForCausalLM
from vllm_served import grpo_lab_run

from grpo_lab.tasks import get_task
from grpo_lab.tasks.tiny_model import TinyModelSpec, make_tiny_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
STEPS = 4


@pytest.fixture(scope="module")
def tied():
    return make_tiny_model(TinyModelSpec(), get_task("sort_digits"), 0).path


@pytest.fixture(scope="module")
def untied(tied, tmp_path_factory):
    directory = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(tied, directory)
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def trained(tmp_path):
    """Exit code, output and summary of a run against a faithful server on the model."""
    running = []

    def run(model):
        port = free_port()
        command = [
            sys.executable, "-m", "grpo_lab.cli.serve", str(model), "--faithful",
            "--rl-routes", "--port", str(port), "--max-num-seqs", "264", "--enable-scale-out",
            "--logprobs-mode", "processed_logprobs", "--parent-pid", str(os.getpid()),
            "--weight-transfer-config", '{"backend": "gloo_packed"}',
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = start(command, environment, port, tmp_path / "server.log")
        running.append(server)
        options = ("--model", str(model), "--steps", str(STEPS), "--heldout-prompts", "0", "--final-sync")
        return grpo_lab_run(
            tmp_path, "quickstart", "--engine", server.url, "--transport", "stock", *options, timeout_s=600
        )

    yield run
    for server in running:
        server.stop()


def test_it_trains_and_the_canary_objects_to_no_version(trained, untied):
    code, output, summary = trained(untied)
    assert code == 0, output
    assert summary["violations"] == 0
    assert summary["weight_versions"] == STEPS + 1
    proofs = summary["proofs"]
    assert (proofs["hash"], proofs["structure"], proofs["canary_fails"]) == (0, STEPS + 1, 0)
    assert proofs["canary_holds"] + proofs["canary_inconclusive"] == STEPS + 1  # small steps: hard to tell
    assert proofs["canary_holds"] >= 1
    assert summary["logprob_gap_max"] < 1e-3


def test_a_tied_head_that_stays_old_is_found_by_the_canary(trained, tied):
    code, output, _ = trained(tied)
    assert code != 0
    assert "canary" in output, output
