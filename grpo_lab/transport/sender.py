"""What all senders share: the ring, its book-keeping, and the order of a send."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from grpo_lab.errors import ConfigError, TransportError
from grpo_lab.events import ResourceClosed, ResourceOpened
from grpo_lab.ports import Recorder
from grpo_lab.transport.board import SlotBoard
from grpo_lab.transport.frames import Announce, Begin
from grpo_lab.transport.geometry import MAX_SLOTS, MAX_WAIT_S, Geometry, is_wait
from grpo_lab.types import Bucket, JsonDict, SyncId


@dataclass(slots=True)
class Session:
    """What exists between ``open`` and ``close``."""

    members: tuple[str, ...]
    plan: JsonDict
    geometry: Geometry
    board: SlotBoard
    resource: str = ""
    accepted: bool = False
    sending: bool = False


class RingTransport(ABC):
    """Base of the senders (port ``WeightTransport``). A subclass adds how bytes and frames travel.

    | call   | before           | after it                | after its failure |
    |--------|------------------|-------------------------|-------------------|
    | open   | closed, or open  | ring and rendezvous     | closed            |
    | accept | open             | every member has joined | closed            |
    | send   | accepted         | every slot is free      | closed            |
    | close  | any              | closed                  | closed            |

    Every failure, cancellation included, closes the transport: members see the end of their channel, and
    the next ``open`` begins with fresh memory and a fresh token. Bound on every wait for members:
    ``accept_timeout_s`` until all have joined, ``progress_timeout_s`` for each release of a slot.
    """

    backend: ClassVar[str]

    def __init__(
        self,
        recorder: Recorder,
        *,
        slots: int = 2,
        accept_timeout_s: float = 30.0,
        progress_timeout_s: float = 30.0,
    ) -> None:
        if type(slots) is not int or not 1 <= slots <= MAX_SLOTS:
            raise ConfigError("slots", slots, f"an integer from 1 to {MAX_SLOTS}")
        for name, value in (
            ("accept_timeout_s", accept_timeout_s),
            ("progress_timeout_s", progress_timeout_s),
        ):
            if not is_wait(value):
                raise ConfigError(name, value, f"seconds, more than 0 and at most {MAX_WAIT_S:g}")
        self.recorder = recorder
        self.slots = slots
        self.accept_timeout_s = accept_timeout_s
        self.progress_timeout_s = progress_timeout_s
        self._session: Session | None = None
        self._ring: list[memoryview] = []

    @property
    def ring(self) -> list[memoryview]:
        """Writable slots to pack into; each ``open`` makes new ones. Raises ``TransportError`` before it.

        Buckets that lie elsewhere are copied into their slot: correct, but a copy more.
        """
        self._require_session()
        return self._ring

    async def open(self, members: Sequence[str], plan: JsonDict) -> None:
        """Raises ``HandshakeError`` for a bad plan and ``TransportError`` when there are no resources."""
        await self.close()
        if not members or len(set(members)) != len(members):
            raise TransportError(f"members are {list(members)}; at least one is needed, and none twice")
        geometry = Geometry.of_plan(plan, self.slots)
        session = Session(tuple(members), plan, geometry, SlotBoard(members, self.slots, self.recorder))
        self._session = session
        try:
            session.resource = await self._allocate(session)
            self.recorder.emit(ResourceOpened(resource=session.resource, nbytes=geometry.ring_bytes))
        except BaseException:
            await self._close(session)
            raise

    def init_info(self, member: str) -> JsonDict:
        """What ``member`` needs in order to join: plain JSON. Holds the token, so it is not for logs."""
        session = self._require_session()
        if member not in session.members:
            raise TransportError(f"{member!r} is not a member; the members are {', '.join(session.members)}")
        return {
            "backend": self.backend,
            "member": member,
            "plan": session.plan,
            "plan_digest": session.geometry.plan_digest,
            "slots": self.slots,
            "progress_timeout_s": self.progress_timeout_s,
            **self._rendezvous(member),
        }

    def update_info(self, sync: SyncId) -> JsonDict:
        return {"sync": str(sync), "num_buckets": self._require_session().geometry.num_buckets}

    async def accept(self) -> None:
        """Returns when all members have joined; raises ``TransportTimeout`` or ``PeerDied`` naming one."""
        session = self._require_session()
        try:
            await self._wait_joined(session)
        except BaseException:
            await self._close(session)
            raise
        session.accepted = True

    async def send(self, sync: SyncId, buckets: AsyncIterator[Bucket]) -> float:
        """Sends the plan's buckets in order; returns the seconds it took without those spent on ``buckets``.

        Draws bucket i only when slot ``i % slots`` is free on every member, so packing one bucket overlaps
        the transfer of those before it, and returns when all members have released all slots. Raises
        ``PeerDied`` or ``TransportTimeout`` naming the member, or ``TransportError`` for buckets that are
        not the plan's.
        """
        session = self._require_session()
        if not session.accepted:
            raise TransportError("send() before accept(): not every member has joined")
        if session.sending:
            raise TransportError("send() during a send: at most one sync is in flight")
        session.sending = True
        loop = asyncio.get_running_loop()
        began_s, drawing_s = loop.time(), 0.0
        try:
            session.board.raise_failure()
            await self._begin(Begin(sync, session.geometry.num_buckets))
            for index in range(session.geometry.num_buckets):
                await session.board.wait_free(index % self.slots, self.progress_timeout_s)
                draw_s = loop.time()
                bucket = await anext(buckets, None)
                drawing_s += loop.time() - draw_s
                announce = self._take(session.geometry, bucket, index)
                session.board.raise_failure()
                session.board.occupy(announce.slot, index)
                await self._dispatch(announce)
            await session.board.wait_all_free(self.progress_timeout_s)
            if (extra := await anext(buckets, None)) is not None:
                raise TransportError(
                    f"bucket {extra.index} is beyond the plan's {session.geometry.num_buckets}"
                )
        except BaseException:
            await self._close(session)
            raise
        session.sending = False
        return loop.time() - began_s - drawing_s

    async def close(self) -> None:
        """Gives everything back; may be called at any time and more than once. A running send fails."""
        if self._session is not None:
            await self._close(self._session)

    async def _close(self, session: Session) -> None:
        if self._session is not session:  # closed, and perhaps opened again, by another task
            return
        self._session, self._ring = None, []
        session.board.fail(TransportError("the transport was closed"))
        try:
            await self._release()
        finally:
            if session.resource:
                self.recorder.emit(ResourceClosed(resource=session.resource))

    @abstractmethod
    async def _allocate(self, session: Session) -> str:
        """Sets ``_ring``, begins to listen, and returns a name for the resource."""

    @abstractmethod
    def _rendezvous(self, member: str) -> JsonDict:
        """The transport's own part of ``init_info``."""

    @abstractmethod
    async def _wait_joined(self, session: Session) -> None: ...

    @abstractmethod
    async def _begin(self, begin: Begin) -> None: ...

    @abstractmethod
    async def _dispatch(self, announce: Announce) -> None:
        """Starts to move the bucket in its slot; must not wait for it to arrive."""

    @abstractmethod
    async def _release(self) -> None:
        """Undoes ``_allocate``, also when that failed half-way."""

    def _require_session(self) -> Session:
        if self._session is None:
            raise TransportError("the transport is not open (a failure closes it): call open() first")
        return self._session

    def _take(self, geometry: Geometry, bucket: Bucket | None, index: int) -> Announce:
        """Checks the bucket against the plan and makes sure that its bytes lie in its slot."""
        if bucket is None:
            raise TransportError(f"the source ended after {index} of {geometry.num_buckets} buckets")
        wrong = geometry.mismatch(bucket.index, index, bucket.slot, bucket.nbytes)
        if not wrong and bucket.slot != index % self.slots:
            wrong = f"bucket {index} in slot {bucket.slot}; slot {index % self.slots} is due"
        if not wrong and bucket.memory.nbytes != bucket.nbytes:
            wrong = f"bucket {index} has {bucket.memory.nbytes} bytes of memory and says {bucket.nbytes}"
        if wrong:
            raise TransportError(f"the source yielded {wrong}")
        place = self._ring[bucket.slot][: bucket.nbytes]
        if bucket.nbytes and _address(bucket.memory) != _address(place):
            place[:] = bucket.memory.cast("B")
        return Announce(bucket.index, bucket.slot, bucket.nbytes, bucket.hash64)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])
