"""Sender and receiver in one process, on one event loop: for tests and simulations.

No sockets, threads or clocks but the loop's, so a run is as deterministic as its loop. Bytes are copied,
as a wire would do it. Faults are made by subclassing::

    class Lossy(InMemoryTransport):
        async def carry(self, member: str, bucket: Bucket) -> Sequence[Bucket]:
            return [] if bucket.index == 3 else [bucket]
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from grpo_lab.errors import HandshakeError, PeerDied, TransportError, TransportTimeout
from grpo_lab.ports import Recorder
from grpo_lab.transport.channel import cancel_all
from grpo_lab.transport.frames import Announce, Begin
from grpo_lab.transport.geometry import Invitation
from grpo_lab.transport.sender import RingTransport, Session
from grpo_lab.types import Bucket, JsonDict, SyncId

_Message = Begin | Bucket | TransportError


class InMemoryTransport(RingTransport):
    """Sender whose receivers are made by ``receiver()``; several may join, one a member."""

    backend: ClassVar[str] = "lab_memory"

    def __init__(
        self,
        recorder: Recorder,
        *,
        slots: int = 2,
        accept_timeout_s: float = 30.0,
        progress_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(
            recorder, slots=slots, accept_timeout_s=accept_timeout_s, progress_timeout_s=progress_timeout_s
        )
        self._opened = 0
        self._links: dict[str, _Link] = {}
        self._couriers: list[asyncio.Task[None]] = []

    def receiver(self) -> InMemoryReceiver:
        """A new receiver of this transport: the factory that an engine is given."""
        return InMemoryReceiver(self)

    async def carry(self, member: str, bucket: Bucket) -> Sequence[Bucket]:
        """What arrives at ``member``, in order, when ``bucket`` is sent to it. Override to inject faults.

        Delays: wait here, each member has its own courier. Loss: return nothing. Corruption: return a
        bucket with other bytes (``bucket.memory`` is this member's own, writable copy). Duplication: return
        it twice. Reordering: keep it, and return it after a later one.
        """
        del member
        return [bucket]

    async def _allocate(self, session: Session) -> str:
        self._opened += 1
        geometry = session.geometry
        self._ring = [memoryview(bytearray(geometry.slot_bytes)) for _ in range(geometry.slots)]
        self._links = {}
        return f"memory:{self._opened}"

    def _rendezvous(self, member: str) -> JsonDict:
        return {"token": f"session-{self._opened}"}

    def attach(self, invitation: Invitation) -> _Link:
        """For a receiver that joins. Raises ``HandshakeError`` for an older session or a second time."""
        session, member = self._session, invitation.member
        if session is None or invitation.token != f"session-{self._opened}":
            raise HandshakeError("the sender refused this receiver: wrong token")
        if member not in session.members or member in self._links:
            raise HandshakeError(f"the sender refused this receiver: {member} is no member, or has joined")
        link = self._links[member] = _Link(member, session)
        self._couriers.append(asyncio.create_task(self._deliver(link), name=f"courier to {member}"))
        session.board.notify()
        return link

    async def _wait_joined(self, session: Session) -> None:
        def missing() -> list[str]:
            return [member for member in session.members if member not in self._links]

        await session.board.wait_until(
            lambda: not missing(), self.accept_timeout_s, lambda: f"{', '.join(missing())} did not join"
        )

    async def _begin(self, begin: Begin) -> None:
        for member in self._require_session().members:
            self._links[member].outbox.put_nowait(begin)

    async def _dispatch(self, announce: Announce) -> None:
        for member in self._require_session().members:
            data = memoryview(bytearray(self._ring[announce.slot][: announce.nbytes]))
            bucket = Bucket(announce.bucket, announce.slot, data, announce.nbytes, announce.hash64)
            self._links[member].outbox.put_nowait(bucket)

    async def _release(self) -> None:
        links, self._links = self._links, {}
        couriers, self._couriers = self._couriers, []
        for link in links.values():
            link.inbox.put_nowait(PeerDied("the sender closed the connection"))
        await cancel_all(couriers)

    async def _deliver(self, link: _Link) -> None:
        try:
            while True:
                message = await link.outbox.get()
                arrived = [message] if isinstance(message, Begin) else await self.carry(link.member, message)
                for item in arrived:
                    link.inbox.put_nowait(item)
        except Exception as error:
            link.session.board.fail(TransportError(f"the link to {link.member} failed: {error!r}"))


class _Link:
    """Both directions between the sender and one member."""

    def __init__(self, member: str, session: Session) -> None:
        self.member = member
        self.session = session
        self.outbox: asyncio.Queue[Begin | Bucket] = asyncio.Queue()
        self.inbox: asyncio.Queue[_Message] = asyncio.Queue()

    def release(self, bucket: Bucket) -> None:
        try:
            self.session.board.release(self.member, bucket.slot, bucket.index)
        except TransportError as error:
            self.session.board.fail(error)

    def leave(self) -> None:
        self.session.board.fail(PeerDied(f"{self.member} closed the connection"))


class InMemoryReceiver:
    """Port ``WeightReceiver``. Yields what arrives, unchecked: faults are for the engine to find."""

    def __init__(self, transport: InMemoryTransport) -> None:
        self._transport = transport
        self._link: _Link | None = None
        self._invitation: Invitation | None = None

    async def join(self, info: JsonDict) -> None:
        """Raises ``HandshakeError``."""
        await self.close()
        invitation = Invitation.parse(info, InMemoryTransport.backend)
        self._link, self._invitation = self._transport.attach(invitation), invitation

    async def receive(self, sync: SyncId, info: JsonDict) -> AsyncIterator[Bucket]:
        """As many buckets as ``info`` says, whichever arrive. Leaving early closes the connection."""
        link, invitation = self._link, self._invitation
        if link is None or invitation is None:
            raise TransportError("not joined (a failure leaves the transfer): call join() first")
        done = False
        try:
            begin = await self._next(link, invitation)
            if begin != Begin(sync, info["num_buckets"]):
                raise TransportError(f"the sender began with {begin}; {sync} is expected")
            for _ in range(info["num_buckets"]):
                bucket = await self._next(link, invitation)
                if not isinstance(bucket, Bucket):
                    raise TransportError(f"the sender sent {bucket}; a bucket is expected")
                yield dataclasses.replace(bucket, memory=bucket.memory.toreadonly())
                link.release(bucket)
            done = True
        finally:
            if not done and self._link is link:
                await self.close()

    async def close(self) -> None:
        """Leaves the transfer; may be called at any time and more than once."""
        link, self._link, self._invitation = self._link, None, None
        if link is not None:
            link.leave()

    async def _next(self, link: _Link, invitation: Invitation) -> Begin | Bucket:
        timeout_s = invitation.progress_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                message = await link.inbox.get()
        except TimeoutError:
            raise TransportTimeout(f"the sender sent nothing within {timeout_s:g} s") from None
        if isinstance(message, TransportError):
            raise message
        return message
