"""The rollout worker as a task of the virtual loop, seen from a blocking trainer."""

from __future__ import annotations

import asyncio
import math
import queue
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from grpo_lab.errors import GrpoLabError, SimulationError, WorkerError, WorkerStalled
from grpo_lab.events import GroupQueued, MemberDied, MemberStarted, MemberStopped
from grpo_lab.ports import Recorder, SampleQueue
from grpo_lab.protocol.rollout_worker import RolloutWorker
from grpo_lab.sim.greenlet_bridge import current_actor
from grpo_lab.sim.loop import VirtualLoop
from grpo_lab.trainer.protocols import RolloutBuffer
from grpo_lab.types import DroppedGroup, RolloutGroup

T = TypeVar("T")
Item = RolloutGroup | DroppedGroup
Heartbeat = Callable[[int, str], None]
MakeWorker = Callable[[SampleQueue, Heartbeat], RolloutWorker]

STOP_TIMEOUT_S = 5.0


class HandOver:
    """Port ``SampleQueue``: at most ``capacity`` groups that the trainer has not taken."""

    def __init__(self, capacity: int, recorder: Recorder) -> None:
        self.capacity = capacity
        self.arrived = asyncio.Event()
        self.items: deque[tuple[Item, str]] = deque()  # with the event that stands behind each
        self._recorder = recorder
        self._depth = 0
        self._room = asyncio.Event()

    async def put(self, item: Item) -> None:
        if isinstance(item, RolloutGroup):
            while self._depth >= self.capacity:
                self._room.clear()
                await self._room.wait()
            self._depth += 1
            self._recorder.emit(
                GroupQueued(term=item.term, group=item.group_id, number=item.number, depth=self._depth)
            )
        self.items.append((item, self._recorder.last_id))
        self.arrived.set()

    def take(self, trainer: Recorder) -> Item:
        item, cause = self.items.popleft()
        trainer.observe(cause)
        if isinstance(item, RolloutGroup):
            self._depth -= 1
            self._recorder.observe(trainer.last_id)
            self._room.set()
        return item


class WorkerActor:
    """Implements ``RolloutWorkerProtocol``; it is its own ``rollout_buffer``.

    Where the worker's process would be waited for, the trainer's greenlet blocks in virtual time. What
    ends the worker, or keeps it from getting on, is reported as for a process.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        make: MakeWorker,
        connect: Callable[[], Awaitable[None]],
        *,
        recorder: Recorder,
        trainer: Recorder,
        capacity: int,
        stale_after_s: float,
    ) -> None:
        self._loop = loop
        self._connect = connect
        self._recorder = recorder
        self._trainer = trainer
        self._stale_after_s = stale_after_s
        self._queue = HandOver(capacity, recorder)
        self._worker = make(self._queue, self._beat)
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._gone = ""
        self._progress = -1
        self._blocked_by = "start-up"
        self._moved_s = 0.0
        self._waited_until_s = 0.0
        self.rollout_buffer: RolloutBuffer = self

    def start(self) -> None:
        if self._task is not None:
            raise WorkerError("this rollout worker was started before; make a new one for a new run")
        self._trainer.emit(MemberStarted(member=self._recorder.actor, role="worker"))
        self._recorder.observe(self._trainer.last_id)
        self._moved_s = self._waited_until_s = self._loop.time()
        self._task = self._loop.create_task(self._run(), name=self._recorder.actor)
        self._task.add_done_callback(lambda _: self._queue.arrived.set())

    def update_model_version(self, version: int) -> None:
        self._recorder.observe(self._trainer.last_id)
        self._worker.update_model_version(version)

    def fence_engines(self, names: Sequence[str]) -> None:
        self._recorder.observe(self._trainer.last_id)
        self._worker.fence_engines(names)

    def stop(self) -> None:
        """Asks the worker to end and waits for that; then it is cancelled. May be called twice."""
        task = self._task
        if task is None or self._stopped:
            return
        self._stopped = True
        self._recorder.observe(self._trainer.last_id)
        self._worker.stop()
        for end in (lambda: None, task.cancel):
            end()
            if _block(self._ended_within(task, STOP_TIMEOUT_S)):
                break
        self._trainer.observe(self._recorder.last_id)
        if task.done() and not task.cancelled() and task.exception() is not None:
            self._note_death(task.exception())
        elif not self._gone:
            self._trainer.emit(MemberStopped(member=self._recorder.actor))

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """The next item. Raises ``queue.Empty`` in time, and ``WorkerError`` as soon as there is a reason."""
        now_s = self._loop.time()
        if now_s - self._waited_until_s > 1.0:
            self._moved_s = now_s  # the trainer was busy: it only begins to wait
        deadline_s = now_s + (0.0 if not block else math.inf if timeout is None else timeout)
        while not self._queue.items:
            self._raise_if_gone()
            self._raise_if_stalled()
            if self._stopped or self._loop.time() >= deadline_s:
                self._waited_until_s = self._loop.time()
                raise queue.Empty
            _block(self._arrival(min(deadline_s, self._loop.time() + self._stale_after_s)))
        self._moved_s = self._waited_until_s = self._loop.time()
        return self._queue.take(self._trainer)

    # -- inside -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._connect()
        await self._worker.run()

    async def _arrival(self, deadline_s: float) -> None:
        """Until something came, the worker ended, or ``deadline_s``."""
        self._queue.arrived.clear()
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._queue.arrived.wait()
        except TimeoutError:
            return

    @staticmethod
    async def _ended_within(task: asyncio.Task[None], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(asyncio.shield(task), return_exceptions=True)
        except TimeoutError:
            return False
        return True

    def _beat(self, progress: int, blocked_by: str) -> None:
        self._blocked_by = blocked_by
        if progress > self._progress:
            self._progress, self._moved_s = progress, self._loop.time()

    def _raise_if_gone(self) -> None:
        task = self._task
        if self._stopped or task is None or not task.done():
            return
        error = task.exception()
        self._note_death(error)
        raise WorkerError(self._gone) from error

    def _note_death(self, error: BaseException | None) -> None:
        if not self._gone:
            said = "" if isinstance(error, GrpoLabError) else "the rollout worker failed: "
            self._gone = f"{said}{type(error).__name__}: {error}" if error else "the rollout worker ended"
            self._trainer.observe(self._recorder.last_id)
            self._trainer.emit(MemberDied(member=self._recorder.actor, detail=self._gone[:500]))

    def _raise_if_stalled(self) -> None:
        still_s = self._loop.time() - self._moved_s
        if still_s >= self._stale_after_s:
            raise WorkerStalled(
                f"the rollout worker has made no progress for {still_s:.1f} virtual seconds "
                f"(heartbeat_stale_after_s={self._stale_after_s:g}); it waits for: "
                f"{self._blocked_by or 'completions'}"
            )


def _block(awaitable: Awaitable[T]) -> T:
    actor = current_actor()
    if actor is None:
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise SimulationError("only a blocking actor (spawn_blocking) may wait for the rollout worker")
    return actor.block(awaitable)
