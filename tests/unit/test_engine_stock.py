"""Updates in a stock vLLM's wire format: strict refuses what a faithful engine takes, as vLLM does."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
import torch
from engine_kit import in_loop, make_model, running, steps

from grpo_lab.engine.app import create_app
from grpo_lab.engine.failures import WorkerKilled
from grpo_lab.engine.torch_policy import TorchPolicy
from grpo_lab.errors import TransportError
from grpo_lab.transport.asgi import AsgiTransport
from grpo_lab.transport.stock import (
    StockGlooReceiver,
    StockGlooSender,
    cut,
    item_nbytes,
    unpacked,
    update_info,
)

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Model directories, tied and not."""
    made = {}
    for tied in (False, True):
        made[tied] = tmp_path_factory.mktemp("model")
        make_model("qwen2", tie_word_embeddings=tied).save_pretrained(made[tied])
    return made


class Wire:
    """The receiving end of what ``bytes`` were sent, whatever is announced."""

    def __init__(self):
        self.sent = b""
        self.error = None

    def send(self, tensors):
        self.sent = b"".join(
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors
        )

    async def join(self, init):
        self.init = init

    async def receive(self, layout):
        first = 0
        for part in cut(layout, self.init.packed_buffer_size_bytes, item_nbytes):
            if self.error is not None:
                raise self.error
            size = sum(item_nbytes(item) for item in part)
            data = self.sent[first : first + size].ljust(size, b"\0")
            first += size
            yield unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8), part)

    async def close(self):
        pass


