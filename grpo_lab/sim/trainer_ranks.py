"""Further ranks of a simulated trainer: each runs the coordinator, and joins every collective.

Rank 0 is the trainer itself. The others follow it from sync to sync, each at its own time; in between they
have nothing to decide. Collectives are in process, and a group is dead for all once a rank has missed one.
As in a real trainer they run in each rank's main thread, one after another, whoever has given up waiting.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from grpo_lab.errors import PeerDied
from grpo_lab.ports import Ranks, WeightSource, WeightTransport
from grpo_lab.protocol.coordinator import Coordinator, SyncSettings
from grpo_lab.sim.faults import Crash, Faults
from grpo_lab.sim.life import Life
from grpo_lab.sim.ranks import RankGroup
from grpo_lab.sim.stalls import outside
from grpo_lab.trainer.ranks import SingleRank
from grpo_lab.types import Bucket, JsonDict, SyncId

T = TypeVar("T")
Step = Callable[[Coordinator], Coroutine[Any, Any, T]]

GATHER_S = 60.0  # until a collective of the ranks is given up: rank 0 waits for engines in between
LATE_S = 0.2  # a rank comes to its next sync up to so much later than rank 0


class TrainerRanks:
    """The ranks of one incarnation. ``lives[i]`` is rank i's; rank 0 is the trainer's."""

    def __init__(
        self,
        lives: Sequence[Life],
        faults: Faults,
        crash: Crash,
        coordinator: type[Coordinator],
        settings: SyncSettings,
        seed: int,
    ) -> None:
        size, view = len(lives), lives[0].incarnation
        self._lives = tuple(lives)
        self._faults = faults
        self._crash = crash
        self._coordinator_type = coordinator
        self._settings = settings
        self._agreements = RankGroup(size, "agreements", lives, view)
        self._gathers = RankGroup(size, "gathers", lives, view)
        self._late = random.Random(f"{seed} ranks {view}")
        self._others: list[Coordinator] = []
        self._last_job: list[asyncio.Task[Any] | None] = [None] * size

    @property
    def first(self) -> Ranks:
        """Rank 0's face."""
        return _Rank(self, 0) if len(self._lives) > 1 else SingleRank()

    def source(self, packed: WeightSource) -> WeightSource:
        """Rank 0's source, gathered by all."""
        return _Gathered(self, 0, packed) if len(self._lives) > 1 else packed

    def make_others(self, packed: WeightSource, transport: WeightTransport) -> None:
        """The coordinators of the other ranks; they never touch ``transport``."""
        self._others = [
            self._coordinator_type(
                (), transport, _Gathered(self, rank, packed), _Rank(self, rank), life, self._settings
            )
            for rank, life in enumerate(self._lives)
            if rank > 0
        ]

    async def together(self, first: Coordinator, step: Step[T]) -> T:
        """``step`` on every rank; rank 0's result. Raises what rank 0 raised, or else another rank."""
        others = [outside(self._late_step(one, step), f"rank {i}") for i, one in enumerate(self._others, 1)]
        try:
            result = await step(first)
        except BaseException:
            for task in others:
                task.add_done_callback(_retrieve)  # their own error is the same, or this one's cause
            raise
        for outcome in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return result

    def alive(self, rank: int) -> bool:
        return self._lives[rank].alive

    def fail(self, rank: int, how: str) -> None:
        """The process of ``rank`` has ended: all others hear of it in their next collective."""
        self._lives[rank].end()
        for group in (self._agreements, self._gathers):
            group.fail(rank, how)

    async def in_thread(self, rank: int, job: Callable[[], Awaitable[T]]) -> T:
        """``job`` in the rank's main thread: in the order in which they are asked for, one after another. Who
        waits for a job may give up; the job is a blocking call, and goes on.
        """
        task = outside(self._after(self._last_job[rank], job), f"main thread of rank {rank}")
        task.add_done_callback(_retrieve)
        self._last_job[rank] = task
        return await asyncio.shield(task)

    async def _after(self, last: asyncio.Task[Any] | None, job: Callable[[], Awaitable[T]]) -> T:
        if last is not None:
            await asyncio.gather(last, return_exceptions=True)
        return await job()

    async def _collective(self, rank: int, call: str, enter: Callable[[], Awaitable[T]]) -> T:
        """Enters one, with the faults that it meets."""
        life = self._lives[rank]
        met = self._faults.strike(call, life.actor) if life.alive else {}
        if "hang" in met:
            await asyncio.sleep(met["hang"].duration_s)
        if "crash_before" in met:
            self._crash(life.actor, met["crash_before"].duration_s)
        result = await enter() if life.alive else None
        if "crash_after" in met:
            self._crash(life.actor, met["crash_after"].duration_s)
        if not life.alive:
            raise PeerDied(f"{life.actor} has died")
        return result  # type: ignore[return-value]

    async def gather(self, rank: int, use: Callable[[], Awaitable[T]]) -> T:
        """``use`` is what the rank does with what was gathered."""

        async def job() -> T:
            await self._collective(rank, "gather", lambda: self._gathers.ranks[rank].barrier(GATHER_S))
            return await use()

        return await self.in_thread(rank, job)

    async def agree(self, rank: int, ok: bool, timeout_s: float) -> bool:
        group = self._agreements.ranks[rank]
        return await self.in_thread(
            rank, lambda: self._collective(rank, "agree", lambda: group.agree(ok, timeout_s))
        )

    async def _late_step(self, one: Coordinator, step: Step[Any]) -> None:
        await asyncio.sleep(LATE_S * self._late.random())
        await step(one)


class _Rank:
    """Port ``Ranks``."""

    def __init__(self, group: TrainerRanks, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = len(group._lives)

    async def barrier(self, timeout_s: float) -> None:
        await self.agree(True, timeout_s)

    async def agree(self, ok: bool, timeout_s: float) -> bool:
        return await self._group.agree(self.rank, ok, timeout_s)


class _Gathered:
    """Port ``WeightSource``: each bucket of ``packed`` is gathered by all ranks; rank 0 packs it."""

    def __init__(self, group: TrainerRanks, rank: int, packed: WeightSource) -> None:
        self._group = group
        self._rank = rank
        self._packed = packed
        self._next = 0

    @property
    def plan(self) -> JsonDict:
        return self._packed.plan

    @property
    def plan_digest(self) -> str:
        return self._packed.plan_digest

    @property
    def num_buckets(self) -> int:
        return self._packed.num_buckets

    @property
    def num_tensors(self) -> int:
        return self._packed.num_tensors

    async def begin(self, sync: SyncId) -> None:
        self._next = 0
        await self._group.in_thread(self._rank, lambda: self._begin(sync))

    async def next(self) -> Bucket | None:
        if self._next >= self.num_buckets:
            return None
        index, self._next = self._next, self._next + 1
        return await self._group.gather(self._rank, lambda: self._pack(index))

    async def _begin(self, sync: SyncId) -> None:
        if self._rank == 0:
            await self._packed.begin(sync)

    async def _pack(self, index: int) -> Bucket:
        bucket = await self._packed.next() if self._rank == 0 else None
        return bucket or Bucket(index, 0, memoryview(b""), 0, 0)

    def phases_s(self) -> dict[str, float]:
        return self._packed.phases_s() if self._rank == 0 else {}

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._group.gather(self._rank, lambda: self._score(sequences))

    async def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._packed.score(sequences) if self._rank == 0 else []


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and isinstance(task.exception(), Exception | None):
        return
