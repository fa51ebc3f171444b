"""What the receivers of separate processes share: joining, and the order of a receive."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import ClassVar

from grpo_lab.errors import TransportError
from grpo_lab.transport.channel import Channel
from grpo_lab.transport.frames import Announce, Begin, Release
from grpo_lab.transport.geometry import Geometry, Invitation
from grpo_lab.types import Bucket, JsonDict, SyncId

JOIN_TIMEOUT_S = 10.0


class RingReceiver(ABC):
    """Base of the receivers (port ``WeightReceiver``).

    ``receive`` must be run to its end; leaving it early, by an exception or ``aclose`` (use
    ``contextlib.aclosing``), closes the channel, so that the sender fails at once instead of waiting. After
    that, and after any error, only a new ``join`` helps.
    """

    backend: ClassVar[str]

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._invitation: Invitation | None = None
        self._fetching: asyncio.Task[Announce] | None = None

    async def join(self, info: JsonDict) -> None:
        """Raises ``HandshakeError`` for information that cannot be used or a refusal, ``PeerDied`` when no
        sender is there, ``TransportTimeout`` when it does not answer.
        """
        await self.close()
        invitation = Invitation.parse(info, self.backend)
        greeting = {"token": invitation.token, "member": invitation.member}
        try:
            self._channel = await self._connect(invitation, info, greeting)
        except BaseException:
            await self.close()
            raise
        self._invitation = invitation

    async def receive(self, sync: SyncId, info: JsonDict) -> AsyncIterator[Bucket]:
        """Yields the buckets of ``sync`` in order, each with the hash that its sender declared.

        The next bucket is fetched while the caller works on one. Raises ``PeerDied``, ``TransportTimeout`` or
        ``TransportError``.
        """
        channel, invitation = self._joined()
        geometry = invitation.geometry
        done = False
        try:
            await self._expect(channel, invitation, sync, info)
            for index in range(geometry.num_buckets):
                announce = await self._fetched(channel, invitation, index)
                if geometry.slots > 1 and index + 1 < geometry.num_buckets:
                    self._begin_fetch(channel, invitation, index + 1)
                    await asyncio.sleep(0)  # lets it begin, should the caller block the loop
                memory = self._slot(announce.slot)[: announce.nbytes]
                yield Bucket(index, announce.slot, memory, announce.nbytes, announce.hash64)
                await channel.send(Release(index, announce.slot))
            done = True
        finally:
            if not done and self._channel is channel:
                await self.close()

    async def close(self) -> None:
        """Leaves the transfer; may be called at any time and more than once."""
        channel, self._channel = self._channel, None
        fetching, self._fetching = self._fetching, None
        self._invitation = None
        try:
            if fetching is not None:
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
        finally:
            if channel is not None:
                channel.close()
            await self._release()

    @abstractmethod
    async def _connect(self, invitation: Invitation, info: JsonDict, greeting: JsonDict) -> Channel: ...

    @abstractmethod
    async def _land(self, announce: Announce, channel: Channel, timeout_s: float) -> None:
        """Returns when the bucket's bytes are in ``_slot(announce.slot)``."""

    @abstractmethod
    def _slot(self, slot: int) -> memoryview: ...

    @abstractmethod
    async def _release(self) -> None:
        """Undoes ``_connect`` but for the channel, also when that failed half-way."""

    def _joined(self) -> tuple[Channel, Invitation]:
        if self._channel is None or self._invitation is None:
            raise TransportError("not joined (a failure leaves the transfer): call join() first")
        return self._channel, self._invitation

    async def _expect(self, channel: Channel, invitation: Invitation, sync: SyncId, info: JsonDict) -> None:
        wanted = {"sync": str(sync), "num_buckets": invitation.geometry.num_buckets}
        for name, value in wanted.items():
            if info.get(name) != value:
                raise TransportError(f"update_info[{name!r}] is {info.get(name)!r}; {value!r} is expected")
        frame = await channel.receive(invitation.progress_timeout_s, f"the beginning of {sync}")
        if frame != Begin(sync, invitation.geometry.num_buckets):
            raise TransportError(f"{channel.peer} began with {frame}; {sync} is expected")

    def _begin_fetch(self, channel: Channel, invitation: Invitation, index: int) -> asyncio.Task[Announce]:
        self._fetching = asyncio.create_task(self._fetch(channel, invitation, index))
        return self._fetching

    async def _fetched(self, channel: Channel, invitation: Invitation, index: int) -> Announce:
        fetching = self._fetching or self._begin_fetch(channel, invitation, index)
        announce = await fetching
        self._fetching = None
        return announce

    async def _fetch(self, channel: Channel, invitation: Invitation, index: int) -> Announce:
        timeout_s, geometry = invitation.progress_timeout_s, invitation.geometry
        frame = await channel.receive(timeout_s, f"bucket {index} of {geometry.num_buckets}")
        if not isinstance(frame, Announce):
            raise TransportError(f"{channel.peer} sent {frame}; bucket {index} is expected")
        wrong = self._wrong(geometry, frame, index)
        if wrong:
            raise TransportError(f"{channel.peer} announced {wrong}")
        await self._land(frame, channel, timeout_s)
        return frame

    @staticmethod
    def _wrong(geometry: Geometry, frame: Announce, index: int) -> str:
        if frame.slot != index % geometry.slots:  # any other slot may still be read by the caller
            return f"bucket {index} in slot {frame.slot}; slot {index % geometry.slots} is due"
        return geometry.mismatch(frame.bucket, index, frame.slot, frame.nbytes)
