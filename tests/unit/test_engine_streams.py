"""Streams and parameters of the generation routes, in process: what a vLLM 0.32 sends, chunk by chunk."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from engine_kit import in_loop, make_model, running, steps, turns
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from grpo_lab.engine.app import create_app
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.text import Text
from grpo_lab.engine.torch_policy import TorchPolicy
from grpo_lab.transport.asgi import AsgiTransport

COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@asynccontextmanager
async def served(policy=None, text=None, settings=None, **options):
    async with running(policy or SyntheticPolicy(), **(settings or {})) as core:
        app = create_app(core, receivers={}, model="m", text=text, **options)
        async with httpx.AsyncClient(transport=AsgiTransport(app), base_url="http://engine") as http:
            yield http, core


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model whose tokens are the letters a-z and three more."""
    path = tmp_path_factory.mktemp("model")
    make_model("qwen2").save_pretrained(path)
    vocabulary = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    vocabulary |= {"<eos>": 26, "_": 27, "?": 28}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


async def chunks(http, path, body, headers=None):
    """All events of a stream, parsed; "[DONE]" must be the last."""
    lines = []
    async with http.stream("POST", path, json=body, headers=headers or {}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                lines.append(line.removeprefix("data: "))
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def both(body):
    return {**body, "max_tokens": 7, "seed": 5, "ignore_eos": True, "return_token_ids": True}


@in_loop
async def test_a_completion_stream_says_what_the_whole_answer_says(directory):
    async with served(TorchPolicy(directory), Text(directory)) as (http, _):
        body = both({"prompt": "abc", "logprobs": 2})
        whole = (await http.post(COMPLETIONS, json=body)).json()["choices"][0]
        told = await chunks(http, COMPLETIONS, {**body, **USAGE})
        *pieces, last = told
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 3, "total_tokens": 10, "completion_tokens": 7}
        choices = [piece["choices"][0] for piece in pieces]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
        for field in ("token_logprobs", "tokens", "text_offset", "top_logprobs"):
            assert [v for choice in choices for v in choice["logprobs"][field]] == whole["logprobs"][field]
        assert [choice["prompt_token_ids"] for choice in choices] == [[0, 1, 2], *[None] * (len(choices) - 1)]
        assert [choice["finish_reason"] for choice in choices][-1] == "length"
        assert set(pieces[0]) == {"id", "object", "created", "model", "choices"}


@in_loop
async def test_a_chat_stream_begins_with_the_role(directory):
    async with served(TorchPolicy(directory), Text(directory)) as (http, _):
        body = both({"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 1})
        whole = (await http.post(CHAT, json=body)).json()
        first, *rest, last = await chunks(http, CHAT, {**body, **USAGE})
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert first["prompt_token_ids"] == whole["prompt_token_ids"] == [0, 1, 2]
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in rest)
        assert text == whole["choices"][0]["message"]["content"]
        assert last["usage"]["completion_tokens"] == 7
        assert rest[-1]["choices"][0]["finish_reason"] == "length"


@in_loop
async def test_a_token_stream_has_versions_on_its_last_chunk():
    async with served() as (http, _):
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5, "ignore_eos": True, "logprobs": 0}}
        told = await chunks(http, TOKENS, {**body, "stream": True}, {"x-request-id": "a"})
        assert {chunk["request_id"] for chunk in told} == {"generate-tokens-a"}
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in told) == 5
        spans = [chunk["choices"][0]["weight_versions"] for chunk in told]
        assert spans[:-1] == [None] * (len(told) - 1)
        assert spans[-1] == [{"version": "default", "start": 0, "end": 5, "kv_version": 0}]


@in_loop
async def test_a_stream_gives_headers_at_once_and_tokens_after_resume():
    async with served() as (http, _):
        await http.post("/pause?mode=keep")
        body = {"prompt": [1], "max_tokens": 3, "ignore_eos": True, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            first = asyncio.ensure_future(anext(response.aiter_lines()))
            await turns()
            assert not first.done()
            await http.post("/resume")
            assert (await first).startswith("data: ")


@in_loop
async def test_a_queued_stream_that_is_aborted_sends_its_usage_only():
    async with served() as (http, _):
        await http.post("/pause?mode=keep")
        told = asyncio.ensure_future(chunks(http, COMPLETIONS, {"prompt": [1], **USAGE}))
        whole = asyncio.ensure_future(http.post(COMPLETIONS, json={"prompt": [1], "return_token_ids": True}))
        await turns()
        await http.post("/pause?mode=abort")
        (only,) = await told
        assert (only["choices"], only["usage"]["completion_tokens"]) == ([], 0)
        choice = (await whole).json()["choices"][0]
        assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])


