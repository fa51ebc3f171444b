"""Our weight-transfer backends in a real vLLM: what an update must not do, what a failed one leaves."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
import torch
from vllm_served import PYTHON, config_for, largest_gap, served_by
from vllm_syncs import Trainer, TrippingTransport

from grpo_lab.errors import GrpoLabError, HandshakeError
from grpo_lab.events import EngineProved, SyncAborted
from grpo_lab.harness.vllm_server import running_vllm
from grpo_lab.tasks import get_task
from grpo_lab.tasks.tiny_model import TinyModelSpec, make_tiny_model
from grpo_lab.transport.lab_wire import TERM_HEADER

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-vllm: run `make venv-vllm`"),
]
SILENCE_S = 2.0


@pytest.fixture(scope="module")
def model():
    return make_tiny_model(TinyModelSpec(), get_task("sort_digits"), 0).path


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with running_vllm(config_for(model, tmp_path_factory.mktemp("shm") / "vllm.log")) as [running]:
        yield running


@pytest.fixture
def trainer(server, model):
    """One that is connected and has synced once, in a term of its own."""
    term = httpx.get(f"{server.url}/grpo_lab/capabilities", trust_env=False).json()["seen_term"] + 1
    made = Trainer(server.url, model, term)
    made.connect()
    assert made.sync().committed
    yield made
    made.close()


def aborts(trainer, final=False):
    """The reasons of its failed attempts; ``final``: of the syncs that it gave up."""
    events = [r.event for r in trainer.recorder.records if isinstance(r.event, SyncAborted)]
    return [event.reason for event in events if event.final == final]


def gaps(trainer):
    return [
        r.event.gap
        for r in trainer.recorder.records
        if isinstance(r.event, EngineProved) and r.event.proof == "canary"
    ]


class Spoiled(TrippingTransport):
    """Flips a bit of the second bucket after it was hashed, so many times."""

    times = 1

    async def _dispatch(self, announce):
        if announce.bucket == 1 and self.times > 0:
            self.times -= 1
            self.ring[announce.slot][5] ^= 1
        await super()._dispatch(announce)


class Silent(TrippingTransport):
    """Says nothing at its second bucket, once, for longer than the receiver waits."""

    times = 1

    async def _dispatch(self, announce):
        if announce.bucket == 1 and self.times > 0:
            self.times -= 1
            await asyncio.sleep(3 * SILENCE_S)
        await super()._dispatch(announce)


def reconnected(trainer, transport):
    """With another transport, in a new term. The weights are those of before."""
    trainer.transport = transport
    trainer.term += 1
    trainer.connect()
    return trainer


def test_syncs_prove_themselves_and_every_version_is_another(server, trainer):
    seen = [served_by(server.url)]
    for _ in range(3):
        assert trainer.sync().committed
        seen.append(served_by(server.url))
    assert max(gaps(trainer)) < 1e-3
    assert len({tuple(sorted(one.checksums.items())) for one in seen}) == 4
    assert all(len(set(one.checksums.values())) == len(one.checksums) for one in seen)


def test_the_checksums_see_one_packed_weight_and_a_tied_head(server, trainer):
    before = served_by(server.url).checksums

    def changed_by(change):
        nonlocal before
        with torch.no_grad():
            change(trainer.model)
        assert trainer.sync_as_it_is().committed
        after = served_by(server.url).checksums
        names = {name.rpartition(":")[2] for name in after if after[name] != before[name]}
        before = after
        return names

    def linear(model):
        model.model.layers[1].mlp.down_proj.weight[3, 4] += 1e-4

    def embedding(model):
        model.model.embed_tokens.weight[3, 4] += 1e-4

    assert changed_by(linear) == {"model.layers.1.mlp.down_proj.weight"}
    assert changed_by(embedding) == {"model.embed_tokens.weight", "lm_head.weight.packed"}
    assert changed_by(lambda model: None) == set()


def test_a_corrupt_bucket_is_refused_and_the_retry_commits(server, trainer):
    reconnected(trainer, Spoiled)
    assert trainer.sync().committed
    (reason,) = aborts(trainer)
    assert "bucket 1 is corrupt" in reason
    assert gaps(trainer)[-1] < 1e-3


def test_an_update_that_never_gets_through_leaves_the_version_before(server, trainer):
    before = served_by(server.url)
    version = httpx.get(f"{server.url}/weight_info", trust_env=False).json()
    Spoiled.times = 100
    try:
        reconnected(trainer, Spoiled)
        assert not trainer.sync().committed
    finally:
        Spoiled.times = 1
    attempts = aborts(trainer)
    assert len(attempts) == 2
    assert all("bucket 1 is corrupt" in reason for reason in attempts), attempts
    assert aborts(trainer, final=True) == attempts[-1:]  # the sync is given up for its last attempt's reason
    after = served_by(server.url)  # it generates: it was resumed
    assert after.checksums == before.checksums
    assert largest_gap(after, before) == 0.0
    assert httpx.get(f"{server.url}/weight_info", trust_env=False).json() == version


def test_a_silent_sender_is_noticed_within_its_bound(server, trainer):
    trainer.progress_timeout_s = SILENCE_S
    reconnected(trainer, Silent)
    began_s = time.monotonic()
    assert trainer.sync().committed  # on the second attempt
    assert time.monotonic() - began_s < 60
    (reason,) = aborts(trainer)
    assert "did not send bucket 1" in reason or "PeerDied" in reason or "did not release" in reason


def test_another_models_plan_is_refused_by_name(server, trainer):
    trainer.close()
    trainer.term += 1
    trainer.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    del trainer.model.model.norm
    with pytest.raises(GrpoLabError, match=r"missing model.norm.weight; extra extra") as caught:
        trainer.connect()
    assert not isinstance(caught.value, HandshakeError)  # it comes in vLLM's words
    assert served_by(server.url).tokens


def test_nothing_was_received_so_nothing_is_finished(server, trainer):
    version = httpx.get(f"{server.url}/weight_info", trust_env=False).json()
    before = served_by(server.url)
    once = httpx.Limits(max_keepalive_connections=0)  # vLLM closes a connection behind its 500
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False, limits=once) as client:
        assert client.post("/pause?mode=keep").status_code == 200
        assert client.post("/start_weight_update").status_code == 200
        finish = client.post("/finish_weight_update", json={"weight_version": "made up"})
        assert finish.status_code == 500
        assert "no verified weights are staged" in finish.text
        assert client.post("/grpo_lab/abandon_weight_update", json={}).status_code == 200
        assert client.post("/resume").status_code == 200
        assert client.get("/weight_info").json() == version
    assert served_by(server.url) == before
    assert trainer.sync().committed


def test_an_older_term_is_refused(server, trainer):
    headers = {TERM_HEADER: str(trainer.term - 1)}
    answer = httpx.post(f"{server.url}/pause?mode=abort", headers=headers, trust_env=False)
    assert answer.status_code == 409
    assert httpx.get(f"{server.url}/is_paused", trust_env=False).json() == {"is_paused": False}


def test_gloo_brings_the_same_weights(model, tmp_path):
    config = config_for(model, tmp_path / "vllm.log", backend="lab_gloo")
    with running_vllm(config) as [server]:
        trainer = Trainer(server.url, model, 1)
        trainer.kind = "gloo"
        try:
            trainer.connect()
            assert trainer.sync().committed
            assert trainer.sync().committed
        finally:
            trainer.close()
        assert max(gaps(trainer)) < 1e-3
        served = served_by(server.url)
        trainer.model.save_pretrained(tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / name).write_bytes((model / name).read_bytes())
    with running_vllm(config_for(tmp_path / "saved", tmp_path / "fresh.log")) as [server]:
        fresh = served_by(server.url)
    assert served.checksums == fresh.checksums
    assert largest_gap(served, fresh) == 0.0
