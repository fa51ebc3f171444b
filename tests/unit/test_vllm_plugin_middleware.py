"""The lab's headers and routes in front of a vLLM, with a stand-in that answers as vLLM does."""

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace

import httpx
import pytest
from engine_kit import in_loop, turns

from grpo_lab.transport.lab_wire import (
    ABANDON_PATH,
    CAPABILITIES_PATH,
    LEASE_HEADER,
    PLAN_HEADER,
    SYNC_HEADER,
    TERM_HEADER,
)
from grpo_lab.types import EngineCapabilities, SyncId
from grpo_lab.vllm_plugin.middleware import LabMiddleware
from grpo_lab.vllm_plugin.words import ABANDON_KEY, ABANDONED, TORN

FIRST, SECOND = SyncId(3, 1), SyncId(3, 1, 2)


class Vllm:
    """Routes and engine client of a vLLM, as far as the middleware sees them."""

    def __init__(self, backend="lab_shm", raises=False):
        self.raises = raises  # as vLLM's routes do: its 500 is made outside of all middleware
        config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))
        self.vllm_config = config
        self.app = SimpleNamespace(
            state=SimpleNamespace(engine_client=self), routes=[SimpleNamespace(path="/inference/v1/generate")]
        )
        self.calls = []
        self.errored = False
        self.hang = ""
        self.fail = {}
        self.active = False
        self.paused = False
        self.version = "default"

    async def update_weights(self, request):
        assert request.update_info == {ABANDON_KEY: True}
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        self.active = False
        self.calls.append("abandoned")
        raise RuntimeError(f"Worker failed with error '{ABANDONED}'")

    async def update_weight_version(self, version):
        self.version = version

    async def resume_generation(self):
        self.paused = False
        self.calls.append("lease resumed")

    async def __call__(self, scope, receive, send):
        path = scope["path"]
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.calls.append(path)
        if path == self.hang:
            await asyncio.sleep(600)
        status, answer = self.fail.get(path, (200, {"path": path, "body": body.decode()}))
        if status == 200:
            self.active = {"/start_weight_update": True, "/finish_weight_update": False}.get(
                path, self.active
            )
            self.paused = {"/pause": True, "/resume": False}.get(path, self.paused)
        elif path == "/update_weights":
            self.active = False
        if status == 500 and self.raises:
            raise RuntimeError(json.dumps(answer))
        data = json.dumps(answer).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": data})


@pytest.fixture(params=[False, True], ids=["answers", "raises"])
def vllm(monkeypatch, request):
    """vLLM's own request class, without vLLM."""
    base = ModuleType("vllm.distributed.weight_transfer.base")
    base.WeightTransferUpdateRequest = lambda update_info: SimpleNamespace(update_info=update_info)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    return Vllm(raises=request.param)


class Client:
    def __init__(self, vllm):
        self.middleware = LabMiddleware(vllm)

        async def app(scope, receive, send):
            try:
                await self.middleware({**scope, "app": vllm.app}, receive, send)
            except RuntimeError as error:
                await send({"type": "http.response.start", "status": 500, "headers": []})
                await send({"type": "http.response.body", "body": str(error).encode()})

        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")

    async def post(self, path, sync=None, body=None, **headers):
        sent = {} if sync is None else {SYNC_HEADER: str(sync), TERM_HEADER: str(sync.term)}
        return await self.http.post(path, json=body or {}, headers={**sent, **headers})


def test_it_says_what_this_vllm_can(vllm):
    found = capabilities_of(vllm)
    assert found == found | {"staged": True, "hashes": True, "token_versions": True, "term_fencing": True}
    assert (found["score_while_paused"], found["events"], found["seen_term"]) == (False, False, 0)
    assert EngineCapabilities(**{key: value for key, value in found.items() if isinstance(value, bool)})
    assert found["start_id"] != capabilities_of(vllm)["start_id"]


def test_another_backend_is_neither_staged_nor_hashed():
    found = capabilities_of(Vllm(backend="nccl"))
    assert (found["staged"], found["hashes"], found["term_fencing"]) == (False, False, True)
    nothing = Vllm()
    nothing.vllm_config.weight_transfer_config = None
    assert capabilities_of(nothing)["staged"] is False