@in_loop
async def test_a_running_stream_that_is_aborted_says_so():
    async with served() as (http, core):
        body = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, **USAGE}
        told = asyncio.ensure_future(chunks(http, COMPLETIONS, body, {"x-request-id": "a"}))
        await steps(core, 4)
        for name in ("a", "cmpl-a"):  # neither is the id of a request: the count is of what was given
            answer = await http.post("/abort_requests", json={"request_ids": [name]})
            assert answer.json() == {"status": "aborted", "aborted": 1}
        await turns()
        assert not told.done()
        await http.post("/abort_requests", json={"request_ids": ["cmpl-a-0"]})
        *_, last, usage = await told
        assert last["choices"][0]["finish_reason"] == "abort"
        assert usage["usage"]["completion_tokens"] > 0


@in_loop
async def test_a_dead_engine_is_the_last_event_of_a_stream():
    class Dying(SyntheticPolicy):
        def step(self, scheduled):
            if scheduled[0].request.num_output_tokens == 3:
                raise RuntimeError("boom")
            return super().step(scheduled)

    async with served(Dying(), faithful=True, rl_routes=True) as (http, _):
        *_, last = await chunks(http, COMPLETIONS, {"prompt": [1], "ignore_eos": True, "stream": True})
        assert last["error"]["message"].startswith("EngineCore encountered an issue.")
        assert (await http.get("/health")).status_code == 503
        assert (
            (await http.get("/is_paused")).json()["error"].startswith("Failed to fetch pause status: Engine")
        )
        assert (await http.post("/resume")).json()["error"].startswith("Failed to resume generation: Engine")


