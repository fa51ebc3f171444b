"""The sender's end of all control channels: lets members in, keeps strangers out, listens for releases."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Sequence

from grpo_lab.errors import GrpoLabError, HandshakeError, TransportError
from grpo_lab.transport import frames
from grpo_lab.transport.board import SlotBoard
from grpo_lab.transport.channel import Channel, cancel_all, require_same_user
from grpo_lab.types import JsonDict

GREETING_TIMEOUT_S = 5.0  # a stranger that connects and says nothing holds a socket no longer than this


class ControlServer:
    """Accepts each member once, by token (and by user where the socket tells it).

    A stranger is refused and noted in ``refusals``; it cannot disturb the session. What goes wrong with a
    member that was let in fails the board, so a death is known at once, also between two syncs.

    Args:
        listener: a listening socket, owned from here on.
        descriptor: handed to every member after the greeting (unix sockets only).
    """

    def __init__(
        self,
        listener: socket.socket,
        members: Sequence[str],
        board: SlotBoard,
        descriptor: int | None = None,
    ) -> None:
        listener.setblocking(False)
        self.token = secrets.token_hex(16)
        self.refusals: list[str] = []
        self.channels: dict[str, Channel] = {}
        self._listener = listener
        self._members = tuple(members)
        self._board = board
        self._descriptor = descriptor
        self._tasks = [asyncio.create_task(self._accept(), name="weight transport: accept")]

    @property
    def missing(self) -> list[str]:
        return [member for member in self._members if member not in self.channels]

    async def wait_joined(self, timeout_s: float) -> None:
        """Raises ``TransportTimeout`` naming who is missing, or ``PeerDied`` for who has gone again."""
        await self._board.wait_until(lambda: not self.missing, timeout_s, self._blame)

    async def tell(self, frame: frames.Frame) -> None:
        """Sends the frame to every member. Raises ``PeerDied``."""
        for member in self._members:
            await self.channels[member].send(frame)

    async def close(self) -> None:
        """Members see the end of their channel. Atomic: sockets are closed even when this is cancelled."""
        tasks, self._tasks = self._tasks, []
        try:
            await cancel_all(tasks)
        finally:
            self._listener.close()
            for channel in self.channels.values():
                channel.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self._board.fail(TransportError(f"the control channel cannot accept connections: {error}"))
                return
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(asyncio.create_task(self._serve(sock), name="weight transport: member"))

    async def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock, "a stranger")
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                await self._greet(channel, sock)
        except (GrpoLabError, TimeoutError) as error:
            self.refusals.append(str(error) or f"a stranger sent no greeting within {GREETING_TIMEOUT_S:g} s")
            channel.close()
            return
        except BaseException:
            channel.close()
            raise
        self.channels[channel.peer] = channel
        self._board.notify()
        await self._listen(channel)

    async def _greet(self, channel: Channel, sock: socket.socket) -> None:
        try:
            greeting = await channel.receive_greeting()
            if sock.family == socket.AF_UNIX:
                require_same_user(sock)
                channel.watch_process()
            member = self._recognise(greeting)
        except HandshakeError as error:
            await channel.send_greeting({"refused": str(error)})
            raise
        channel.peer = member
        await channel.send_greeting({"welcome": member})
        if self._descriptor is not None:
            channel.send_descriptor(self._descriptor)

    def _recognise(self, greeting: JsonDict) -> str:
        token, member = greeting.get("token"), greeting.get("member")
        if not isinstance(token, str) or not hmac.compare_digest(token.encode(), self.token.encode()):
            raise HandshakeError("wrong token")
        if not isinstance(member, str) or member not in self._members:
            raise HandshakeError(f"{str(member)[:80]!r} is not a member of {', '.join(self._members)}")
        if member in self.channels:
            raise HandshakeError(f"{member} has joined already")
        return member

    async def _listen(self, channel: Channel) -> None:
        try:
            while True:
                frame = await channel.receive(None, "a release")
                if not isinstance(frame, frames.Release):
                    raise TransportError(f"{channel.peer} sent {frame}; only releases are expected of it")
                self._board.release(channel.peer, frame.slot, frame.bucket)
        except TransportError as error:
            self._board.fail(error)
        except Exception as error:  # a recorder that fails, say: the transfer must not wait for its time-out
            self._board.fail(TransportError(f"listening to {channel.peer} failed: {error!r}"))

    def _blame(self) -> str:
        refused = f" (refused: {'; '.join(self.refusals[-3:])})" if self.refusals else ""
        return f"{', '.join(self.missing)} did not join{refused}"
