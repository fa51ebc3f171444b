"""The in-process transport: streams piece by piece, time-outs, clients that go away."""

import asyncio

import httpx
import pytest
from engine_kit import in_loop

from grpo_lab.sim.simulation import run_simulation
from grpo_lab.transport.asgi import AsgiTransport


def client(app):
    return httpx.AsyncClient(transport=AsgiTransport(app), base_url="http://app", timeout=5)


async def start(send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1")]})


async def piece(send, body, more=True):
    await send({"type": "http.response.body", "body": body, "more_body": more})


@in_loop
async def test_each_piece_is_there_when_it_is_sent():
    gate = asyncio.Event()

    async def app(scope, receive, send):
        assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/a", b"b=1")
        assert (await receive())["body"] == b"hello"
        await start(send)
        await piece(send, b"one")
        await gate.wait()
        await piece(send, b"two", more=False)

    async with client(app) as http, http.stream("POST", "/a?b=1", content=b"hello") as response:
        assert response.headers["x-a"] == "1"
        pieces = response.aiter_raw()
        assert await anext(pieces) == b"one"
        gate.set()
        assert await anext(pieces) == b"two"


@in_loop
async def test_an_app_hears_that_its_client_has_gone():
    heard = asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        await start(send)
        await piece(send, b"one")
        assert (await receive())["type"] == "http.disconnect"
        heard.set()

    async with client(app) as http:
        async with http.stream("GET", "/") as response:
            await anext(response.aiter_raw())
        assert heard.is_set()


@in_loop
async def test_errors_of_an_app_reach_the_client():
    async def fails(scope, receive, send):
        raise ValueError("boom")

    async def says_nothing(scope, receive, send):
        pass

    async with client(fails) as http:
        with pytest.raises(ValueError, match="boom"):
            await http.get("/")
    async with client(says_nothing) as http:
        with pytest.raises(httpx.RemoteProtocolError, match="before its answer"):
            await http.get("/")


def test_a_time_out_runs_on_the_loops_clock():
    async def sleeps(scope, receive, send):
        await receive()
        await asyncio.sleep(3600)

    async def main(context):
        async with client(sleeps) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.get("/")
        return asyncio.get_running_loop().time()

    assert run_simulation(main) is not None