@in_loop
async def test_a_stream_whose_client_goes_frees_its_request():
    async with served() as (http, core):
        body = {"prompt": [1], "n": 2, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            await anext(response.aiter_lines())
        await turns()
        assert not core.scheduler.has_work


@in_loop
async def test_samples_of_one_prompt_are_aborted_by_its_id():
    async with served() as (http, core):
        body = {"prompt": [1], "n": 3, "max_tokens": 4000, "ignore_eos": True}
        answer = asyncio.ensure_future(http.post(COMPLETIONS, json=body, headers={"x-request-id": "a"}))
        await steps(core, 3)
        await http.post("/abort_requests", json={"request_ids": ["cmpl-a-0"]})
        choices = (await answer).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort"] * 3


@in_loop
async def test_echo_and_prompt_logprobs(directory):
    policy = TorchPolicy(directory)
    async with served(policy, Text(directory)) as (http, core):
        body = {"prompt": "abcd", "max_tokens": 0, "echo": True, "logprobs": 1}
        choice = (await http.post(COMPLETIONS, json=body)).json()["choices"][0]
        assert choice["text"] == "abcd"
        expected = (await core.score([[0, 1, 2, 3]]))[0]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
        body = {"prompt": "abcd", "max_tokens": 2, "prompt_logprobs": 2, "ignore_eos": True}
        rows = (await http.post(COMPLETIONS, json=body)).json()["choices"][0]["prompt_logprobs"]
        assert rows[0] is None
        assert rows[1]["1"]["logprob"] == pytest.approx(expected[0], abs=1e-5)
        assert rows[1]["1"]["decoded_token"] == "b"
        assert {1, 2} <= {row["rank"] for row in rows[1].values()}


@in_loop
async def test_rules_change_what_is_drawn(directory):
    async with served(TorchPolicy(directory), Text(directory)) as (http, _):

        async def tokens(**more):
            body = {
                "prompt": "abc",
                "max_tokens": 12,
                "seed": 1,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = await http.post(COMPLETIONS, json=body | more)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["token_ids"]

        assert set(await tokens(logit_bias={"7": 100})) == {7}
        assert set(await tokens(allowed_token_ids=[3, 4])) <= {3, 4}
        assert len(set(await tokens(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0))) > 6
        assert await tokens(min_p=1.0) == await tokens(temperature=0.0)
        assert await tokens(repetition_penalty=1.0) == await tokens()


@in_loop
async def test_a_salt_parts_the_prefix_cache():
    async with served() as (http, core):
        body = {"prompt": list(range(1, 41)), "max_tokens": 1}
        for salt in ("a", "a", "b"):
            await http.post(COMPLETIONS, json={**body, "cache_salt": salt})
        assert core.counters.prefix_hits == 32


@in_loop
async def test_raw_logprobs_are_those_of_temperature_one(directory):
    body = {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 3, "temperature": 0.3, "seed": 1, "logprobs": 0},
    }
    async with served(TorchPolicy(directory), faithful=True) as (http, core):
        content = (await http.post(TOKENS, json=body)).json()["choices"][0]
        ids = [1, 2, 3, *content["token_ids"]]
        expected = (await core.score([ids]))[0][2:]
        assert [row["logprob"] for row in content["logprobs"]["content"]] == pytest.approx(expected, abs=1e-5)
        assert all(row["rank"] >= 1 for row in content["logprobs"]["content"])


# (fields, what is said, the parameter that is named, the value that is shown)
REFUSED = [
    ({"temperature": 2.5}, "temperature must be in [0, 2], got 2.5.", "temperature", "2.5"),
    ({"temperature": -1}, "temperature must be non-negative, got -1.0.", "temperature", "-1.0"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0.", "top_p", "0.0"),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2.", None, None),
    ({"min_p": 2}, "min_p must be in [0, 1], got 2.0.", None, None),
    ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0.", None, None),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0.", None, None),
    ({"n": 0}, "n must be at least 1, got 0.", None, None),
    ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2.", None, None),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0.", "max_tokens", "0"),
    (
        {"min_tokens": 9, "max_tokens": 2},
        "min_tokens must be less than or equal to max_tokens=2, got 9.",
        None,
        None,
    ),
    ({"logprobs": -2}, "`logprobs` must be a positive value or -1.", "logprobs", "-2"),
    (
        {"logprobs": 21},
        "Requested sample logprobs of 21, which is greater than max allowed: 20",
        "logprobs",
        "21",
    ),
    (
        {"stream_options": {"include_usage": True}},
        "Stream options can only be defined when `stream=True`.",
        "stream_options",
        None,
    ),
    (
        {"stream": True, "prompt_logprobs": 1},
        "`prompt_logprobs` are not available when `stream=True`.",
        "prompt_logprobs",
        None,
    ),
    ({"prompt": ""}, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt", None),
    (
        {"cache_salt": "a/b"},
        "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', "
        "'\\\\', or NUL.",
        "cache_salt",
        None,
    ),
    (
        {"stop_token_ids": [900]},
        "token_id(s) [900] in stop_token_ids contain out-of-vocab token ids. Vocabulary size: 256",
        "stop_token_ids",
        "[900]",
    ),
    (
        {"max_tokens": 5000},
        "max_tokens=5000 cannot be greater than max_model_len=4096. Please request fewer output tokens.",
        "max_tokens",
        "5000",
    ),
    (
        {"use_beam_search": True},
        "This engine does not offer beam search; leave 'use_beam_search' out",
        "use_beam_search",
        None,
    ),
    (
        {"response_format": {"type": "json_object"}},
        "This engine does not offer structured outputs",
        "response_format",
        None,
    ),
]


@pytest.mark.parametrize(
    ("fields", "message", "parameter", "value"), REFUSED, ids=[next(iter(row[0])) for row in REFUSED]
)
@in_loop
async def test_what_cannot_be_served_is_refused_in_vllms_words(fields, message, parameter, value):
    if parameter is not None:
        message += f" (parameter={parameter}" + (f", value={value})" if value is not None else ")")
    async with served() as (http, _):
        answer = await http.post(COMPLETIONS, json={"prompt": [1, 2], **fields})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error == {"message": message, "type": "BadRequestError", "param": parameter, "code": 400}


