"""The trainer's ranks as actors of one simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_lab.errors import PeerDied, PhaseTimeout, SimulationError
from grpo_lab.events import CollectiveEntered
from grpo_lab.ports import Recorder


@dataclass(slots=True)
class _Round:
    """One collective. ``entered`` maps each rank that is in it to the value that it brought."""

    operation: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    entered: dict[int, bool] = field(default_factory=dict)
    causes: dict[int, str] = field(default_factory=dict)


class RankGroup:
    """In-process collectives of ``size`` ranks; ``ranks[i]`` implements ``grpo_lab.ports.Ranks``.

    Like a torch process group, it is dead for all once one rank missed a collective, died, or entered
    another operation than the others: every later call raises at once. Make a new group (of a higher
    ``view``) to go on.

    Args:
        recorders: one per rank, for ``CollectiveEntered`` and the causes between ranks; or none.
    """

    def __init__(
        self, size: int, name: str = "trainer", recorders: Sequence[Recorder] = (), view: int = 0
    ) -> None:
        if size < 1 or len(recorders) not in (0, size):
            raise SimulationError(f"{size} ranks with {len(recorders)} recorders: expected one each, or none")
        self.name, self.size, self.view = name, size, view
        self.ranks = tuple(InProcessRanks(self, rank) for rank in range(size))
        self._recorders = tuple(recorders)
        self._rounds: dict[int, _Round] = {}
        self._next_index = [0] * size
        self._broken: Exception | None = None

    def fail(self, rank: int, detail: str) -> None:
        """Rank ``rank`` died: everyone who waits, and everyone who comes later, gets ``PeerDied``."""
        self._break(PeerDied(f"{self.name} rank {rank} died: {detail}"))

    async def enter(self, rank: int, operation: str, ok: bool, timeout_s: float) -> bool:
        """Waits until all ranks entered the same operation; True when all brought True."""
        index = self._next_index[rank]
        self._next_index[rank] += 1
        if self._broken is not None:
            if index in self._rounds:  # the others wait, or have waited, for this rank there
                self._record(rank, index, operation, self._rounds[index])
            raise _again(self._broken)
        current = self._rounds.setdefault(index, _Round(operation))
        self._record(rank, index, operation, current)
        if current.operation != operation:
            others = ", ".join(str(other) for other in sorted(current.entered))
            error = SimulationError(
                f"collective {index} of {self.name}: rank {rank} entered {operation}, "
                f"rank(s) {others} entered {current.operation}"
            )
            self._break(error)
            raise _again(error)
        current.entered[rank] = ok
        if len(current.entered) == self.size:
            del self._rounds[index]
            current.done.set()
        timed_out = await self._wait(current, timeout_s)
        if len(current.entered) < self.size and timed_out and self._broken is None:
            self._break(self._timeout_error(rank, index, current, timeout_s))
        if self._broken is not None and len(current.entered) < self.size:
            raise _again(self._broken)
        if self._recorders:
            for cause in current.causes.values():
                self._recorders[rank].observe(cause)
        return all(current.entered.values())

    async def _wait(self, current: _Round, timeout_s: float) -> bool:
        """Returns True when the bound ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await current.done.wait()
        except TimeoutError:
            return True
        return False

    def _timeout_error(self, rank: int, index: int, current: _Round, timeout_s: float) -> PhaseTimeout:
        missing = ", ".join(str(other) for other in range(self.size) if other not in current.entered)
        return PhaseTimeout(
            f"{self.name} rank {rank} waited {timeout_s} s in {current.operation} (collective {index}): "
            f"rank(s) {missing} did not come"
        )

    def _break(self, error: Exception) -> None:
        if self._broken is None:
            self._broken = error
        for waiting in self._rounds.values():
            waiting.done.set()

    def _record(self, rank: int, index: int, operation: str, current: _Round) -> None:
        if self._recorders:
            event = CollectiveEntered(
                group=self.name, rank=rank, index=index, operation=operation, view=self.view
            )
            current.causes[rank] = self._recorders[rank].emit(event)


class InProcessRanks:
    """``grpo_lab.ports.Ranks`` of one rank. Raises ``PhaseTimeout`` naming the ranks that did not come."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._group.size

    async def barrier(self, timeout_s: float) -> None:
        await self._group.enter(self._rank, "barrier", True, timeout_s)

    async def agree(self, ok: bool, timeout_s: float) -> bool:
        return await self._group.enter(self._rank, "agree", ok, timeout_s)


def _again(error: Exception) -> Exception:
    """The same failure for another rank: an exception that is raised twice would mix its tracebacks."""
    return type(error)(*error.args)
