"""Coordinators with one planted bug each, for the exhaustive search."""

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
