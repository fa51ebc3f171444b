"""The app's routes in process: statuses and bodies as a real vLLM 0.32.0 was recorded to answer."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from engine_kit import (
    FakeReceiver,
    in_loop,
    init_info,
    make_model,
    pack,
    running,
    sampling,
    steps,
    turns,
    update_info,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from grpo_lab.engine.app import create_app
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.text import Text
from grpo_lab.engine.torch_policy import TorchPolicy
from grpo_lab.engine.wire import MAX_BODY_BYTES
from grpo_lab.types import SyncId

GENERATE = "/inference/v1/generate"


@asynccontextmanager
async def served(policy=None, text=None, settings=None, **options):
    """(HTTP client, engine) over one app."""
    receiver = options.pop("receiver", FakeReceiver())
    decode = text.decode if text else None
    async with running(policy, decode=decode, **(settings or {})) as core:
        app = create_app(core, receivers={"fake": lambda: receiver}, model="m", text=text, **options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield client, core


def failed(status, message, param=None, kind="Bad Request"):
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def validation(kind, loc, message, value, extra=""):
    row = f"{{'type': '{kind}', 'loc': '{loc}', 'msg': {message}, 'input': '{value}'{extra}}}"
    text = f"1 validation error:\n  {row}"
    return failed(400, text, loc)


def worker(message):
    text = (
        f"Call to collective_rpc method failed: Worker failed with error '{message}', "
        "please check the stack trace above for the root cause"
    )
    return failed(500, text, None, "InternalServerError")


NO_SESSION = "finish_weight_update called without a matching start_weight_update."
UNREADABLE_FLAG = "'Input should be a valid boolean, unable to interpret input'"

# Recorded answers: (method, path, body or None, status, answer).
ROWS = [
    ("POST", "/pause?mode=keep", None, 200, {"status": "paused"}),
    ("POST", "/pause?mode=abort&clear_cache=true&unknown=1", None, 200, {"status": "paused"}),
    ("POST", "/pause?mode=wait", None, 200, {"status": "paused"}),
    (
        "POST",
        "/pause?mode=bogus",
        None,
        400,
        validation(
            "literal_error",
            "query.mode",
            "\"Input should be 'abort', 'wait' or 'keep'\"",
            "bogus",
            ", 'ctx': {'expected': \"'abort', 'wait' or 'keep'\"}",
        ),
    ),
    (
        "POST",
        "/pause?mode=keep&clear_cache=maybe",
        None,
        400,
        validation("bool_parsing", "query.clear_cache", UNREADABLE_FLAG, "maybe"),
    ),
    ("GET", "/pause", None, 405, {"detail": "Method Not Allowed"}),
    ("POST", "/resume", None, 200, {"status": "resumed"}),
    ("GET", "/is_paused", None, 200, {"is_paused": False}),
    ("POST", "/is_paused", None, 405, {"detail": "Method Not Allowed"}),
    ("GET", "/weight_info", None, 200, {"weight_version": "default"}),
    ("GET", "/get_world_size", None, 200, {"world_size": 1}),
    (
        "GET",
        "/get_world_size?include_dp=x",
        None,
        400,
        validation("bool_parsing", "query.include_dp", UNREADABLE_FLAG, "x"),
    ),
    (
        "POST",
        "/init_weight_transfer_engine",
        {"foo": 1},
        400,
        validation("missing", "body.init_info", "'Field required'", "None"),
    ),
    (
        "POST",
        "/init_weight_transfer_engine",
        {"init_info": [1]},
        400,
        validation(
            "dict_type", "body.init_info", "'Input should be a valid dictionary'", "<list of 1 items>"
        ),
    ),
    (
        "POST",
        "/update_weights",
        {"names": []},
        400,
        validation("missing", "body.update_info", "'Field required'", "None"),
    ),
    (
        "POST",
        "/update_weights",
        {"update_info": {}},
        500,
        worker("start_weight_update must be called before update_weights."),
    ),
    ("POST", "/finish_weight_update", None, 500, worker(NO_SESSION)),
    ("POST", "/finish_weight_update", {"weight_version": "x"}, 500, worker(NO_SESSION)),
    (
        "POST",
        "/finish_weight_update",
        {"weight_version": 7},
        400,
        validation("string_type", "body.weight_version", "'Input should be a valid string'", "7"),
    ),
    (
        "POST",
        "/shutdown_weight_transfer_engine",
        None,
        200,
        {"message": "Weight transfer shut down"},
    ),
    ("POST", "/weight_checker", None, 400, validation("missing", "body.action", "'Field required'", "None")),
    (
        "POST",
        "/weight_checker",
        {"action": "compare"},
        400,
        failed(400, "action='compare' requires a 'baseline' object"),
    ),
    ("POST", "/abort_requests", {}, 200, {"status": "aborted", "aborted": 0}),
    ("POST", "/abort_requests", {"request_ids": ["x", "y"]}, 200, {"status": "aborted", "aborted": 2}),
    ("POST", "/abort_requests", None, 400, failed(400, "Invalid JSON format")),
    ("POST", "/abort_requests", [1], 400, failed(400, "Request body must be a JSON object")),
    ("POST", "/reset_prefix_cache", None, 200, {"success": True}),
    ("GET", "/nothing", None, 404, {"detail": "Not Found"}),
    (
        "POST",
        "/v1/completions",
        {"model": "other", "prompt": [1]},
        404,
        failed(404, "The model `other` does not exist. Valid aliases: m.", "model", "NotFoundError"),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
@in_loop
async def test_recorded_answers(row):
    method, path, body, status, expected = row
    async with served() as (http, _):
        answer = await http.request(method, path, **({} if body is None else {"json": body}))
        assert (answer.status_code, answer.json()) == (status, expected)


@in_loop
async def test_bad_json_is_a_400():
    async with served() as (http, _):
        answer = await http.post("/init_weight_transfer_engine", content=b"{bad")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "body.1"
        assert "'type': 'json_invalid'" in error["message"]
        assert "Expecting property name enclosed in double quotes" in error["message"]


@in_loop
async def test_health_and_a_dead_engine():
    class Broken(SyntheticPolicy):
        def step(self, scheduled):
            raise RuntimeError("boom")

    async with served(Broken()) as (http, _):
        health = await http.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        answer = await http.post(GENERATE, json={"token_ids": [1], "sampling_params": {}})
        assert answer.status_code == 500
        assert "boom" in answer.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 503
        for method, path in (("POST", "/pause"), ("POST", "/resume"), ("GET", "/weight_info")):
            assert (await http.request(method, path)).status_code == 500


@in_loop
async def test_a_whole_sync_over_http():
    shapes = {"a": (30, 30), "b": (5,)}
    policy, receiver = SyntheticPolicy(shapes=shapes), FakeReceiver()
    async with served(policy, receiver=receiver) as (http, _):
        plan, receiver.buckets = pack({name: value + 2 for name, value in policy.parameters().items()})
        sync = SyncId(1, 1)
        before = (await http.post("/weight_checker", json={"action": "checksum"})).json()["checksums"]
        expected = [
            ("/init_weight_transfer_engine", {"init_info": init_info(plan)}, "Weight transfer initialized"),
            ("/start_weight_update", None, "Weight update started"),
            ("/update_weights", {"update_info": update_info(sync, plan)}, "Weights updated"),
            ("/finish_weight_update", {"weight_version": str(sync)}, "Weight update finished"),
        ]
        for path, body, message in expected:
            answer = await http.post(path, json=body)
            assert (answer.status_code, answer.json()) == (200, {"message": message})
        assert (await http.get("/weight_info")).json() == {"weight_version": "t1.v1.a1"}
        compare = (await http.post("/weight_checker", json={"action": "compare", "baseline": before})).json()
        assert compare == {"match": False, "mismatches": ["dp0:pp0:pcp0:tp0:a", "dp0:pp0:pcp0:tp0:b"]}
        answer = (await http.post(GENERATE, json={"token_ids": [1], "sampling_params": {}})).json()
        assert answer["choices"][0]["weight_versions"][0]["version"] == "t1.v1.a1"


@in_loop
async def test_a_second_start_and_a_refused_handshake():
    policy = SyntheticPolicy(shapes={"a": (3,)})
    async with served(policy) as (http, _):
        assert (await http.post("/start_weight_update")).status_code == 200
        answer = await http.post("/start_weight_update")
        assert answer.json() == worker(
            "start_weight_update called while a weight update is already active. "
            "Call finish_weight_update first."
        )
        plan, _ = pack({"z": next(iter(policy.parameters().values())).clone()})
        answer = await http.post("/init_weight_transfer_engine", json={"init_info": init_info(plan)})
        assert answer.status_code == 500
        assert "missing a; extra z" in answer.json()["error"]["message"]


@in_loop
async def test_terms_and_causes_travel_in_headers():
    async with served() as (http, core):
        core.recorder.observe("trainer:3")
        answer = await http.post("/pause", headers={"x-grpo-lab-term": "5", "x-grpo-lab-cause": "trainer:8"})
        assert answer.headers["x-grpo-lab-cause"] == core.recorder.last_id
        assert core.recorder.records[0].cause == ("trainer:8",)
        answer = await http.post("/resume", headers={"x-grpo-lab-term": "4"})
        assert answer.status_code == 409
        assert "engine has seen term 5" in answer.json()["error"]["message"]
        assert (await http.post("/resume", headers={"x-grpo-lab-term": "x"})).status_code == 400
        assert (await http.post("/resume", headers={"x-grpo-lab-sync": "x"})).status_code == 200
        assert (await http.post("/start_weight_update", headers={"x-grpo-lab-sync": "x"})).status_code == 400
        assert (await http.post("/resume", headers={"x-grpo-lab-cause": "no id"})).status_code == 200
        answer = await http.post(
            GENERATE, json={"token_ids": [1], "sampling_params": {}}, headers={"x-grpo-lab-term": "4"}
        )
        assert answer.status_code == 409


@in_loop
async def test_tokens_in_and_out():
    async with served() as (http, core):
        body = {
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 4, "ignore_eos": True, "logprobs": 0},
        }
        answer = await http.post(GENERATE, json=body, headers={"x-request-id": "mine"})
        data = answer.json()
        assert data["request_id"] == "generate-tokens-mine"
        (choice,) = data["choices"]
        assert choice["finish_reason"] == "length"
        assert [item["token_id"] for item in choice["logprobs"]["content"]] == choice["token_ids"]
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 4, "kv_version": 0}]
        assert data["usage"]["completion_tokens"] == 4
        assert core.recorder.records[0].event.request == "mine"
        assert (await http.post(GENERATE, json={})).json()["error"]["param"] == "body.token_ids"
        wrong = {"token_ids": [1], "sampling_params": {"n": 1000}}
        assert (await http.post(GENERATE, json=wrong)).status_code == 400
        wrong = {"token_ids": [1], "sampling_params": {"temperature": "hot"}}
        answer = (await http.post(GENERATE, json=wrong)).json()
        assert answer["error"]["param"] == "body.sampling_params.temperature"
        answer = await http.post(GENERATE, json={"token_ids": [5000], "sampling_params": {}})
        assert (answer.status_code, "out of vocabulary" in answer.text) == (400, True)


@in_loop
async def test_numbers_that_are_not_finite_are_a_400():
    class Nan(SyntheticPolicy):
        def step(self, scheduled):
            output = super().step(scheduled)
            output.logprobs[:] = [float("nan")] * len(output.logprobs)
            return output

    async with served(Nan()) as (http, _):
        with_logprobs = {"token_ids": [1], "sampling_params": {"logprobs": 0}}
        answer = await http.post(GENERATE, json=with_logprobs)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "Out of range float values are not JSON compliant"
        assert (await http.post(GENERATE, json={"token_ids": [1], "sampling_params": {}})).status_code == 200


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model with a one-character-a-token vocabulary."""
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    vocabulary = {"<pad>": 0, "<end>": 1, **{chr(97 + index): 2 + index for index in range(26)}, "<unk>": 28}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>", "<unk>"])
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if shout %}zz{% endif %}"
        "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{% if add_generation_prompt %}q{% endif %}"
    )
    settings = {"eos_token": "<end>", "pad_token": {"content": "<pad>"}, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@asynccontextmanager
async def with_text(directory):
    async with served(TorchPolicy(directory), text=Text(directory)) as pair:
        yield pair


@in_loop
async def test_completions(directory):
    async with with_text(directory) as (http, _):
        body = {"prompt": "abc", "max_tokens": 6, "seed": 3, "logprobs": 2, "return_token_ids": True, "n": 2}
        answer = (await http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})).json()
        assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-mine", "text_completion", "m")
        first, second = answer["choices"]
        assert first["prompt_token_ids"] == [2, 3, 4]
        assert [first["index"], second["index"]] == [0, 1]
        assert first["token_ids"] != second["token_ids"]
        logprobs = first["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(first["token_ids"])
        for top, token, logprob in zip(
            logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"], strict=True
        ):
            assert top[token] == logprob
        assert answer["usage"]["prompt_tokens"] == 3
        ids = {**body, "prompt": [2, 3, 4]}
        again = (await http.post("/v1/completions", json=ids)).json()
        assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in answer["choices"]]
        several = {"prompt": ["ab", [3, 4]], "max_tokens": 1}
        assert len((await http.post("/v1/completions", json=several)).json()["choices"]) == 2


