"""An HTTP/1.1 transport for httpx with a pool whose cost does not grow with its connections.

httpx's own pool looks at every open connection, with system calls, for each request: about 20 ms a
request at 64 connections here, against 0.1 ms for this one. A rollout worker holds hundreds.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass

import httpx

IDLE_S = 2.0  # servers (uvicorn, vLLM) close idle connections after 5 s: never race them
MAX_HEAD_BYTES = 1 << 18
MAX_IDLE = 512

Origin = tuple[str, str, int]


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since_s: float = 0.0

    def close(self) -> None:
        self.writer.close()


class KeepAliveTransport(httpx.AsyncBaseTransport):
    """One request at a time per connection, as many connections as there are requests.

    Of httpx's timeouts, ``connect`` bounds the connection and ``read`` the whole exchange after it. A
    request that is cancelled or fails closes its connection, so the server notices.
    """

    def __init__(self) -> None:
        self._idle: dict[Origin, deque[_Connection]] = {}
        self._busy: dict[int, _Connection] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ``httpx.ConnectTimeout``, ``ConnectError``, ``ReadTimeout`` or ``RemoteProtocolError``."""
        limits = request.extensions.get("timeout", {})
        url = request.url
        origin = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        body = await request.aread()
        connection = self._reuse(origin) or await self._open(request, origin, limits.get("connect"))
        self._busy[id(connection)] = connection
        reusable = False
        try:
            async with asyncio.timeout(limits.get("read")):
                connection.writer.write(_head(request) + body)
                await connection.writer.drain()
                response, keep = await _receive(connection.reader, request)
                # After a handler's exception, uvicorn closes the connection behind the answer, unannounced.
                reusable = keep and not response.is_server_error
        except TimeoutError as error:
            raise httpx.ReadTimeout("no answer in time", request=request) from error
        except asyncio.IncompleteReadError as error:
            raise httpx.RemoteProtocolError("the server closed the connection", request=request) from error
        except (OSError, ssl.SSLError) as error:
            raise httpx.ReadError(str(error) or type(error).__name__, request=request) from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise httpx.RemoteProtocolError(f"no HTTP/1.1 answer: {error}", request=request) from error
        finally:
            del self._busy[id(connection)]
            if reusable:
                self._keep(origin, connection)
            else:
                connection.close()
        return response

    async def aclose(self) -> None:
        """Closes every connection; requests under way fail."""
        idle, self._idle = self._idle, {}
        for connection in [*self._busy.values(), *(c for kept in idle.values() for c in kept)]:
            connection.close()

    def _reuse(self, origin: Origin) -> _Connection | None:
        """The most recently used idle connection that the server has not closed."""
        kept = self._idle.get(origin)
        now_s = asyncio.get_running_loop().time()
        while kept:
            connection = kept.pop()
            if now_s - connection.idle_since_s <= IDLE_S and not connection.reader.at_eof():
                return connection
            connection.close()
        return None

    def _keep(self, origin: Origin, connection: _Connection) -> None:
        connection.idle_since_s = asyncio.get_running_loop().time()
        kept = self._idle.setdefault(origin, deque())
        kept.append(connection)
        while kept and (len(kept) > MAX_IDLE or connection.idle_since_s - kept[0].idle_since_s > IDLE_S):
            kept.popleft().close()

    @staticmethod
    async def _open(request: httpx.Request, origin: Origin, timeout_s: float | None) -> _Connection:
        scheme, host, port = origin
        context = ssl.create_default_context() if scheme == "https" else None
        try:
            async with asyncio.timeout(timeout_s):
                streams = await asyncio.open_connection(host, port, ssl=context, limit=MAX_HEAD_BYTES)
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time", request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return _Connection(*streams)


def _head(request: httpx.Request) -> bytes:
    """Request line and headers; httpx has set host and content-length, and encodes header values."""
    lines = [b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    lines += [b"%s: %s" % (name, value) for name, value in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _receive(reader: asyncio.StreamReader, request: httpx.Request) -> tuple[httpx.Response, bool]:
    """The response, and whether the connection can carry another request."""
    status, headers = 100, httpx.Headers()
    while status < 200:  # 1xx answers only announce the real one
        version, status, headers = _parse_head(await reader.readuntil(b"\r\n\r\n"))
    keep = version == b"HTTP/1.1" and headers.get("connection", "").lower() != "close"
    if status in (204, 304) or request.method == "HEAD":
        body = b""
    elif headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader)
    elif (length := headers.get("content-length")) is not None:
        body = await reader.readexactly(int(length))
    else:
        body, keep = await reader.read(), False
    stream = httpx.ByteStream(body)  # a stream, so that httpx undoes a content-encoding
    return httpx.Response(status, headers=headers, stream=stream, request=request), keep


def _parse_head(head: bytes) -> tuple[bytes, int, httpx.Headers]:
    first, *lines = head[:-4].split(b"\r\n")
    version, status, *_ = first.split(b" ", 2)
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"status line {first[:80]!r}")
    pairs = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise ValueError(f"header line {line[:80]!r}")
        pairs.append((name, value.strip()))
    return version, int(status), httpx.Headers(pairs)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
    return b"".join(parts)
