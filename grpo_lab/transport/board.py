"""Who still reads which slot: the sender's book-keeping, without any I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_lab.errors import TransportError, TransportTimeout
from grpo_lab.events import SlotReleased
from grpo_lab.ports import Recorder


@dataclass(slots=True)
class _Held:
    bucket: int
    readers: list[str]


class SlotBoard:
    """A slot is free when every member has released it. The first failure wins and wakes every waiter.

    Emits ``SlotReleased`` when the last reader of a slot ends. Belongs to one event loop.
    """

    def __init__(self, members: Sequence[str], slots: int, recorder: Recorder) -> None:
        self.failure: TransportError | None = None
        self._members = tuple(members)
        self._held: list[_Held | None] = [None] * slots
        self._recorder = recorder
        self._waiters: list[asyncio.Future[None]] = []

    def occupy(self, slot: int, bucket: int) -> None:
        """All members now read ``bucket`` in ``slot``."""
        self._held[slot] = _Held(bucket, list(self._members))

    def release(self, member: str, slot: int, bucket: int) -> None:
        """``member`` reads the slot no more. Raises ``TransportError`` when it did not read that bucket."""
        held = self._held[slot] if 0 <= slot < len(self._held) else None
        if held is None or held.bucket != bucket or member not in held.readers:
            raise TransportError(f"{member} released bucket {bucket} in slot {slot}, which it does not read")
        held.readers.remove(member)
        if not held.readers:
            self._held[slot] = None
            self._recorder.emit(SlotReleased(slot=slot, bucket=bucket))
            self.notify()

    def fail(self, error: TransportError) -> None:
        """Ends every present and future wait with ``error``, unless something failed before."""
        if self.failure is None:
            self.failure = error
            self.notify()

    def notify(self) -> None:
        """Something that a predicate looks at has changed."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def wait_free(self, slot: int, timeout_s: float) -> None:
        """Raises ``TransportTimeout`` naming the members that still read the slot."""
        await self.wait_until(lambda: self._held[slot] is None, timeout_s, self.blame)

    async def wait_all_free(self, timeout_s: float) -> None:
        """Waits until no slot is read any more; the bound holds for each release, not for their sum."""
        for slot in range(len(self._held)):
            await self.wait_free(slot, timeout_s)

    async def wait_until(
        self, predicate: Callable[[], bool], timeout_s: float, blame: Callable[[], str]
    ) -> None:
        """Raises the board's failure, or ``TransportTimeout(blame() ...)`` when the bound is reached."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.failure is None and not predicate():
                    await self._changed()
        except TimeoutError:
            raise TransportTimeout(f"{blame()} within {timeout_s:g} s") from None
        self.raise_failure()

    async def _changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def blame(self) -> str:
        """Who still reads what, in words."""
        parts = [
            f"{', '.join(held.readers)} did not release bucket {held.bucket} in slot {slot}"
            for slot, held in enumerate(self._held)
            if held is not None
        ]
        return "; ".join(parts)
