"""Coordinators with one planted bug each."""

from grpo_lab.protocol.coordinator import Coordinator


class CountsAttempts(Coordinator):
    """Moves the version once more for a sync that needed a retry."""

    def _commit(self):
        super()._commit()
        if self._sync.attempt > 1:
            self.committed += 1


class ForgetsToResume(Coordinator):
    """After a sync that was given up, nobody is resumed."""

    async def _resume(self):
        if self._moved:
            await super()._resume()
        else:
            self._enter(type(self.state).RUNNING)
