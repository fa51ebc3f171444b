"""The control channel: a stream socket that says which bucket lies where, and whose end is the peer's death.

Plain non-blocking sockets on the running loop: the kernel closes them when a process ends in whatever way,
so the other side knows at once, also after kill -9. A forked child of the dead would keep its sockets open;
so on one host the process itself is watched too (pidfd_open(2)).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator

from grpo_lab.errors import HandshakeError, PeerDied, TransportTimeout
from grpo_lab.transport import frames
from grpo_lab.types import JsonDict

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Channel:
    """Frames to and from one peer. Owns the socket; ``peer`` is its name in messages."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self.peer = peer
        self._users = 0
        self._closed = False
        self._peer_process: int | None = None  # a pidfd, readable when the process has ended

    @property
    def local_host(self) -> str:
        """The address by which the peer reaches this side."""
        return str(self._sock.getsockname()[0])

    async def send(self, frame: frames.Frame) -> None:
        """Raises ``PeerDied``. Never blocks for long: at most a ring of frames is under way."""
        await self._send_bytes(frame.encode())

    async def receive(self, timeout_s: float | None, what: str) -> frames.Frame:
        """The next frame. Raises ``PeerDied``, or ``TransportTimeout`` after ``timeout_s``.

        None is for listeners only, whose wait ends with the channel.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return frames.decode(await self._read(frames.FRAME_BYTES))
        except TimeoutError:
            raise TransportTimeout(f"{self.peer} did not send {what} within {timeout_s:g} s") from None

    async def send_greeting(self, greeting: JsonDict) -> None:
        await self._send_bytes(frames.encode_greeting(greeting))

    async def receive_greeting(self) -> JsonDict:
        """Bounded in size; the caller bounds the time. Raises ``HandshakeError`` or ``PeerDied``."""
        length = frames.greeting_length(await self._read(frames.LENGTH.size))
        return frames.decode_greeting(await self._read(length))

    def send_descriptor(self, fd: int) -> None:
        """Unix sockets only."""
        with self._using():
            socket.send_fds(self._sock, [b"F"], [fd])

    async def receive_descriptor(self) -> int:
        """Unix sockets only. The caller closes it and bounds the time."""
        with self._using():
            await _readable(self._sock)
            data, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        if not data:
            raise PeerDied(f"{self.peer} closed the connection")
        if len(fds) != 1:
            raise HandshakeError(f"{self.peer} sent no descriptor of the shared memory")
        return fds[0]

    def close(self) -> None:
        """Ends the connection; whoever waits on this channel gets ``PeerDied``.

        The descriptor itself is closed when the last waiter has left, so that its number is not taken by
        another socket while the loop still watches it.
        """
        self._closed = True
        with contextlib.suppress(OSError):  # never connected, or the peer was quicker
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._users:
            self._free()

    def watch_process(self) -> None:
        """Takes the end of the peer's process for the end of the connection. Unix sockets only.

        Where the process cannot be seen (another pid namespace), the socket's end must do.
        """
        with contextlib.suppress(OSError):
            self._peer_process = os.pidfd_open(_credentials_of(self._sock)[0])

    def _free(self) -> None:
        self._sock.close()
        if self._peer_process is not None:
            os.close(self._peer_process)
            self._peer_process = None

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Turns socket errors into ``PeerDied`` and keeps the descriptor alive."""
        self._users += 1
        try:
            yield
        except OSError as error:
            raise PeerDied(f"{self.peer} closed the connection: {error}") from error
        finally:
            self._users -= 1
            if self._closed and not self._users:
                self._free()

    @contextlib.contextmanager
    def _ending_with_process(self) -> Iterator[None]:
        """What the peer had sent before its end is still read."""
        if self._peer_process is None:
            yield
            return

        def end() -> None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

        loop, process = asyncio.get_running_loop(), self._peer_process
        loop.add_reader(process, end)
        try:
            yield
        finally:
            loop.remove_reader(process)

    async def _send_bytes(self, data: bytes) -> None:
        with self._using():
            await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def _read(self, nbytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < nbytes:
            with self._using(), self._ending_with_process():
                chunk = await loop.sock_recv(self._sock, nbytes - len(data))
            if not chunk:
                raise PeerDied(f"{self.peer} closed the connection: its process died, or gave up")
            data += chunk
        return data


async def connect(
    family: int, address: object, greeting: JsonDict, *, timeout_s: float, check_uid: bool
) -> Channel:
    """Connects to a sender, presents the token, and returns the channel once the sender has said yes.

    Raises ``HandshakeError`` (refused, or another user's process listens there), ``PeerDied`` (nobody
    listens) or ``TransportTimeout``.
    """
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    channel = Channel(sock, "the sender")
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, address)  # type: ignore[arg-type]
            if check_uid:
                require_same_user(sock)
                channel.watch_process()
            await channel.send_greeting(greeting)
            answer = await channel.receive_greeting()
    except TimeoutError:
        channel.close()
        raise TransportTimeout(f"the sender did not answer the greeting within {timeout_s:g} s") from None
    except OSError as error:
        channel.close()
        raise PeerDied(f"no sender listens on the control channel: {error}") from error
    except BaseException:
        channel.close()
        raise
    if answer.get("refused"):
        channel.close()
        raise HandshakeError(f"the sender refused this receiver: {str(answer['refused'])[:300]}")
    return channel


def require_same_user(sock: socket.socket) -> None:
    """The kernel's word for who is at the other end. Raises ``HandshakeError`` for another user."""
    pid, uid = _credentials_of(sock)
    if uid != os.geteuid():
        raise HandshakeError(f"process {pid} belongs to user {uid}; this transfer belongs to {os.geteuid()}")


def _credentials_of(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels and awaits them. They report their errors elsewhere, so nothing is lost here."""
    tasks = [task for task in tasks if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
