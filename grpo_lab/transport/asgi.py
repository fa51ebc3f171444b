"""An httpx transport into an ASGI app in this process: no sockets, threads or clocks but the loop's.

``httpx.ASGITransport`` hands over a body only when it is whole, and says nothing to the app when a client
goes away. This one hands over each piece as it is sent, so streams and pauses within them can be simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx

Message = MutableMapping[str, Any]
App = Callable[..., Awaitable[None]]
GOODBYE_S = 5.0  # within which an app ends a request whose client has gone


class AsgiTransport(httpx.AsyncBaseTransport):
    """A request's ``read`` time-out bounds the wait for its head and for each piece of its body.

    A response that is closed early, or a cancelled request, is a client that has gone: the app is told so.
    """

    def __init__(self, app: App, client: str = "127.0.0.1") -> None:
        self._app, self._client = app, client

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ``httpx.ReadTimeout``, or ``RemoteProtocolError`` for an app that ends without an answer."""
        limit_s = request.extensions.get("timeout", {}).get("read")
        exchange = _Exchange(self._app, self._scope(request), await request.aread(), limit_s)
        try:
            head = await exchange.next_message()
            if head["type"] != "http.response.start":
                raise httpx.RemoteProtocolError(f"the app began its answer with {head['type']}")
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(head["status"], headers=head.get("headers", ()), stream=exchange)

    def _scope(self, request: httpx.Request) -> dict[str, Any]:
        url = request.url
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0],
            "query_string": url.query,
            "root_path": "",
            "server": (url.host, url.port or 80),
            "client": (self._client, 1),
        }


class _Exchange(httpx.AsyncByteStream):
    """One request in the app, and its answer as it comes."""

    def __init__(self, app: App, scope: dict[str, Any], body: bytes, limit_s: float | None) -> None:
        self._body: bytes | None = body
        self._limit_s = limit_s
        self._messages: asyncio.Queue[Message | BaseException] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._messages.put_nowait(error or httpx.RemoteProtocolError("the app ended before its answer did"))

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._messages.put_nowait(message)

    async def next_message(self) -> Message:
        try:
            async with asyncio.timeout(self._limit_s):
                message = await self._messages.get()
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"the app said nothing within {self._limit_s} s") from error
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
        self._gone.set()
        if self._task.done():
            return
        try:
            async with asyncio.timeout(GOODBYE_S):
                await asyncio.shield(asyncio.gather(self._task, return_exceptions=True))
        except TimeoutError:
            self._task.cancel()
