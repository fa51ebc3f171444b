"""A load, and the fit: what a simulated engine was given is found again from what its clients saw."""

import asyncio
import contextlib
import json

import httpx
import pytest

from grpo_lab.engine.latency import LatencyModel
from grpo_lab.errors import ConfigError, EngineError, EngineRefused
from grpo_lab.harness.latency_fit import fit, predict
from grpo_lab.harness.load import Load, apply, connection

TRUE = LatencyModel(base_s=0.004, prefill_token_s=2e-5, sequence_s=3e-4, context_token_s=2e-7)


def loads(concurrencies):
    return [Load(c, 3 * c, prompt, tokens) for c in concurrencies for prompt, tokens in ((8, 40), (120, 20))]


def test_a_latency_is_found_again_and_predicts_other_loads():
    fitted = fit([predict(TRUE, load) for load in loads((2, 4, 16, 24))])
    assert max(map(abs, fitted.errors)) < 0.01
    for load in loads((1, 8, 32)):
        assert predict(fitted.model, load).tokens_per_s == pytest.approx(
            predict(TRUE, load).tokens_per_s, rel=0.02
        )


def test_what_a_client_sees_is_what_the_engine_takes():
    """One request at a time: no waiting, a step a token."""
    seen = predict(LatencyModel(base_s=0.01), Load(1, 4, 8, 10))
    assert seen.seconds == pytest.approx(4 * 10 * 0.01)
    assert seen.tokens_per_s == pytest.approx(100)
    assert seen.tpot_s == pytest.approx(0.01)
    assert seen.ttft_s == pytest.approx(0.01)


def test_more_clients_than_slots_wait():
    model = LatencyModel(base_s=0.01)
    few, many = predict(model, Load(8, 32, 8, 10), 4), predict(model, Load(4, 32, 8, 10), 4)
    assert few.tokens_per_s == pytest.approx(many.tokens_per_s, rel=0.05)
    assert few.ttft_s > 2 * many.ttft_s


def test_too_few_loads_are_refused():
    with pytest.raises(ConfigError, match="at least three different ones"):
        fit([predict(TRUE, Load(2, 4))] * 5)


def test_a_refusal_ends_the_load():
    def refuse(request):
        return (
            httpx.Response(200, text="") if request.url.path == "/metrics" else httpx.Response(500, text="no")
        )

    async def run():
        async with httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://engine") as http:
            await apply(http, "m", Load(2, 4))

    with pytest.raises(EngineRefused, match="request 0: no"):
        asyncio.run(run())


def test_prompts_all_differ():
    seen = set()

    def answer(request):
        if request.url.path == "/metrics":
            return httpx.Response(200, text="")
        seen.add(tuple(json.loads(request.content)["prompt"]))
        return httpx.Response(200, json={"usage": {"completion_tokens": 64}})

    async def run():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://engine") as http:
            await apply(http, "m", Load(8, 400))

    asyncio.run(run())
    assert len(seen) == 400


@pytest.mark.parametrize(
    ("head", "status", "error"),
    [
        ("200 OK\r\nContent-Length: {n}", 200, None),
        ("503 Service Unavailable\r\ncontent-length: {n}\r\nx: y", 503, None),
        ("200 OK\r\ntransfer-encoding: chunked", 0, EngineError),
    ],
)
def test_a_connection_posts_and_is_kept(head, status, error):
    answer = '{"usage": {"completion_tokens": 4}}'
    asked, peers = [], set()

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(request.partition("content-length: ")[2].partition("\r\n")[0])
                asked.append((request.partition("\r\n")[0], json.loads(await reader.readexactly(length))))
                peers.add(writer.get_extra_info("peername"))
                writer.write(f"HTTP/1.1 {head.format(n=len(answer))}\r\n\r\n{answer}".encode())
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with asyncio.timeout(30), server:
            port = server.sockets[0].getsockname()[1]
            async with connection(f"http://127.0.0.1:{port}") as post:
                return [await post({"number": number}) for number in range(2)]

    if error:
        with pytest.raises(error, match="without its length"):
            asyncio.run(run())
        return
    assert asyncio.run(run()) == [(status, answer)] * 2
    assert asked == [("POST /v1/completions HTTP/1.1", {"number": number}) for number in range(2)]
    assert len(peers) == 1