@in_loop
async def test_stop_strings_over_http(directory):
    async with with_text(directory) as (http, _):
        body = {"prompt": "abc", "max_tokens": 20, "seed": 3, "ignore_eos": True}
        free = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        stop = free[4:6]
        cut = (await http.post("/v1/completions", json={**body, "stop": stop})).json()["choices"][0]
        assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (
            free[: free.find(stop)],
            "stop",
            stop,
        )
        answer = await http.post("/v1/completions", json={**body, "stop": ["a", ""]})
        assert answer.json() == failed(400, "stop cannot contain an empty string.", None, "BadRequestError")


@in_loop
async def test_chat(directory):
    async with with_text(directory) as (http, _):
        body = {
            "messages": [{"role": "user", "content": "abc"}],
            "max_tokens": 4,
            "seed": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "chat_template_kwargs": {"shout": True},
        }
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["prompt_token_ids"] == Text(directory).encode("abczzq")
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant"
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
        refused = {"messages": [{"role": "tool", "content": "abc"}]}
        answer = await http.post("/v1/chat/completions", json=refused)
        assert (answer.status_code, "no tools here" in answer.text) == (400, True)
        assert (await http.post("/v1/chat/completions", json={})).json()["error"]["param"] == "body.messages"


@in_loop
async def test_text_needs_a_tokenizer():
    async with served() as (http, _):
        answer = await http.post("/v1/completions", json={"prompt": "abc"})
        assert answer.json() == failed(
            400, "this engine has no tokenizer; send token ids", None, "BadRequestError"
        )
        assert (await http.post("/v1/completions", json={"prompt": [1, 2]})).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": {}})).status_code == 400
        assert (await http.post("/v1/completions", json={"prompt": [1], "n": 0})).status_code == 400


