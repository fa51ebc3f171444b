"""The engine's HTTP client: against our app in process, and against servers that misbehave."""

import asyncio
import dataclasses
import time
from contextlib import asynccontextmanager

import httpx
import pytest
from engine_kit import FakeReceiver, events_of, in_loop, init_info, pack, running, turns, update_info

from grpo_lab.engine.app import create_app
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.errors import ConfigError, EngineError, EngineRefused, EngineTimeout, EngineUnreachable
from grpo_lab.recorders import ListRecorder
from grpo_lab.transport.vllm_http import HttpTimeouts, VllmHttpEngine
from grpo_lab.types import EngineCapabilities, GenerateRequest, SamplingParams, SyncId, VersionSpan

SHAPES = {"a": (30, 30), "b": (5,)}
SYNC = SyncId(2, 1)
REQUEST = GenerateRequest("r1", (1, 2, 3), SamplingParams(max_tokens=5, ignore_eos=True, seed=4), term=2)
EVALUATION = dataclasses.replace(REQUEST, kind="evaluation")


@asynccontextmanager
async def engine_and_client(recorder=None):
    receiver = FakeReceiver()
    async with running(SyntheticPolicy(shapes=SHAPES)) as core:
        app = create_app(core, receivers={"fake": lambda: receiver})
        trainer = recorder or ListRecorder("trainer", time.monotonic)
        client = VllmHttpEngine("engine-0", "http://engine", trainer, transport=httpx.ASGITransport(app))
        await client.discover()
        try:
            yield client, core, receiver
        finally:
            await client.close()


@in_loop
async def test_our_engine_says_what_it_can():
    async with engine_and_client() as (client, _, _receiver):
        assert client.capabilities == EngineCapabilities(True, True, True, True, True, True)
        assert client.seen_term == 0
        await client.resume(7)
        await client.discover()
        assert client.seen_term == 7
        assert client.model == "model"
        await client.health()
        assert await client.world_size() == 1


@in_loop
async def test_a_whole_sync_through_the_port():
    async with engine_and_client() as (client, core, receiver):
        before = await client.checksums()
        plan, receiver.buckets = pack({n: t + 1 for n, t in core.policy.parameters().items()})
        await client.pause("keep", True, SYNC.term)
        assert await client.is_paused()
        await client.init_transfer(init_info(plan), SYNC.term)
        await client.start_update(SYNC)
        await client.update(SYNC, update_info(SYNC, plan))
        await client.finish_update(SYNC)
        await client.finish_update(SYNC)
        assert await client.weight_info() == "t2.v1.a1"
        assert len(events_of(core, "weights_loaded")) == 1
        after = await client.checksums()
        assert all(after[name] != before[name] for name in after)
        assert [len(row) for row in await client.score([[1, 2, 3], [4]])] == [2, 0]
        await client.resume(SYNC.term)
        completion = await client.generate(REQUEST)
        assert completion.spans == (VersionSpan(2, 1, 0, 5, 1),)
        assert (len(completion.token_ids), len(completion.logprobs)) == (5, 5)
        assert (completion.request_id, completion.engine) == ("r1", "engine-0")
        await client.start_update(SyncId(2, 2))
        await client.abandon_update(SyncId(2, 2))
        with pytest.raises(EngineRefused, match="HTTP 409: term 1 is over") as caught:
            await client.resume(1)
        assert caught.value.status == 409


@in_loop
async def test_events_know_what_caused_them():
    trainer = ListRecorder("trainer", time.monotonic)
    async with engine_and_client(trainer) as (client, core, _):
        for index in range(3):
            trainer._next_seq = 10 + index  # as if the trainer had emitted
            await client.pause("keep", False, 1)
        assert core.recorder.records[-1].cause == ("trainer:11",)
        assert trainer._causes == {"engine-0": core.recorder.next_seq - 1}


@in_loop
async def test_before_the_first_sync_other_requests_are_version_0_and_rollouts_are_refused():
    async with engine_and_client() as (client, _, _receiver):
        assert (await client.generate(EVALUATION)).spans == (VersionSpan(0, 0, 0, 5, 0),)
        with pytest.raises(EngineRefused, match="no synced weights yet") as refused:
            await client.generate(REQUEST)
        assert refused.value.status == 503


@in_loop
async def test_abort_frees_requests_and_an_empty_list_aborts_nothing():
    async with engine_and_client() as (client, _, _receiver):
        await client.pause("keep", True, 1)
        call = asyncio.create_task(client.generate(EVALUATION))
        await turns(50)
        await client.abort([])
        await turns()
        assert not call.done()
        await client.abort(["r1"])
        assert (await call).finish_reason == "abort"


def answering(handler):
    recorder = ListRecorder("trainer", time.monotonic)
    return VllmHttpEngine("engine-0", "http://engine", recorder, transport=httpx.MockTransport(handler))


@in_loop
async def test_a_stock_vllm_has_no_capabilities_and_no_spans():
    seen = []

    def stock(request):
        seen.append((request.method, request.url.path))
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/v1/completions":
            logprobs = {"token_logprobs": [-1.0, -2.0]}
            choice = {"index": 0, "token_ids": [4, 5], "logprobs": logprobs, "finish_reason": "length"}
            return httpx.Response(200, json={"choices": [choice]})
        return httpx.Response(404, json={"detail": "Not Found"})

    client = answering(stock)
    assert await client.discover() == EngineCapabilities()
    completion = await client.generate(REQUEST)
    assert (completion.token_ids, completion.logprobs, completion.spans) == ((4, 5), (-1.0, -2.0), ())
    with pytest.raises(EngineRefused) as caught:
        await client.abandon_update(SYNC)
    assert caught.value.status == 404


