"""Steady load on a server, and what it answers: throughput from outside, times from its own /metrics.

The same driver measures a real vLLM, ``grpo-lab serve``, and a simulated engine in virtual time: it reads the
running loop's clock and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from textwrap import shorten
from urllib.parse import urlsplit

import httpx

from grpo_lab.errors import ConfigError, EngineError, EngineRefused
from grpo_lab.types import JsonDict

_TTFT, _ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class Load:
    """``requests`` requests of one shape, ``concurrency`` of them always in flight.

    Attributes:
        prompt_tokens: of each; all prompts differ, so that no prefix cache helps.
        completion_tokens: of each, exactly.
    """

    concurrency: int
    requests: int
    prompt_tokens: int = 16
    completion_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests", "prompt_tokens", "completion_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")

    @property
    def mean_context_tokens(self) -> float:
        """KV entries of a sequence at one of its decode steps, on average."""
        return self.prompt_tokens + (self.completion_tokens - 1) / 2


@dataclass(frozen=True, slots=True)
class Measured:
    """What a load saw. Times are means over requests; None where the server has no such metric."""

    concurrency: int
    prompt_tokens: int
    completion_tokens: int
    requests: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    ttft_s: float | None
    tpot_s: float | None


async def served_model(http: httpx.AsyncClient) -> str:
    """The name that requests must give. Raises ``EngineError``."""
    response = await http.get("/v1/models")
    try:
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
        said = shorten(response.text, 200)
        raise EngineError(
            f"{http.base_url}: /v1/models names no model: {said}. Give the address of a vLLM, or of "
            "grpo-lab serve"
        ) from error


ANSWER_S = 600.0  # bound of a connection that is opened and of an answer, as of an httpx client

Post = Callable[[JsonDict], Awaitable[tuple[int, str]]]
"""Sends a body to /v1/completions; the answer's status and text."""


@contextlib.asynccontextmanager
async def connection(url: str) -> AsyncIterator[Post]:
    """A connection of its own, kept open, that costs the machine as little as a client can.

    A client library takes as long for a request as a small model for several tokens, on the cores that the
    server needs.
    """
    address = urlsplit(url)
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)

    async def post(body: JsonDict) -> tuple[int, str]:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        async with asyncio.timeout(ANSWER_S):
            writer.write(head.encode() + content)
            status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            lengths = [int(text.partition(":")[2]) for text in fields if text.startswith("content-length:")]
            if len(lengths) != 1:
                raise EngineError(f"{url}: an answer without its length: {status}")
            return int(status.split()[1]), (await reader.readexactly(lengths[0])).decode()

    try:
        yield post
    finally:
        writer.close()


async def apply(
    http: httpx.AsyncClient,
    model: str,
    load: Load,
    vocabulary: int = 20,
    connect: Callable[[], contextlib.AbstractAsyncContextManager[Post]] | None = None,
) -> Measured:
    """Runs the load to its end, each client through what ``connect`` opens, or through ``http``.

    Raises:
        EngineRefused: an answer other than 200, or with another number of tokens.
    """
    before = await _times(http)
    clock = asyncio.get_running_loop().time
    numbers = iter(range(load.requests))

    async def client(post: Post) -> None:
        for number in numbers:
            await _one(post, model, load, number, vocabulary)

    async with contextlib.AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(connect() if connect else _shared(http))
            for _ in range(min(load.concurrency, load.requests))
        ]
        began_s = clock()
        await asyncio.gather(*map(client, opened))
        seconds = clock() - began_s
    after = await _times(http)
    return Measured(
        load.concurrency,
        load.prompt_tokens,
        load.completion_tokens,
        load.requests,
        seconds,
        load.requests * load.completion_tokens / seconds,
        load.requests / seconds,
        _mean(before, after, _TTFT),
        _mean(before, after, _ITL),
    )


@contextlib.asynccontextmanager
async def _shared(http: httpx.AsyncClient) -> AsyncIterator[Post]:
    async def post(body: JsonDict) -> tuple[int, str]:
        response = await http.post("/v1/completions", json=body)
        return response.status_code, response.text

    yield post


def completion_body(model: str, load: Load, number: int, vocabulary: int = 20) -> JsonDict:
    """Of request ``number``, for /v1/completions."""
    # The number's digits come first, so that no two prompts share a block; ids 0 to 2 are special.
    base = vocabulary - 3
    return {
        "model": model,
        "prompt": [3 + number // base**digit % base for digit in range(load.prompt_tokens)],
        "max_tokens": load.completion_tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": number,
    }


async def _one(post: Post, model: str, load: Load, number: int, vocabulary: int) -> None:
    status, text = await post(completion_body(model, load, number, vocabulary))
    if status != 200:
        raise EngineRefused(f"request {number}: {text[:300]}", status, text)
    tokens = json.loads(text)["usage"]["completion_tokens"]
    if tokens != load.completion_tokens:
        raise EngineRefused(f"request {number}: {tokens} tokens, not {load.completion_tokens}", 200, "")


async def _times(http: httpx.AsyncClient) -> dict[str, float]:
    """Sums and counts of the two histograms."""
    text = (await http.get("/metrics")).text
    rows = re.findall(rf"^vllm:({_TTFT}|{_ITL})_(sum|count)(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    found: dict[str, float] = {}
    for name, part, value in rows:
        key = f"{name}_{part}"
        found[key] = found.get(key, 0.0) + float(value)
    return found


def _mean(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    count = after.get(f"{name}_count", 0.0) - before.get(f"{name}_count", 0.0)
    if count <= 0:
        return None
    return (after[f"{name}_sum"] - before.get(f"{name}_sum", 0.0)) / count
