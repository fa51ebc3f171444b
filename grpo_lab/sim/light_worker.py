"""The rollout worker of a simulated cluster: the protocol's worker, as an actor of its own."""

from __future__ import annotations

import asyncio
import queue
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from grpo_lab.errors import GrpoLabError, PhaseTimeout, RewardError, WorkerDied, WorkerError, WorkerStalled
from grpo_lab.events import MemberDied, MemberStarted, MemberStopped
from grpo_lab.ports import Engine
from grpo_lab.protocol.rollout_worker import RolloutSettings, RolloutWorker
from grpo_lab.protocol.sample_request import RequestSettings
from grpo_lab.sim.engine_host import VOCABULARY
from grpo_lab.sim.greenlet_bridge import GreenletBridge
from grpo_lab.sim.life import Life
from grpo_lab.sim.light_trainer import LIMITS
from grpo_lab.sim.scenario import REWARD_CALL, SHARED_PREFIX_TOKENS, WORKER, Scenario
from grpo_lab.sim.stalls import Stalls
from grpo_lab.trainer.protocols import RolloutBuffer, WorkerStart
from grpo_lab.trainer.worker_main import ChannelQueue
from grpo_lab.types import CursorState, DroppedGroup, JsonDict, RolloutGroup, SamplingParams

CHANNEL_S = 0.001  # one way between the trainer and its worker, which share a host
STOP_S = 30.0
HEARTBEAT_STALE_S = 60.0

Strike = Callable[..., dict[str, Any]]


class SeededPrompts:
    """Port ``PromptSource``: every fourth prompt begins with the same tokens, as few-shot prompts do."""

    def __init__(self, seed: int, done: CursorState, most_tokens: int = 12) -> None:
        self._seed = seed
        self._most_tokens = most_tokens
        self._next = done.low_water
        self._done = frozenset(done.done)

    def next(self) -> tuple[int, tuple[int, ...], JsonDict]:
        while self._next in self._done:
            self._next += 1
        index, self._next = self._next, self._next + 1
        source = random.Random(f"prompt {self._seed} {index}")
        own = tuple(source.randrange(VOCABULARY - 1) for _ in range(source.randint(1, self._most_tokens)))
        prefix = tuple(range(SHARED_PREFIX_TOKENS)) if index % 4 == 0 else ()
        return index, prefix + own, {"index": index}


class SeededRewards:
    """Port ``RewardModel``: 0 or 1 by the completion's length and first tokens, after ``reward_s``."""

    def __init__(self, scenario: Scenario, strike: Strike) -> None:
        self._scenario = scenario
        self._strike = strike

    async def score(
        self, row: JsonDict, completions: Sequence[tuple[int, ...]]
    ) -> list[tuple[float | None, tuple[float | None, ...]]]:
        met = self._strike(REWARD_CALL, WORKER)
        await asyncio.sleep(self._scenario.reward_s)
        if "reward_error" in met:
            raise RewardError("reward function parity raised ValueError: injected")
        values = [float((len(ids) + sum(ids[:8])) % 2) for ids in completions]
        return [(value, (value,)) for value in values]


class Channel:
    """Messages in one direction, in order, each ``CHANNEL_S`` under way; closed, it drops them."""

    def __init__(self, receiver: Stalls | None = None) -> None:
        self._receiver = receiver
        self._under_way: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.open = True

    def send(self, receive: Callable[..., None], *message: Any) -> None:
        self._under_way.append((receive, message))
        asyncio.get_running_loop().call_later(CHANNEL_S, self._deliver)

    def _deliver(self) -> None:
        if self._receiver is not None and (left_s := self._receiver.left_s) > 0:
            asyncio.get_running_loop().call_later(left_s, self._deliver)
            return
        # The oldest, whichever timer this is: timers that are due together may fire in any order.
        receive, message = self._under_way.popleft()
        if self.open:
            receive(*message)

    def close(self) -> None:
        self.open = False


