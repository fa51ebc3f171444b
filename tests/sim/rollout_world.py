"""A small world for the rollout worker: an engine with its own faults, a bounded queue, rewards."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from grpo_lab.errors import EngineRefused, EngineUnreachable, RewardError
from grpo_lab.events import GroupQueued
from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.protocol.rollout_worker import RolloutSettings, RolloutWorker
from grpo_lab.protocol.sample_request import RequestSettings
from grpo_lab.types import Completion, EngineCapabilities, RolloutGroup, SamplingParams, VersionSpan

GENERATIONS = 2


class TokenEngine:
    """Gives one token every 0.1 s. ``version`` may change between any two tokens.

    ``trouble`` maps a prompt index to a function that raises before the first token; ``pause_abort()``
    returns what runs as unfinished and holds new requests until ``resume()``.
    """

    def __init__(self, name="engine-0", version=1, token_s=0.1):
        self.name = name
        self.capabilities = EngineCapabilities(True, True, True, True, True, True)
        self.version = version
        self.token_s = token_s
        self.requests = []
        self.running = 0
        self.trouble = {}
        self.alive = True
        self._aborts = 0
        self._resumed = asyncio.Event()
        self._resumed.set()

    def pause_abort(self):
        self._aborts += 1
        self._resumed.clear()

    def resume(self):
        self._resumed.set()

    async def generate(self, request):
        await asyncio.sleep(0.01)
        if not self.alive:
            raise EngineUnreachable(f"{self.name}: connection refused")
        self.requests.append(request)
        trouble = self.trouble.get(request.prompt_token_ids[0])
        if trouble is not None:
            trouble()
        self.running += 1
        try:
            return await self._decode(request)
        finally:
            self.running -= 1

    async def _decode(self, request):
        await self._resumed.wait()
        aborts, versions = self._aborts, []
        while len(versions) < request.sampling.max_tokens and self._aborts == aborts:
            await asyncio.sleep(self.token_s)
            if not self.alive:
                raise EngineUnreachable(f"{self.name}: connection reset")
            if self._aborts == aborts:
                versions.append(self.version)
        place = len(request.prompt_token_ids)
        tokens = tuple(100 + place + index for index in range(len(versions)))
        logprobs = tuple(-0.001 * token for token in tokens)
        reason = "length" if len(versions) == request.sampling.max_tokens else "abort"
        return Completion(request.request_id, tokens, logprobs, reason, spans_of(versions), self.name)


def spans_of(versions):
    spans = []
    for place, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(1, version, spans[-1].start, place + 1)
        else:
            spans.append(VersionSpan(1, version, place, place + 1))
    return tuple(spans)


def refuse(status):
    def trouble():
        raise EngineRefused(f"HTTP {status}: said the server", status)

    return trouble


class Once:
    """Trouble that passes after ``times``."""

    def __init__(self, trouble, times=1):
        self.trouble, self.times = trouble, times

    def __call__(self):
        if self.times > 0:
            self.times -= 1
            self.trouble()


class Prompts:
    """Prompt i is the tokens (i, i)."""

    def __init__(self):
        self.index = 0

    def next(self):
        index, self.index = self.index, self.index + 1
        return index, (index, index), {"index": index}


class Rewards:
    """``answers`` maps a prompt index to what is returned, or to an exception that is raised."""

    def __init__(self, answers=None, delay_s=0.05):
        self.answers, self.delay_s = answers or {}, delay_s

    async def score(self, row, completions):
        await asyncio.sleep(self.delay_s)
        answer = self.answers.get(row["index"], 1.0)
        if isinstance(answer, Exception):
            raise answer
        return [(answer, (answer,)) for _ in completions]


def failing_reward(index=None):
    return RewardError(f"reward function score raised ValueError({index})")


@dataclass
class BoundedQueue:
    """``taken`` groups are those that the trainer took; dropped groups take no room."""

    capacity: int
    recorder: object
    items: deque = field(default_factory=deque)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    come: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def depth(self):
        return sum(1 for item in self.items if isinstance(item, RolloutGroup))

    async def put(self, item):
        if isinstance(item, RolloutGroup):
            while self.depth >= self.capacity:
                self.room.clear()
                await self.room.wait()
        self.items.append(item)
        self.come.set()
        if isinstance(item, RolloutGroup):
            assert self.depth <= self.capacity
            event = GroupQueued(term=item.term, group=item.group_id, number=item.number, depth=self.depth)
            self.recorder.emit(event)

    async def take(self):
        while not self.items:
            self.come.clear()
            await self.come.wait()
        self.room.set()
        return self.items.popleft()


class RolloutWorld:
    """``beats`` collects (time, progress, blocked_by)."""

    def __init__(
        self,
        context,
        engines=None,
        *,
        bound=None,
        capacity=100,
        rewards=None,
        prompts=None,
        max_inflight=8,
        tokens=4,
        request=None,
        **settings,
    ):
        self.context = context
        self.recorder = context.recorder("worker")
        self.engines = engines or [TokenEngine()]
        self.queue = BoundedQueue(capacity, self.recorder)
        self.beats = []
        self.worker = RolloutWorker(
            self.engines,
            prompts or Prompts(),
            rewards or Rewards(),
            self.queue,
            self.recorder,
            RolloutSettings(
                num_generations=GENERATIONS,
                sampling=SamplingParams(max_tokens=tokens),
                bound=bound or StalenessBound("drop", groups_per_step=2, max_staleness=1),
                max_inflight=max_inflight,
                request=request or RequestSettings(timeout_s=20, retry_delay_s=0.2, engine_gone_after_s=5),
                **settings,
            ),
            term=1,
            version=1,
            heartbeat=lambda progress, by: self.beats.append((context.now_s, progress, by)),
        )

    async def run_until(self, groups=None, seconds=None):
        """Takes ``groups`` items (or waits), stops, and returns the items. Raises what the worker raised."""
        running = asyncio.create_task(self.worker.run(), name="worker")
        taken = []
        try:
            if seconds is not None:
                await asyncio.sleep(seconds)
            while groups is not None and len(taken) < groups and not running.done():
                take = asyncio.create_task(self.queue.take(), name="take")
                await first_of(running, take)
                if take.done():
                    taken.append(take.result())
                else:
                    take.cancel()
        finally:
            self.worker.stop()
            await running
        return taken


async def first_of(*tasks):
    """Until one of them has ended."""
    ended = asyncio.Event()
    for task in tasks:
        task.add_done_callback(lambda _: ended.set())
    await ended.wait()


def check_conservation(records):
    """Every admitted sample ends once: its group is queued, or dropped with it. Returns drops by reason."""
    admitted, ends, reasons = [], Counter(), Counter()
    members = {}
    for record in records:
        event = record.event
        if event.kind == "group_admitted":
            admitted += event.samples
            members[event.group] = event.samples
        elif event.kind == "group_queued":
            ends.update(members[event.group])
        elif event.kind == "group_dropped":
            assert event.samples == members[event.group]
            ends.update(event.samples)
            reasons[event.reason] += 1
    assert len(set(admitted)) == len(admitted)
    assert ends == Counter(admitted), f"ends that are not one each: {ends - Counter(admitted)}"
    return reasons
