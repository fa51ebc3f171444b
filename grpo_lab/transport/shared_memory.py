"""Weights through shared memory: the packer writes where every engine of the host reads.

The trainer's only work is to pack; engines read one and the same ring. See ``segment`` for why nothing
can be left in /dev/shm, and ``channel`` for how a death is noticed. Both sides must belong to one user
and share a network namespace: the control channel is a unix socket in Linux's abstract namespace, which
leaves no file.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from pathlib import Path
from typing import ClassVar

from grpo_lab.errors import TransportError, TransportTimeout
from grpo_lab.ports import Recorder
from grpo_lab.transport.channel import Channel, connect
from grpo_lab.transport.control import ControlServer
from grpo_lab.transport.frames import Announce, Begin
from grpo_lab.transport.geometry import Invitation, text
from grpo_lab.transport.receiver import JOIN_TIMEOUT_S, RingReceiver
from grpo_lab.transport.segment import SHM_DIRECTORY, Segment, map_for_reading, sweep_stale_segments
from grpo_lab.transport.sender import RingTransport, Session
from grpo_lab.types import JsonDict

__all__ = ["SharedMemoryReceiver", "SharedMemoryTransport", "sweep_stale_segments"]


class SharedMemoryTransport(RingTransport):
    """Sender for engines on the same host. ``directory`` is where segments are made (tests use another)."""

    backend: ClassVar[str] = "lab_shm"

    def __init__(
        self,
        recorder: Recorder,
        *,
        slots: int = 2,
        accept_timeout_s: float = 30.0,
        progress_timeout_s: float = 30.0,
        directory: Path = SHM_DIRECTORY,
    ) -> None:
        super().__init__(
            recorder, slots=slots, accept_timeout_s=accept_timeout_s, progress_timeout_s=progress_timeout_s
        )
        self._directory = directory
        self._segment: Segment | None = None
        self._control: ControlServer | None = None
        self._address = ""

    async def _allocate(self, session: Session) -> str:
        sweep_stale_segments(self._directory)
        self._segment = Segment(session.geometry.ring_bytes, self._directory)
        self._ring = self._segment.ring(self.slots)
        self._address = f"grpo_lab_{os.getpid()}_{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(f"\0{self._address}")
            listener.listen(len(session.members) + 8)
        except OSError as error:
            listener.close()
            raise TransportError(f"cannot listen on an abstract unix socket: {error}") from error
        descriptor = self._segment.reader_fd
        self._control = ControlServer(listener, session.members, session.board, descriptor)
        return f"shared_memory:{self._segment.name}"

    def _rendezvous(self, member: str) -> JsonDict:
        return {"address": self._address, "token": self._server.token}

    async def _wait_joined(self, session: Session) -> None:
        await self._server.wait_joined(self.accept_timeout_s)

    async def _begin(self, begin: Begin) -> None:
        await self._server.tell(begin)

    async def _dispatch(self, announce: Announce) -> None:
        await self._server.tell(announce)

    async def _release(self) -> None:
        control, self._control = self._control, None
        segment, self._segment = self._segment, None
        try:
            if control is not None:
                await control.close()
        finally:
            if segment is not None:
                segment.close()

    @property
    def _server(self) -> ControlServer:
        if self._control is None:
            raise TransportError("the transport is not open: call open() first")
        return self._control


class SharedMemoryReceiver(RingReceiver):
    """Reads the sender's ring in place: ``Bucket.memory`` is a read-only view of shared memory."""

    backend: ClassVar[str] = "lab_shm"

    def __init__(self) -> None:
        super().__init__()
        self._ring: list[memoryview] = []

    async def _connect(self, invitation: Invitation, info: JsonDict, greeting: JsonDict) -> Channel:
        address = f"\0{text(info, 'address')}"
        channel = await connect(socket.AF_UNIX, address, greeting, timeout_s=JOIN_TIMEOUT_S, check_uid=True)
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                descriptor = await channel.receive_descriptor()
            try:
                memory = map_for_reading(descriptor, invitation.geometry.ring_bytes)
            finally:
                os.close(descriptor)
        except TimeoutError:
            channel.close()
            raise TransportTimeout(f"the sender handed out no memory within {JOIN_TIMEOUT_S:g} s") from None
        except BaseException:
            channel.close()
            raise
        size = invitation.geometry.slot_bytes
        self._ring = [memory[i * size : (i + 1) * size] for i in range(invitation.geometry.slots)]
        return channel

    async def _land(self, announce: Announce, channel: Channel, timeout_s: float) -> None:
        """They are there: the sender packed them in place before it announced them."""

    def _slot(self, slot: int) -> memoryview:
        return self._ring[slot]

    async def _release(self) -> None:
        self._ring = []  # the mapping ends with its last view