class LightWorker:
    """``RolloutWorkerProtocol`` and its buffer, called on the trainer's blocking stack."""

    def __init__(
        self,
        scenario: Scenario,
        start: WorkerStart,
        engines: Sequence[Engine],
        trainer: Life,
        life: Life,
        bridge: GreenletBridge,
        strike: Strike,
        worker: type[RolloutWorker] = RolloutWorker,
        stalls: Stalls | None = None,
        trainer_stalls: Stalls | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.stalls = stalls or Stalls(clock)
        self.rollout_buffer: RolloutBuffer = self
        self._trainer = trainer
        self._life = life
        self._bridge = bridge
        self._to_trainer, self._to_worker = Channel(trainer_stalls), Channel(self.stalls)
        self._items: deque[RolloutGroup | DroppedGroup] = deque()
        self._arrival = asyncio.Event()
        self._failure: WorkerError | None = None
        self._gone_told = False
        self._stopped = False
        self._running: asyncio.Task[None] | None = None
        self._clock = clock
        self._progress = -1
        self._moved_s = self._waited_until_s = 0.0
        self._queue = ChannelQueue(scenario.queue_capacity, self._send, life)
        self._worker = worker(
            engines,
            SeededPrompts(scenario.seed, start.cursor, scenario.prompt_tokens),
            SeededRewards(scenario, strike),
            self._queue,
            life,
            worker_settings(scenario),
            term=start.term,
            version=start.version,
            heartbeat=lambda progress, blocked_by: self._to_trainer.send(self._beaten, progress),
        )
        self._worker.fence_engines(start.fenced)

    def start(self) -> None:
        self._trainer.emit(MemberStarted(member=WORKER, role="worker", incarnation=self._life.incarnation))
        self._life.observe(self._trainer.last_id)
        work = self.stalls.within(self._worker.run())
        self._running = asyncio.get_running_loop().create_task(work, name="worker")
        self._moved_s = self._waited_until_s = self._clock()
        self._running.add_done_callback(self._ended)

    def update_model_version(self, version: int) -> None:
        cause = self._trainer.last_id

        def receive() -> None:
            self._life.observe(cause)
            self._worker.update_model_version(version)

        self._to_worker.send(receive)

    def fence_engines(self, names: Sequence[str]) -> None:
        self._to_worker.send(self._worker.fence_engines, tuple(names))

    def stop(self) -> None:
        if self._running is None or self._stopped:
            return
        self._stopped = True
        self._to_worker.send(self._worker.stop)
        try:
            self._bridge.call(self._wait_for_end(), STOP_S)
        except PhaseTimeout:
            self.crash()
        if self._failure is not None:  # it died when nobody waited for its samples
            self._tell_gone()
        else:
            self._trainer.emit(MemberStopped(member=WORKER))
        self._life.end()

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutGroup | DroppedGroup:
        """Raises ``queue.Empty`` in time; ``WorkerError`` or ``WorkerDied`` as soon as there is a reason."""
        if self._clock() - self._waited_until_s > 1.0:
            self._moved_s = self._clock()  # the trainer was busy: it only begins to wait
        if not self._items:
            self._bridge.call(self._wait_for_item(timeout if timeout else 0.0), STOP_S)
        self._waited_until_s = self._clock()
        if not self._items:
            self._raise_if_gone()
            self._raise_if_stalled()
            raise queue.Empty
        item = self._items.popleft()
        if isinstance(item, RolloutGroup):
            self._to_worker.send(self._queue.taken)
        return item

    def crash(self) -> bool:
        """The process is killed. False when it was not running."""
        if self._running is None or not self._life.alive:
            return False
        self._life.end()
        self.stalls.end()
        self._to_trainer.close()
        self._to_worker.close()
        self._failure = WorkerDied("the rollout worker was killed by SIGKILL; what it had in flight is lost")
        self._running.cancel()
        self._arrival.set()
        return True

    # --- inside ---------------------------------------------------------------------------------------

    def _send(self, kind: str, item: RolloutGroup | DroppedGroup) -> None:
        self._to_trainer.send(self._arrived, item, self._life.last_id)

    def _arrived(self, item: RolloutGroup | DroppedGroup, cause: str) -> None:
        self._trainer.observe(cause)
        self._items.append(item)
        self._moved_s = self._clock()
        self._arrival.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Its last words, behind the items that it has sent."""
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, GrpoLabError):
            raise error  # a bug: it must end the simulation
        if error is not None:
            words = f"{type(error).__name__}: {error}"
            self._to_trainer.send(self._failed, words, self._life.last_id)

    def _failed(self, words: str, cause: str) -> None:
        self._trainer.observe(cause)
        self._failure = WorkerError(words)
        self._arrival.set()

    def _raise_if_gone(self) -> None:
        if self._failure is None or self._stopped:
            return
        self._tell_gone()
        raise self._failure

    def _raise_if_stalled(self) -> None:
        still_s = self._clock() - self._moved_s
        if still_s > HEARTBEAT_STALE_S and not self._stopped:
            raise WorkerStalled(f"the rollout worker has made no progress for {still_s:.1f} s")

    def _beaten(self, progress: int) -> None:
        if progress > self._progress:
            self._progress, self._moved_s = progress, self._clock()

    def _tell_gone(self) -> None:
        if not self._gone_told:
            self._gone_told = True
            self._life.end()
            self._trainer.emit(MemberDied(member=WORKER, detail=str(self._failure)[:500]))

    async def _wait_for_item(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._items and self._failure is None:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            return

    async def _wait_for_end(self) -> None:
        assert self._running is not None
        await asyncio.gather(self._running, return_exceptions=True)
        await asyncio.sleep(2 * CHANNEL_S)  # its last items


def worker_settings(scenario: Scenario) -> RolloutSettings:
    rolling = scenario.sync_scope == "rolling"
    commit_s = LIMITS.sync_s(scenario.sync_attempts, scenario.engines) if rolling else None
    return RolloutSettings(
        num_generations=scenario.generations,
        sampling=SamplingParams(max_tokens=scenario.max_tokens),
        bound=scenario.bound,
        max_inflight=scenario.max_inflight,
        request=RequestSettings(
            timeout_s=max(30.0, 2 * scenario.longest_sample_s),
            engine_gone_after_s=20.0,
            avoid_s=10.0,
            commit_s=commit_s,
        ),
        group_timeout_s=max(120.0, 4 * scenario.longest_sample_s) + (commit_s or 0.0),
        seed=scenario.seed,
    )