@in_loop
async def test_a_stock_vllm_with_the_token_route_reports_versions():
    def stock(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/inference/v1/generate":
            return httpx.Response(400, json={"error": {"message": "Field required"}})
        return httpx.Response(404, json={"detail": "Not Found"})

    client = answering(stock)
    assert await client.discover() == EngineCapabilities(token_versions=True)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(500, json={"error": {"message": "worker failed"}}), "HTTP 500: worker failed"),
        (httpx.Response(500, json={"error": "flat words"}), "HTTP 500: flat words"),
        (httpx.Response(502, text="<html>bad gateway</html>"), "HTTP 502: <html>bad gateway"),
        (httpx.Response(307, headers={"location": "/x"}), "HTTP 307"),
    ],
)
@in_loop
async def test_every_other_status_is_refused_with_the_servers_words(response, message):
    client = answering(lambda request: response)
    with pytest.raises(EngineRefused, match=message) as caught:
        await client.resume(1)
    assert caught.value.status == response.status_code


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'{"is_paused": "yes"}', b'{"weight_version": 3}', b"<html>"]
)
@in_loop
async def test_a_success_without_the_answer_is_an_error(body):
    client = answering(lambda request: httpx.Response(200, content=body))
    with pytest.raises(EngineError):
        await client.is_paused()
    with pytest.raises(EngineError):
        await client.weight_info()


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"token_ids": [1], "logprobs": None, "finish_reason": "stop"},
        {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "error"},
        {"token_ids": ["x"], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"},
    ],
)
@in_loop
async def test_completions_of_another_form_are_errors(choice):
    client = answering(lambda request: httpx.Response(200, json={"choices": [choice]}))
    with pytest.raises(EngineError, match="in another form"):
        await client.generate(REQUEST)


@asynccontextmanager
async def tcp_server(answer):
    """A server on a free port; ``answer(reader, writer)`` treats each connection."""
    tasks = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    limits = HttpTimeouts(connect_s=0.5, answer_s=0.3)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = VllmHttpEngine("engine-0", url, ListRecorder("trainer", time.monotonic), limits)
    try:
        yield client, server
    finally:
        await client.close()
        for task in tasks:
            task.cancel()
        server.close()


async def read_request(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = [line for line in head.split("\r\n") if line.lower().startswith("content-length")]
    body = await reader.readexactly(int(length[0].split(":")[1])) if length else b""
    return head, body


@in_loop
async def test_a_server_that_does_not_answer_is_a_timeout_and_sees_the_connection_close():
    closed = asyncio.Event()

    async def silent(reader, writer):
        await read_request(reader)
        assert await reader.read() == b""
        closed.set()

    async with tcp_server(silent) as (client, _):
        with pytest.raises(EngineTimeout, match=r"POST /resume of engine-0 .* no answer within 0\.3 s"):
            await client.resume(1)
        await asyncio.wait_for(closed.wait(), 5)


@in_loop
async def test_nobody_listening_is_unreachable():
    async with tcp_server(lambda reader, writer: None) as (client, server):
        server.close()
        await server.wait_closed()
        with pytest.raises(EngineUnreachable, match="GET /health of engine-0"):
            await client.health()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort", b"SSH-2.0\r\n\r\n"]
)
@in_loop
async def test_a_connection_that_breaks_is_unreachable(answer):
    async def breaks(reader, writer):
        await read_request(reader)
        writer.write(answer)
        await writer.drain()

    async with tcp_server(breaks) as (client, _):
        with pytest.raises(EngineUnreachable, match="POST /resume"):
            await client.resume(1)


@in_loop
async def test_connections_are_kept_and_bodies_come_in_every_form():
    connections = 0
    forms = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n" + b'{"is_paused": true}',
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        b'9;x=1\r\n{"is_paus\r\na\r\ned": true}\r\n0\r\ntrailer: x\r\n\r\n',
        b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 19\r\n\r\n"
        + b'{"is_paused": true}',
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b'{"is_paused": true}',
    ]

    async def answers(reader, writer):
        nonlocal connections
        connections += 1
        for form in forms:
            await read_request(reader)
            writer.write(form)
            await writer.drain()

    async with tcp_server(answers) as (client, _):
        for _ in range(2 * len(forms)):
            assert await client.is_paused() is True
        assert connections == 2


@in_loop
async def test_a_connection_that_the_server_closed_is_not_used_again():
    async def once(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 19\r\n\r\n" + b'{"is_paused": true}')
        await writer.drain()

    async with tcp_server(once) as (client, _):
        for _ in range(3):
            assert await client.is_paused() is True
            await asyncio.sleep(0.02)


@in_loop
async def test_a_cancelled_request_closes_its_connection():
    closed = asyncio.Event()

    async def silent(reader, writer):
        await read_request(reader)
        await reader.read()
        closed.set()

    async with tcp_server(silent) as (client, _):
        call = asyncio.create_task(client.resume(1))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.wait_for(closed.wait(), 5)


def test_bad_settings_are_config_errors():
    with pytest.raises(ConfigError, match="engine url"):
        VllmHttpEngine("e", "127.0.0.1:8000", ListRecorder("t", time.monotonic))
    with pytest.raises(ConfigError, match="connect_s=0"):
        HttpTimeouts(connect_s=0)


@in_loop
async def test_a_connection_is_not_used_again_after_a_servers_error():
    """uvicorn closes it behind a 500, unannounced: the next request would find it closed under way."""
    connections = 0

    async def fails(reader, writer):
        nonlocal connections
        connections += 1
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()

    async with tcp_server(fails) as (client, _):
        for _ in range(3):
            with pytest.raises(EngineRefused):
                await client.is_paused()
        assert connections == 3