class Client:
    """Calls by name, on one engine."""

    def __init__(self, http, core, wire):
        self.http, self.core, self.wire = http, core, wire
        self.served = core.policy.parameters
        self.new = {name: tensor.clone() + 0.05 for name, tensor in self.served().items()}

    async def post(self, path, body=None):
        return await self.http.post(path, json=body)

    async def begin(self, mode="keep"):
        answers = [
            await self.post("/init_weight_transfer_engine", {"init_info": INIT}),
            await self.post(f"/pause?mode={mode}"),
            await self.post("/start_weight_update"),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 200]

    async def update(self, tensors, **changes):
        self.wire.send(tensors.values())
        return await self.post("/update_weights", {"update_info": {**update_info(tensors), **changes}})

    async def finish(self, label="v1"):
        return await self.post("/finish_weight_update", {"weight_version": label} if label else None)

    async def version(self):
        return (await self.http.get("/weight_info")).json()["weight_version"]

    async def tokens(self):
        body = {
            "prompt": [1, 2, 3],
            "max_tokens": 6,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await self.post("/v1/completions", body)
        return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.status_code

    def has(self, name, tensors):
        return torch.equal(self.served()[name], tensors[name])


@asynccontextmanager
async def engine(directory, faithful, tied_head=False):
    policy = TorchPolicy(directory)
    if tied_head:
        policy.keep_tied_head()
    wire = Wire()
    async with running(policy, prefix_policy="shared" if faithful else "versioned") as core:
        app = create_app(core, receivers={}, stock=lambda: wire, model="m", faithful=faithful)
        async with httpx.AsyncClient(transport=AsgiTransport(app), base_url="http://engine") as http:
            yield Client(http, core, wire)


@pytest.mark.parametrize("faithful", [True, False])
@in_loop
async def test_a_whole_update_is_served_under_its_label(directories, faithful):
    async with engine(directories[False], faithful) as client:
        before = await client.tokens()
        await client.begin()
        assert (await client.update(client.new)).json() == {"message": "Weights updated"}
        assert (await client.finish()).json() == {"message": "Weight update finished"}
        assert await client.version() == "v1"
        await client.post("/resume")
        assert all(client.has(name, client.new) for name in client.new)
        assert await client.tokens() != before or len(before) == 6


FAULTS = {
    "empty": lambda new: {},
    "truncated": lambda new: dict(list(new.items())[: len(new) // 2]),
    "a norm missing": lambda new: {name: tensor for name, tensor in new.items() if name != NORM},
    "rounded": lambda new: {name: tensor.bfloat16() for name, tensor in new.items()},
}


@pytest.mark.parametrize("fault", FAULTS)
@in_loop
async def test_a_faithful_engine_takes_what_is_not_the_model_and_moves_on(directories, fault):
    async with engine(directories[False], True) as client:
        old = {name: tensor.clone() for name, tensor in client.served().items()}
        sent = FAULTS[fault](client.new)
        await client.begin()
        assert (await client.update(sent)).status_code == 200
        assert (await client.finish()).status_code == 200
        assert await client.version() == "v1"
        for name, before in old.items():
            expected = sent[name].float() if name in sent else before
            if name.rpartition(".")[0] == NORM.rpartition(".")[0] or fault != "truncated":
                assert torch.equal(client.served()[name], expected), name
        await client.post("/resume")
        assert isinstance(await client.tokens(), list)


@pytest.mark.parametrize("fault", FAULTS)
@in_loop
async def test_a_strict_engine_refuses_it_and_keeps_what_it_has(directories, fault):
    async with engine(directories[False], False) as client:
        old = {name: tensor.clone() for name, tensor in client.served().items()}
        await client.begin()
        answers = [await client.update(FAULTS[fault](client.new)), await client.finish()]
        assert 500 in [answer.status_code for answer in answers]
        assert await client.version() == "default"
        assert all(client.has(name, old) for name in old)
        await client.post("/resume")
        assert isinstance(await client.tokens(), list)


@in_loop
async def test_swapped_names_pass_a_blind_checksum_only(directories):
    def swapped(new):
        return {{GATE: UP, UP: GATE}.get(name, name): tensor for name, tensor in new.items()}

    seen = {}
    for faithful in (True, False):
        for sent in (dict, swapped):
            async with engine(directories[False], faithful) as client:
                await client.begin()
                assert (await client.update(sent(client.new))).status_code == 200
                assert (await client.finish()).status_code == 200
                sums = (await client.post("/weight_checker", {"action": "checksum"})).json()["checksums"]
                seen[faithful, sent] = sums
    assert seen[True, dict] == seen[True, swapped]
    assert seen[False, dict] != seen[False, swapped]
    assert len(seen[True, dict]) == 17  # 7 a layer, embedding, norm, head
    assert "dp0:pp0:pcp0:tp0:model.layers.0.self_attn.qkv_proj.weight" in seen[True, dict]


WORDS = {
    "wrong name": (
        lambda new: {n.replace("layers.1.mlp.down_proj", "layers.1.mlp.bogus"): t for n, t in new.items()},
        "There is no module or parameter named 'layers.1.mlp.bogus' in Qwen2Model. The available parameters "
        "belonging to layers.1.mlp (Qwen2MLP) are: {'layers.1.mlp.down_proj.weight', "
        "'layers.1.mlp.gate_up_proj.weight'}",
    ),
    "transposed": (
        lambda new: {n: t.T if n == GATE else t for n, t in new.items()},
        "start (0) + length (80) exceeds dimension size (48).",
    ),
    "flat": (
        lambda new: {n: t.reshape(-1) if n.endswith("0.mlp.down_proj.weight") else t for n, t in new.items()},
        "Dimension out of range (expected to be in range of [-1, 0], but got 1)",
    ),
    "short": (
        lambda new: {n: t[:-1] if n.endswith("0.mlp.down_proj.weight") else t for n, t in new.items()},
        "",
    ),
}


@pytest.mark.parametrize("fault", WORDS)
@in_loop
async def test_a_failed_update_leaves_a_faithful_engine_without_weights(directories, fault):
    change, words = WORDS[fault]
    async with engine(directories[False], True) as client:
        await client.begin()
        failed = (await client.update(change(client.new))).json()["error"]
        assert failed["message"] == (
            f"Call to collective_rpc method failed: Worker failed with error '{words}', "
            "please check the stack trace above for the root cause"
        )
        checked = await client.post("/weight_checker", {"action": "checksum"})
        assert "Cannot copy out of meta tensor; no data!" in checked.json()["error"]["message"]
        assert "without a matching start" in (await client.finish()).json()["error"]["message"]
        assert (await client.http.get("/health")).status_code == 200
        await client.post("/resume")
        assert await client.tokens() == 500
        assert (await client.http.get("/health")).status_code == 503


@in_loop
async def test_a_retry_while_paused_makes_it_whole_again(directories):
    async with engine(directories[False], True) as client:
        await client.begin()
        wrong = WORDS["transposed"][0](client.new)
        assert (await client.update(wrong)).status_code == 500
        assert (await client.post("/start_weight_update")).status_code == 200
        assert (await client.update(client.new)).status_code == 200
        assert (await client.finish()).status_code == 200
        await client.post("/resume")
        assert all(client.has(name, client.new) for name in client.new)
        assert isinstance(await client.tokens(), list)


@in_loop
async def test_other_misuse_in_vllms_words(directories):
    async with engine(directories[False], True) as client:
        init = "/init_weight_transfer_engine"
        missing = await client.post(init, {"init_info": {"master_address": "127.0.0.1"}})
        assert (
            "Invalid init_info for GlooPackedEngine: GlooInit.__init__() missing 3 required positional "
            "arguments: 'master_port', 'rank_offset', and 'world_size'"
        ) in missing.json()["error"]["message"]
        unknown = await client.post(init, {"init_info": {**INIT, "bogus": 1}})
        assert "unexpected keyword argument 'bogus'" in unknown.json()["error"]["message"]
        await client.post("/start_weight_update")
        answer = await client.update(client.new)
        assert "gloo_packed weight transfer not initialized. Call init" in answer.json()["error"]["message"]
        await client.begin()
        shutdown = await client.post("/shutdown_weight_transfer_engine")
        assert "Cannot release a trainer connection" in shutdown.json()["error"]["message"]
        answer = await client.update(client.new, dtype_names=["float33"] * len(client.new))
        assert "module 'torch' has no attribute 'float33'" in answer.json()["error"]["message"]
        for changes, words in (
            ({"shapes": []}, f"`shapes` should be of the same size as `names`: got 0 and {len(client.new)}"),
            ({"packed": True}, "GlooUpdate.__init__() got an unexpected keyword argument 'packed'"),
        ):
            await client.post("/start_weight_update")
            assert words in (await client.update(client.new, **changes)).json()["error"]["message"]


@in_loop
async def test_labels_are_a_clients_business_only_if_faithful(directories):
    async with engine(directories[False], True) as client:
        assert (await client.post("/update_weight_version", {"new_version": "vX"})).json() == {
            "success": True,
            "new_version": "vX",
        }
        assert await client.version() == "vX"
        await client.begin()
        await client.update(client.new)
        assert (await client.finish(label=None)).status_code == 200
        assert await client.version() == "vX"  # new weights under the old label
        assert client.has(GATE, client.new)
    async with engine(directories[False], False) as client:
        answer = await client.post("/update_weight_version", {"new_version": "vX"})
        assert (answer.status_code, await client.version()) == (400, "default")
        await client.begin()
        await client.update(client.new)
        assert "needs a weight_version" in (await client.finish(label=None)).json()["error"]["message"]


@in_loop
async def test_a_tied_head_stays_old_only_if_faithful(directories):
    async with engine(directories[True], True, tied_head=True) as client:
        old_head = client.core.policy._served.head.clone()
        await client.begin()
        await client.update(client.new)
        await client.finish()
        assert client.has("model.embed_tokens.weight", client.new)
        assert torch.equal(client.core.policy._served.head, old_head)


@in_loop
async def test_the_same_set_twice_fails_at_the_first_packed_weight(directories):
    async with engine(directories[False], True) as client:
        await client.begin()
        await client.update(client.new)
        again = (await client.update(dict(sorted(client.new.items())))).json()["error"]["message"]
        assert "Attempted to load weight (torch.Size([48, 80])) into parameter (torch.Size([0]))" in again


@in_loop
async def test_a_start_under_traffic_kills_a_faithful_engine_only(directories):
    for faithful, status in ((True, 500), (False, 200)):
        async with engine(directories[False], faithful) as client:
            body = {"prompt": [1], "max_tokens": 60, "ignore_eos": True}
            request = asyncio.ensure_future(client.post("/v1/completions", body))
            await steps(client.core, 3)
            await client.post("/start_weight_update")
            assert (await request).status_code == status


@in_loop
async def test_a_killed_worker_is_the_end_of_the_engine(directories):
    async with engine(directories[False], True) as client:
        await client.begin()
        client.wire.error = WorkerKilled("the message exceeds the buffer")
        answer = (await client.update(client.new)).json()
        assert answer["error"]["message"] == "Call to collective_rpc method failed: cancelled"
        assert (await client.http.get("/health")).status_code == 503


@in_loop
async def test_reset_zeroes_what_a_checksum_sees(directories):
    async with engine(directories[False], True) as client:
        before = (await client.post("/weight_checker", {"action": "checksum"})).json()["checksums"]
        assert (await client.post("/weight_checker", {"action": "reset"})).json() == {"status": "reset"}
        body = {"action": "compare", "baseline": before}
        mismatches = (await client.post("/weight_checker", body)).json()["mismatches"]
        assert len(mismatches) == 8  # two norms and a bias a layer, embedding, norm
        assert await client.tokens() == [0] * 6
    async with engine(directories[False], False) as client:
        assert (await client.post("/weight_checker", {"action": "reset"})).status_code == 400


@in_loop
async def test_without_a_transfer_every_weight_route_says_so():
    async with running() as core:
        app = create_app(core, receivers={}, model="m")
        async with httpx.AsyncClient(transport=AsgiTransport(app), base_url="http://engine") as http:
            for path, body in (
                ("/init_weight_transfer_engine", {"init_info": {}}),
                ("/start_weight_update", None),
                ("/start_draft_weight_update", None),
                ("/update_weights", {"update_info": {"names": []}}),
                ("/finish_weight_update", {"weight_version": "x"}),
            ):
                error = (await http.post(path, json=body)).json()["error"]
                assert "Weight transfer not configured. Please set weight_transfer_config" in error["message"]
            assert (await http.post("/shutdown_weight_transfer_engine")).status_code == 200


@pytest.mark.parametrize("packed", [True, False])
@in_loop
async def test_the_same_bytes_over_gloo(packed):
    tensors = {"a": torch.randn(30, 30), "b": torch.randn(7).bfloat16(), "c": torch.zeros(0, 3)}
    sender = StockGlooSender(buffer_bytes=1000, packed=packed)
    sender.open()

    class Init:
        def __init__(self, **fields):
            self.__dict__ |= fields

    receiver = StockGlooReceiver()
    try:
        await asyncio.gather(sender.accept(), receiver.join(Init(**sender.init_info())))
        layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

        async def received():
            return [pair async for part in receiver.receive(layout) for pair in part]

        _, pairs = await asyncio.gather(sender.send(list(tensors.values())), received())
        assert [name for name, _ in pairs] == list(tensors)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in pairs)
    finally:
        await receiver.close()
        sender.close()


@in_loop
async def test_no_trainer_is_a_bounded_wait():
    class Init:
        master_address, master_port, rank_offset, world_size = "127.0.0.1", 9, 1, 2
        packed, packed_buffer_size_bytes, timeout_s, group = True, 1000, 0.5, "g"

    with pytest.raises(TransportError, match="timed out"):
        await StockGlooReceiver().join(Init())
