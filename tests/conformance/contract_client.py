"""The suite's HTTP client: one call, or one generation that is watched while it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

WAIT_S = 150.0
ROUTES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "tokens": "/inference/v1/generate",
}


@dataclass
class Generation:
    """One request for tokens. Everything it has said so far; ``task`` ends with it.

    Attributes:
        first_s: seconds from the request to its first token, None before.
        chunks: the data events of a stream, parsed, without ``[DONE]``.
    """

    route: str
    stream: bool
    status: int = 0
    body: Any = None
    text: str = ""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    weight_versions: list[dict[str, Any]] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    done_seen: bool = False
    content_type: str = ""
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.task is not None and self.task.done()

    async def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not ready():
                if self.ended and not ready():
                    raise AssertionError(
                        f"ended ({self.status}, {self.finish_reason}) after {len(self.token_ids)} tokens, "
                        f"before {what}"
                    )
                self._changed.clear()
                await self._changed.wait()

    async def wait_ended(self) -> None:
        assert self.task is not None
        async with asyncio.timeout(WAIT_S):
            await self.task

    async def run(self, http: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            path = ROUTES[self.route]
            if self.stream:
                async with http.stream("POST", path, json=body, headers=headers) as response:
                    self._begin(response)
                    await self._read_stream(response)
            else:
                response = await http.post(path, json=body, headers=headers)
                self._begin(response)
                self.text, self.body = response.text, response.json()
                if response.status_code == 200:
                    self._take(self.body)
        finally:
            self._changed.set()

    def _begin(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.content_type = response.headers.get("content-type", "")
        self._changed.set()

    async def _read_stream(self, response: httpx.Response) -> None:
        async for data in events_of(response):
            if data == "[DONE]":
                self.done_seen = True
            else:
                chunk = json.loads(data)
                self.chunks.append(chunk)
                if "error" in chunk:
                    self.errors.append(chunk["error"])
                self._take(chunk)
            self._changed.set()

    def _take(self, data: dict[str, Any]) -> None:
        self.usage = data.get("usage") or self.usage
        for choice in data.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            self.token_ids += choice.get("token_ids") or ()
            self.logprobs += self._logprobs(choice.get("logprobs") or {})
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.weight_versions = choice.get("weight_versions") or self.weight_versions

    @staticmethod
    def _logprobs(logprobs: dict[str, Any]) -> list[float]:
        if "token_logprobs" in logprobs:
            return list(logprobs["token_logprobs"])
        return [item["logprob"] for item in logprobs.get("content") or ()]


async def events_of(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    lines: list[str] = []
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            lines.append(line.removeprefix("data:").strip())
        elif not line and lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def generation_body(
    route: str, prompt: list[int], max_tokens: int, stream: bool, more: dict[str, Any]
) -> dict[str, Any]:
    """A greedy request for exactly ``max_tokens`` tokens with logprobs; ``more`` goes on top."""
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    if route == "tokens":
        sampling["logprobs"] = 0
        sampling.update(more.pop("sampling_params", {}))
        body = {"token_ids": prompt, "sampling_params": sampling}
    elif route == "chat":
        body = {"messages": [{"role": "user", "content": "12+3="}], **sampling, "return_token_ids": True}
        body["logprobs"] = True
    else:
        body = {"prompt": prompt, **sampling, "logprobs": 0, "return_token_ids": True}
    if stream:
        body["stream"] = True
        if route != "tokens":
            body["stream_options"] = {"include_usage": True}
    body.update(more)
    return {key: value for key, value in body.items() if value != "-"}  # "-" leaves a field out