@in_loop
async def test_a_paused_engine_answers_everything_but_generation():
    async with served() as (http, _):
        running_one = asyncio.create_task(http.post(GENERATE, json={"token_ids": [1], "sampling_params": {}}))
        await http.post("/pause?mode=keep")
        late = asyncio.create_task(http.post(GENERATE, json={"token_ids": [1], "sampling_params": {}}))
        await turns()
        assert not late.done()
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        scores = await http.post("/grpo_lab/score", json={"sequences": [[1, 2, 3], [4, 5]]})
        assert [len(row) for row in scores.json()["logprobs"]] == [2, 1]
        assert "vllm:num_requests_waiting" in (await http.get("/metrics")).text
        await http.post("/resume")
        assert (await late).status_code == (await running_one).status_code == 200


@in_loop
async def test_abort_over_http_returns_partial_tokens():
    async with served() as (http, core):
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
        request = asyncio.create_task(http.post(GENERATE, json=body, headers={"x-request-id": "a"}))
        await steps(core, 5)
        await http.post("/abort_requests", json={"request_ids": ["generate-tokens-a"]})
        choice = (await request).json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) >= 4


LONG = {"max_tokens": 4000, "ignore_eos": True}
JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        (GENERATE, {"token_ids": [1], "sampling_params": LONG}),
        ("/v1/completions", {"prompt": [1], "n": 3, **LONG}),
    ],
)
@in_loop
async def test_a_client_that_disconnects_frees_its_requests(path, request_body):
    async with served() as (_, core):
        app = create_app(core, receivers={})
        body = json.dumps(request_body)
        messages = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body.encode(), "more_body": False})
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [JSON], "query_string": b""}
        scope |= {
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "server": ("x", 1),
            "client": ("y", 2),
        }
        call = asyncio.create_task(app(scope, messages.get, send))
        await steps(core, 3)
        messages.put_nowait({"type": "http.disconnect"})
        await call
        await turns()
        assert sent[0]["status"] == 499
        assert core.scheduler.pool.num_used == 0
        assert not core.scheduler.has_work


