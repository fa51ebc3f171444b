"""An httpx transport into an ASGI app in the same process that hands over each piece as it is sent.

``httpx.ASGITransport`` gives the body only when it is whole, and says nothing when a client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx


class StreamingAsgiTransport(httpx.AsyncBaseTransport):
    """``timeout`` of a request bounds the time to its head and to each piece of its body."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        limit_s = request.extensions.get("timeout", {}).get("read")
        exchange = _Exchange(await request.aread(), limit_s)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(key.lower(), value) for key, value in request.headers.raw],
            "scheme": "http",
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "server": ("engine", 80),
            "client": ("127.0.0.1", 1),
            "root_path": "",
        }
        exchange.serve(self._app(scope, exchange.receive, exchange.send))
        try:
            head = await exchange.next_message()
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(head["status"], headers=head.get("headers", ()), stream=exchange)


class _Exchange(httpx.AsyncByteStream):
    def __init__(self, body: bytes, limit_s: float | None) -> None:
        self._body: bytes | None = body
        self._limit_s = limit_s
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def serve(self, work: Any) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._messages.put_nowait(error or httpx.RemoteProtocolError("the app ended its answer early"))

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self._messages.put_nowait(message)

    async def next_message(self) -> Any:
        try:
            async with asyncio.timeout(self._limit_s):
                message = await self._messages.get()
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"nothing within {self._limit_s} s") from error
        if isinstance(message, BaseException):
            raise message
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self.next_message()
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]

    async def aclose(self) -> None:
        """The client has gone: the app is told, and given a bounded time to end."""
        self._gone.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=5)
            self._task.cancel()
