"""``grpo-lab run --engine URL --transport stock`` against engines that have nothing of ours: the simulated
vLLM when it is faithful, and a real vLLM with a backend in the form of its own.

Such an engine proves nothing itself: the canary does. It holds where the weights have arrived, and does not
where the engine's CPU build keeps a tied head (the contract's row ``stock-tied-head-stays-old``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys

import pytest
import torch
from contract_servers import STOCK_PLUGIN, free_port, start
from transformers import AutoModelForCausalLM
from vllm_served import PYTHON, config_for, grpo_lab_run

from grpo_lab.harness.vllm_server import running_vllm
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


@contextlib.contextmanager
def faithful(model, log):
    """Address of our simulation as a stock vLLM."""
    port = free_port()
    command = [
        sys.executable, "-m", "grpo_lab.cli.serve", str(model), "--faithful",
        "--rl-routes", "--port", str(port), "--max-num-seqs", "264", "--enable-scale-out",
        "--logprobs-mode", "processed_logprobs", "--parent-pid", str(os.getpid()),
        "--weight-transfer-config", '{"backend": "gloo_packed"}',
    ]  # fmt: skip
    server = start(command, {**os.environ, "OMP_NUM_THREADS": "1"}, port, log)
    try:
        yield server.url
    finally:
        server.stop()


@contextlib.contextmanager
def real(model, log):
    """Address of a vLLM that has none of our backends chosen and none of our routes."""
    config = config_for(
        model,
        log,
        max_num_seqs=264,
        backend="gloo_packed",
        plugin=False,
        environment={"PYTHONPATH": str(STOCK_PLUGIN)},
        extra=("--logprobs-mode", "processed_logprobs"),
    )
    with running_vllm(config) as [server]:
        yield server.url


needs_vllm = pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-vllm: run `make venv-vllm`")


@pytest.fixture(params=[faithful, pytest.param(real, marks=needs_vllm)], ids=["simulated", "vllm"])
def trained(request, tmp_path):
    """Exit code, output and summary of a run against a server on the model."""

    def run(model):
        options = ("--model", str(model), "--steps", str(STEPS), "--heldout-prompts", "0", "--final-sync")
        with request.param(model, tmp_path / "server.log") as url:
            return grpo_lab_run(
                tmp_path, "quickstart", "--engine", url, "--transport", "stock", *options, timeout_s=600
            )

    return run


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