def capabilities_of(vllm):
    async def ask():
        return (await Client(vllm).http.get(CAPABILITIES_PATH)).json()

    return asyncio.run(ask())


@in_loop
async def test_what_is_not_ours_passes_through(vllm):
    client = Client(vllm)
    answer = await client.post("/tokenize", body={"prompt": "x"}, **{TERM_HEADER: "nonsense"})
    assert answer.json() == {"path": "/tokenize", "body": '{"prompt":"x"}'}
    assert (await client.post("/v1/completions", body={"prompt": [1]})).status_code == 200


@in_loop
async def test_an_older_term_changes_nothing(vllm):
    client = Client(vllm)
    assert (await client.post("/pause", **{TERM_HEADER: "4"})).status_code == 200
    for path in ("/resume", "/start_weight_update", "/v1/completions", ABANDON_PATH):
        answer = await client.post(path, **{TERM_HEADER: "3"})
        assert answer.status_code == 409
        assert "term 3 is over: this engine has seen term 4" in answer.json()["error"]["message"]
    assert vllm.calls == ["/pause"]
    assert (await client.post("/resume")).status_code == 200  # a stock client says no term
    assert (await client.post("/resume", **{TERM_HEADER: "x"})).status_code == 400


@in_loop
async def test_a_join_is_answered_with_the_plan_that_was_compared(vllm):
    client = Client(vllm)
    body = {"init_info": {"plan_digest": "abc123", "backend": "lab_shm"}}
    answer = await client.post("/init_weight_transfer_engine", body=body)
    assert answer.headers[PLAN_HEADER] == "abc123"
    assert json.loads(answer.json()["body"]) == body
    vllm.fail["/init_weight_transfer_engine"] = (500, {"error": "missing model.norm.weight"})
    answer = await client.post("/init_weight_transfer_engine", body=body)
    assert answer.status_code == 500
    assert PLAN_HEADER not in answer.headers
    for odd in ({}, {"init_info": []}, {"init_info": {"plan_digest": "x\r\ny"}}):
        vllm.fail.clear()
        assert PLAN_HEADER not in (await client.post("/init_weight_transfer_engine", body=odd)).headers


@in_loop
async def test_a_repeated_start_is_one_and_a_newer_one_supersedes(vllm):
    client = Client(vllm)
    for _ in range(2):
        assert (await client.post("/start_weight_update", FIRST)).status_code == 200
    assert vllm.calls == ["/start_weight_update"]
    assert (await client.post("/start_weight_update", SECOND)).status_code == 200
    assert vllm.calls == ["/start_weight_update", "abandoned", "/start_weight_update"]
    assert client.middleware.open == SECOND


@in_loop
async def test_an_update_without_a_name_is_superseded_too(vllm):
    client = Client(vllm)
    await client.post("/start_weight_update")  # a stock client
    assert (await client.post("/start_weight_update", FIRST)).status_code == 200
    assert vllm.calls == ["/start_weight_update", "abandoned", "/start_weight_update"]
    await client.post("/finish_weight_update", FIRST)
    await client.post("/start_weight_update")
    assert (await client.post(ABANDON_PATH)).status_code == 200
    assert vllm.active is False


@in_loop
async def test_an_update_can_be_abandoned_by_its_sender_only(vllm):
    client = Client(vllm)
    assert (await client.post(ABANDON_PATH, FIRST)).status_code == 200  # nothing to drop is fine
    await client.post("/start_weight_update", SECOND)
    answer = await client.post(ABANDON_PATH, FIRST)
    assert (answer.status_code, vllm.active) == (500, True)
    assert "but the open weight update is t3.v1.a2" in answer.json()["error"]["message"]
    assert (await client.post(ABANDON_PATH, SECOND)).status_code == 200
    assert (vllm.active, client.middleware.open) == (False, None)
    answer = await client.post(ABANDON_PATH, body={}, **{SYNC_HEADER: "latest"})
    assert answer.status_code == 400


@in_loop
async def test_an_abandon_that_comes_after_the_finish_is_no_success(vllm):
    client = Client(vllm)
    await client.post("/start_weight_update", FIRST)
    assert (await client.post("/finish_weight_update", FIRST)).status_code == 200
    for attempt in (FIRST, SECOND):
        answer = await client.post(ABANDON_PATH, attempt)
        assert answer.status_code == 500
        assert "t3.v1.a1 is loaded already" in answer.json()["error"]["message"]
    assert (await client.post(ABANDON_PATH, SyncId(3, 2))).status_code == 200


