"""``--engine vllm``: what is asked of the servers, what is refused, what is told at the end."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from grpo_lab.errors import ConfigError, EngineError, EngineRefused
from grpo_lab.events import EngineProved, Record, SampleCompleted
from grpo_lab.harness import attached, fleet, runner
from grpo_lab.harness.engine_report import logprob_gaps, rules_by_capability
from grpo_lab.harness.recipe import RECIPES, recipe_with
from grpo_lab.harness.run_dir import RunDir
from grpo_lab.harness.runner import declaration, run
from grpo_lab.harness.vllm_server import PYTHON_VARIABLE
from grpo_lab.types import EngineCapabilities

LLAMA = {
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
}


def recipe(**changes):
    return recipe_with({"engine": "vllm", **changes}, RECIPES["smoke"][1])


def model_with(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    return tmp_path


def test_a_server_has_room_for_every_rollout_and_the_canary(tmp_path):
    model, chosen = model_with(tmp_path), recipe(engines=2, transport="gloo", max_inflight=40, seed=5)
    one, two = fleet._vllm_configs(chosen, RunDir(tmp_path), model)
    assert (one.name, two.name) == ("engine-0", "engine-1")
    assert (one.backend, one.max_model_len) == ("lab_gloo", 256)
    assert one.max_num_seqs > 40
    assert one.extra == ("--seed", "5")
    assert one.log != two.log


@pytest.mark.parametrize(
    ("config", "sequences", "length", "kv_bytes"),
    [
        ({}, 1, 256, fleet.MIN_KV_BYTES),
        ({}, 1024, 256, 1024 * 128 * 2 * 3 * 2 * 32 * 4),
        ({"head_dim": None, "hidden_size": 128}, 1024, 256, 1024 * 128 * 2 * 3 * 2 * 32 * 4),
        ({"max_position_embeddings": 131_072}, 10_000, fleet.DEFAULT_MODEL_LEN, fleet.MAX_KV_BYTES),
    ],
)
def test_the_kv_cache_is_sized_by_the_model(tmp_path, config, sequences, length, kv_bytes):
    assert fleet._sizes(model_with(tmp_path, **config), sequences) == (length, kv_bytes)


def test_the_trace_says_what_a_real_vllm_can():
    (abilities,) = declaration(recipe()).capabilities.values()
    assert abilities["staged"]
    assert abilities["hashes"]
    assert not abilities["score_while_paused"]
    assert not abilities["events"]


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="make venv-vllm"):
        run(recipe(out=tmp_path), Console(quiet=True))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    with pytest.raises(ConfigError, match="batch_invariant=True"):
        run(recipe(out=tmp_path, batch_invariant=True), Console(quiet=True))
    assert not list(Path(tmp_path).iterdir())


def test_rules_are_told_by_how_far_they_go():
    strengths = {
        "S1": {"engine-0": "full", "engine-1": "full"},
        "S2": {"engine-0": "full", "engine-1": "n.a.: no events"},
        "S3": {"engine-0": "n.a.: no events", "engine-1": "n.a.: no events"},
    }
    table = rules_by_capability(strengths)
    rows = dict(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert rows == {
        "full": "S1",
        "full (engine-0)": "S2",
        "n.a.: no events": "S3",
        "n.a.: no events (engine-1)": "S2",
    }


def test_gaps_are_told_for_every_version():
    def proved(version, gap, proof="canary"):
        return EngineProved(
            engine="engine-0", term=1, version=version, attempt=1, proof=proof, outcome="holds", gap=gap
        )

    completed = SampleCompleted(
        term=1,
        sample="s",
        group="g",
        engine="engine-0",
        finish_reason="stop",
        tokens=1,
        logprobs=1,
        logprobs_finite=True,
    )
    events = [proved(1, 2e-6), proved(1, None, "hash"), proved(2, 5e-6), completed]
    records = [
        Record(t=float(i), actor="trainer", seq=i, cause=(), event=event) for i, event in enumerate(events)
    ]
    assert list(logprob_gaps(records)) == [
        "engine-0: canary and trainer differ by 5.0e-06 at most, over 2 versions",
        "  v1 2.0e-06  v2 5.0e-06",
        "token versions by source: engine: 1 samples",
    ]
    assert list(logprob_gaps([])) == []


class OldServer:
    """An engine without some of vLLM's routes."""

    name, seen_term, capabilities = "engine-0", 3, EngineCapabilities()

    def __init__(self, *missing):
        self.missing = missing

    async def answer(self, call, value):
        if call in self.missing:
            raise EngineRefused(f"{call}: HTTP 404", 404)
        return value

    async def weight_info(self):
        return await self.answer("weight_info", "t7.v1.a1")

    async def is_paused(self):
        return await self.answer("is_paused", False)

    async def close(self):
        pass


@pytest.fixture
def attaching(monkeypatch):
    def to(*missing):
        async def connect(urls, recorder, wait_s):
            return (OldServer(*missing),)

        monkeypatch.setattr(attached, "connect_engines", connect)
        return attached.ask_engines(["http://engine"])

    return to


def test_attaching_goes_on_from_the_newest_term(attaching):
    assert attaching().newest_term == 7
    assert attaching("weight_info").newest_term == 3  # too old to name its weights


def test_a_server_whose_weights_cannot_be_changed_is_refused(attaching):
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        attaching("weight_info", "is_paused")


def test_the_server_is_asked_before_anything_is_made(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(runner, "model_of", lambda *given: made.append("model"))
    chosen = recipe(engine="http://127.0.0.1:1", out=tmp_path / "runs")
    with pytest.raises(ConfigError, match="address of a server that runs"):
        run(chosen, Console(quiet=True))
    assert made == []
    assert not (tmp_path / "runs").exists()