@in_loop
async def test_unknown_fields_are_ignored_as_in_vllm():
    async with served() as (http, _):
        body = {"prompt": [1], "max_tokens": "2", "best_of": 3, "guided_json": {}, "whatever": 1}
        assert (await http.post(COMPLETIONS, json=body)).json()["usage"]["completion_tokens"] <= 2


@in_loop
async def test_a_body_that_does_not_say_it_is_json_is_refused():
    async with served() as (http, _):
        for path in (COMPLETIONS, CHAT, TOKENS, "/tokenize"):
            answer = await http.post(path, content=b"{}", headers={"content-type": "text/plain"})
            assert answer.status_code == 400
            assert "Only 'application/json' is allowed" in answer.json()["error"]["message"]


@in_loop
async def test_text_routes(directory):
    async with served(TorchPolicy(directory), Text(directory)) as (http, _):
        answer = await http.post("/tokenize", json={"prompt": "abc", "return_token_strs": True})
        assert answer.json() == {
            "count": 3, "max_model_len": 128, "tokens": [0, 1, 2], "token_strs": ["a", "b", "c"],
        }  # fmt: skip
        answer = await http.post("/tokenize", json={"messages": [{"role": "user", "content": "cab"}]})
        assert answer.json()["tokens"] == [2, 0, 1]
        assert (await http.post("/detokenize", json={"tokens": [2, 0, 1]})).json() == {"prompt": "cab"}
        assert (await http.post("/detokenize", json={"tokens": [99]})).status_code == 400


@in_loop
async def test_sleep_and_wake_up():
    async with served() as (http, _):
        assert (await http.post("/sleep?level=1")).json() == {"status": "sleeping", "level": 1}
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert 'sleep_state="weights_offloaded"} 1.0' in (await http.get("/metrics")).text
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        part = (await http.post("/wake_up?tags=weights")).json()
        assert part == {"status": "sleeping", "tags": ["weights"]}
        assert (await http.post("/wake_up")).json() == {"status": "awake", "tags": None}
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await http.post("/sleep?level=3")).status_code == 400
        assert (await http.get("/load")).json() == {"server_load": 0}


@in_loop
async def test_a_prefix_cache_in_use_is_not_reset():
    async with served() as (http, core):
        body = {"prompt": [1] * 40, "max_tokens": 4000, "ignore_eos": True}
        request = asyncio.ensure_future(http.post(COMPLETIONS, json=body))
        await steps(core, 2)
        assert (await http.post("/reset_prefix_cache")).json() == {"success": False}
        again = "/reset_prefix_cache?reset_running_requests=true"
        assert (await http.post(again)).json() == {"success": True}
        await http.post("/abort_requests", json={})
        await request


@in_loop
async def test_histograms_count_finished_requests():
    async with served() as (http, _):
        await http.post(COMPLETIONS, json={"prompt": [1, 2], "max_tokens": 5, "ignore_eos": True})
        text = (await http.get("/metrics")).text
        labels = 'engine="0",model_name="m"'
        assert f"vllm:request_generation_tokens_sum{{{labels}}} 5.0" in text
        assert f'vllm:request_prompt_tokens_bucket{{{labels},le="2.0"}} 1.0' in text
        assert f"vllm:e2e_request_latency_seconds_count{{{labels}}} 1.0" in text
        assert f"vllm:inter_token_latency_seconds_count{{{labels}}} 4.0" in text


@in_loop
async def test_a_faithful_engine_has_no_route_of_ours_and_guards_what_vllm_guards():
    async with served(faithful=True, api_key="k", token_route=False) as (http, _):
        for path in ("/grpo_lab/capabilities", "/grpo_lab/score"):
            assert (await http.get(path)).status_code == 404
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/weight_info")).json() == {"weight_version": "default"}
        key = {"authorization": "bearer k"}
        assert (await http.post(TOKENS, json={}, headers=key)).status_code == 404
        answer = await http.get("/v1/models", headers=key)
        assert answer.json()["data"][0]["owned_by"] == "vllm"
        assert "x-grpo-lab-cause" not in answer.headers
