"""What a stock vLLM says about itself, release by release, and what the client makes of it."""

import time

import httpx
import pytest
from engine_kit import in_loop

from grpo_lab.errors import EngineError
from grpo_lab.recorders import ListRecorder
from grpo_lab.transport.vllm_features import OPENAPI_PATH, VllmFeatures, features_of
from grpo_lab.transport.vllm_http import VllmHttpEngine
from grpo_lab.types import GenerateRequest, SamplingParams, SyncId, VersionSpan

SYNC = SyncId(1, 2)
REQUEST = GenerateRequest("r1", (1, 2, 3), SamplingParams(max_tokens=2))


def openapi(*, mode=True, phases=4, tokens=True, pause=True):
    parameters = [{"name": "mode" if mode else "wait_for_inflight_requests"}, {"name": "clear_cache"}]
    paths = {"/v1/completions": {}, "/update_weights": {}}
    if pause:
        paths["/pause"] = {"post": {"parameters": parameters}}
    if phases == 4:
        paths |= {"/start_weight_update": {}, "/finish_weight_update": {}}
    if tokens:
        paths["/inference/v1/generate"] = {}
    return {"paths": paths}


class Stock:
    """A vLLM of some release; keeps what it was asked."""

    def __init__(self, description, versions=("default",)):
        self.description = description
        self.versions = list(versions)
        self.asked = []

    def __call__(self, request):
        path = request.url.path
        self.asked.append((path, dict(request.url.params)))
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if path == OPENAPI_PATH and self.description is not None:
            return httpx.Response(200, json=self.description)
        if path == "/weight_info":
            version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
            return httpx.Response(200, json={"weight_version": version})
        if path == "/v1/completions":
            rows = [None, {"5": {"logprob": -0.5}, "9": {"logprob": -0.1}}, {"6": {"logprob": -1.5}}]
            logprobs = {"token_logprobs": [-1.0, -2.0]}
            choice = {"token_ids": [4, 5], "logprobs": logprobs, "finish_reason": "length"}
            return httpx.Response(200, json={"choices": [{**choice, "prompt_logprobs": rows}]})
        if path in ("/pause", "/start_weight_update", "/finish_weight_update"):
            return httpx.Response(200, json={"status": "done"})
        return httpx.Response(404, json={"detail": "Not Found"})

    def client(self):
        recorder = ListRecorder("trainer", time.monotonic)
        return VllmHttpEngine("engine-0", "http://engine", recorder, transport=httpx.MockTransport(self))

    def paths(self):
        return [path for path, _ in self.asked]


def test_a_description_says_what_there_is():
    assert features_of(openapi()) == VllmFeatures(token_route=True)
    assert features_of(openapi(mode=False)).pause_modes is False
    assert features_of(openapi(phases=2)).four_phases is False
    assert features_of(openapi(tokens=False)).token_route is False
    assert features_of({"paths": {}}) == VllmFeatures()
    assert features_of(openapi(pause=False)) == VllmFeatures(token_route=True)  # its RL routes are off


@in_loop
async def test_the_newest_form_is_asked_for_by_mode():
    server = Stock(openapi())
    client = server.client()
    await client.discover()
    assert client.capabilities.token_versions
    await client.pause("keep", False, 1)
    assert ("/pause", {"mode": "keep", "clear_cache": "false"}) in server.asked


@in_loop
async def test_an_older_pause_has_no_keep():
    server = Stock(openapi(mode=False))
    client = server.client()
    await client.discover()
    await client.pause("wait", True, 1)
    assert ("/pause", {"wait_for_inflight_requests": "true", "clear_cache": "true"}) in server.asked
    with pytest.raises(EngineError, match="no mode 'keep'"):
        await client.pause("keep", True, 1)


@in_loop
async def test_an_update_of_two_phases_has_no_start_and_no_finish():
    server = Stock(openapi(phases=2))
    client = server.client()
    await client.discover()
    await client.start_update(SYNC)
    await client.finish_update(SYNC)
    assert not {"/start_weight_update", "/finish_weight_update"} & set(server.paths())


@in_loop
async def test_a_stock_vllm_scores_a_prompt():
    client = Stock(openapi()).client()
    await client.discover()
    assert await client.score([(3, 5, 6), (4, 5, 6)]) == [[-0.5, -1.5], [-0.5, -1.5]]
    with pytest.raises(EngineError, match="gave no logprobs of a prompt"):
        await client.score([(3, 7, 6)])


@pytest.mark.parametrize(
    ("versions", "spans", "source"),
    [
        (["t1.v2.a1"], (VersionSpan(1, 2, 0, 2),), "pause_windows"),
        (["default"], (VersionSpan(0, 0, 0, 2),), "pause_windows"),
        (["t1.v2.a1", "t1.v3.a1"], (), "engine"),  # it moved meanwhile: nobody knows at which token
        (["somebody's own"], (), "engine"),
    ],
)
@in_loop
async def test_without_token_versions_an_unmoved_version_tells_them(versions, spans, source):
    server = Stock(openapi(tokens=False), versions)
    client = server.client()
    await client.discover()
    completion = await client.generate(REQUEST)
    assert (completion.spans, completion.version_source) == (spans, source)