@in_loop
async def test_a_failed_update_leaves_the_engine_in_service(vllm):
    client = Client(vllm)
    await client.post("/start_weight_update", FIRST)
    vllm.fail["/update_weights"] = (500, {"error": {"message": "bucket 3 is corrupt"}})
    assert (await client.post("/update_weights", FIRST)).status_code == 500
    assert client.middleware.active is False
    assert (await client.post("/resume", FIRST)).status_code == 200
    assert (await client.post("/v1/completions")).status_code == 200
    assert vllm.version == "default"


@in_loop
async def test_torn_weights_serve_nobody_until_a_whole_update(vllm):
    client = Client(vllm)
    await client.post("/pause", FIRST)
    await client.post("/start_weight_update", FIRST)
    await client.post("/update_weights", FIRST)
    vllm.fail["/finish_weight_update"] = (500, {"error": {"message": f"{TORN}: KeyError"}})
    assert (await client.post("/finish_weight_update", FIRST)).status_code == 500
    assert vllm.version == "t3.v1.a1.torn"  # never the old name again
    for path in ("/resume", "/v1/completions", "/inference/v1/generate"):
        answer = await client.post(path)
        assert answer.status_code == 503
        assert "the weights are torn: t3.v1.a1 failed" in answer.json()["error"]["message"]
    assert (await client.http.get(CAPABILITIES_PATH)).json()["torn"]
    vllm.fail.clear()
    await client.post("/start_weight_update", SECOND)
    assert "abandoned" in vllm.calls  # vLLM had left the failed session open
    await client.post("/update_weights", SECOND)
    assert (await client.post("/finish_weight_update", SECOND)).status_code == 200
    assert (await client.post("/resume", SECOND)).status_code == 200
    assert (await client.post("/v1/completions")).status_code == 200


@in_loop
async def test_who_paused_and_died_is_resumed_after_the_lease(vllm):
    client = Client(vllm)
    await client.post("/pause", FIRST, **{LEASE_HEADER: "0.2"})
    await client.post("/start_weight_update", FIRST)
    assert (vllm.paused, vllm.active) == (True, True)
    async with asyncio.timeout(30):
        while vllm.paused:
            await asyncio.sleep(0.02)
    assert vllm.calls[-2:] == ["abandoned", "lease resumed"]
    assert vllm.active is False


@in_loop
async def test_the_lease_ends_with_the_resume_and_is_off_without_the_header(vllm):
    client = Client(vllm)
    for headers in (
        {LEASE_HEADER: "0.05"},
        {},
        {LEASE_HEADER: "-1"},
        {LEASE_HEADER: "nan"},
        {LEASE_HEADER: "x"},
    ):
        await client.post("/pause", FIRST, **headers)
        if headers.get(LEASE_HEADER) == "0.05":
            await client.post("/resume", FIRST)
        await asyncio.sleep(0.2)
        assert "lease resumed" not in vllm.calls


@in_loop
async def test_a_call_to_a_dead_engine_is_answered(vllm):
    client = Client(vllm)
    await client.post("/start_weight_update", FIRST)
    vllm.hang = "/update_weights"
    call = asyncio.create_task(client.post("/update_weights", FIRST))
    await turns()
    assert not call.done()
    vllm.errored = True  # the engine core was killed under it
    answer = await call
    assert answer.status_code == 500
    assert "the engine core has died" in answer.text


@in_loop
async def test_a_torn_engine_is_not_resumed_by_the_lease(vllm):
    client = Client(vllm)
    await client.post("/pause", FIRST, **{LEASE_HEADER: "0.1"})
    await client.post("/start_weight_update", FIRST)
    vllm.fail["/finish_weight_update"] = (500, {"error": {"message": f"{TORN}: KeyError"}})
    await client.post("/finish_weight_update", FIRST)
    async with asyncio.timeout(30):
        while "abandoned" not in vllm.calls:
            await asyncio.sleep(0.02)
    await turns()
    assert vllm.paused