@in_loop
async def test_a_key_guards_everything_but_health():
    async with served(api_key="secret") as (http, _):
        assert (await http.get("/health")).status_code == 200
        for path in ("/v1/models", "/weight_info", "/grpo_lab/capabilities"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
            assert (await http.get(path, headers={"authorization": "Bearer wrong"})).status_code == 401
            assert (await http.get(path, headers={"authorization": "Bearer secret"})).status_code == 200


@in_loop
async def test_rl_routes_can_be_off():
    async with served(rl_routes=False) as (http, _):
        for path in ("/pause", "/update_weights", "/grpo_lab/score"):
            assert (await http.post(path)).status_code == 404
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"


@in_loop
async def test_metrics_count():
    async with served() as (http, core):
        for name in "ab":
            await core.wait(core.submit([1, 2, 3], sampling(5), name))
        lines = dict(
            line.rsplit(" ", 1) for line in (await http.get("/metrics")).text.splitlines() if line[0] != "#"
        )
        labels = '{engine="0",model_name="m"}'
        assert lines[f"vllm:generation_tokens_total{labels}"] == "10.0"
        assert lines[f"vllm:prompt_tokens_total{labels}"] == "6.0"
        assert (
            lines['vllm:request_success_total{engine="0",model_name="m",finished_reason="length"}'] == "2.0"
        )


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"prompt": ' + b"9" * 5000 + b"}", 400, "JSON decode error"),
        (b'{"prompt": "' + b"1" * MAX_BODY_BYTES + b'"}', 413, f"larger than {MAX_BODY_BYTES} bytes"),
        (b'{"prompt": "\\ud800"}', 400, "surrogates not allowed"),
        (b'{"prompt": "' + b"1" * 2_000_000 + b'"}', 400, "your prompt contains 2000000 characters"),
    ],
    ids=["digits", "too large", "half a character", "too long to tokenize"],
)
@in_loop
async def test_hostile_bodies_cost_the_client_alone(directory, body, status, words):
    async with served(text=Text(directory)) as (client, _):
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]


@in_loop
async def test_a_body_without_a_length_is_limited_too():
    async def chunks():
        for _ in range(MAX_BODY_BYTES // 65_536 + 1):
            yield b" " * 65_536

    async with served() as (client, _):
        headers = {"content-type": "application/json"}
        answer = await client.post(GENERATE, content=chunks(), headers=headers)
        assert answer.status_code == 413
