"""Coordinators with one planted bug each, for the exhaustive search."""

import asyncio

from grpo_lab.protocol.coordinator import Coordinator
from grpo_lab.types import SyncState


class LeavesTheTable(Coordinator):
    """Goes to LOADED without a transfer."""

    async def _transfer(self):
        self._enter(SyncState.LOADED)
        self._enter(SyncState.PAUSED)
        return await super()._transfer()


class CountsAttempts(Coordinator):
    """Moves the version once more for a sync that needed a retry."""

    def _commit(self):
        super()._commit()
        if self._sync.attempt > 1:
            self.committed += 1


class ReadsBesideTheWrite(Coordinator):
    """Two tasks that ought to follow each other: first in, first out, the write happens to come first."""

    async def pause(self, optimizer_step=0):
        self._twice = True

        async def write():
            self._twice = False

        async def read():
            return self._twice

        _, self._twice = await asyncio.gather(write(), read())
        await super().pause(optimizer_step)

    def _commit(self):
        super()._commit()
        if self._twice:
            self.committed += 1
