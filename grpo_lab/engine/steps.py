"""The step loop of an engine: one task that runs a step after another, and how requests end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from grpo_lab.engine.block_pool import BlockPool
from grpo_lab.engine.bookkeeping import Decode, TokenBook
from grpo_lab.engine.failures import EngineDead
from grpo_lab.engine.latency import LatencyModel
from grpo_lab.engine.policy import Policy
from grpo_lab.engine.request import Request, WeightIdentity
from grpo_lab.engine.runner import InlineRunner, StepRunner
from grpo_lab.engine.scheduler import Scheduler, StepPlan
from grpo_lab.engine.settings import Counters, EngineConfig, RunState
from grpo_lab.engine.tracing import finished_event, hit_event, step_event
from grpo_lab.errors import EngineError
from grpo_lab.ports import Recorder

StepLatency = Callable[[StepPlan], float]
T = TypeVar("T")


class StepLoop:
    """Steps follow each other as long as there is work and the engine is not frozen.

    A step and whoever has the device (``held``) exclude each other. The loop's clock is the only one that is
    read; where time is simulated, ``timing`` and ``latency`` say how long a step takes (their sum). A step
    that raises makes the engine dead: every request fails with ``EngineDead``, and ``check_alive`` says so
    from then on.
    """

    def __init__(
        self,
        policy: Policy,
        recorder: Recorder,
        config: EngineConfig | None = None,
        runner: StepRunner | None = None,
        latency: StepLatency | None = None,
        decode: Decode | None = None,
        timing: LatencyModel | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.policy = policy
        self.recorder = recorder
        self.runner: StepRunner = runner or InlineRunner()
        self.identity = WeightIdentity()
        self.counters = Counters()
        self.term = 0
        self.weights_lost = ""  # why there are none to compute with; then the next step is the last
        self.on_finish: Callable[[Request], None] | None = None
        self.on_death: Callable[[], None] | None = None
        pool = BlockPool(policy.num_blocks, self.config.prefix_policy, self.config.prefix_caching)
        self.scheduler = Scheduler(
            pool,
            self.config.max_num_seqs,
            self.config.max_batched_tokens,
            cache_outputs=self.config.cache_outputs,
        )
        self._book = TokenBook(policy, self.scheduler, self.counters, decode)
        self._latency = latency
        self._timing = timing
        self._held: deque[Request] = deque()
        self._state = RunState.RUNNING
        self._keep_kv = False
        self._next_step = 1
        self._stepping = False
        self._leaving: list[Request] = []
        self._device = asyncio.Lock()
        self._claims = 0  # how many wait for the device to do something else than a step
        self._wake = asyncio.Event()
        self._changes: list[asyncio.Future[None]] = []
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the step task; needs a running loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"{self.config.name}-steps")

    async def close(self) -> None:
        """Ends the step task; requests still in flight fail with ``EngineDead``."""
        if self._failure is None:
            self._fail(EngineDead(f"{self.config.name} was closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.runner.close()

    def check_alive(self) -> None:
        """Raises ``EngineDead`` once a step has failed."""
        if self._failure is not None:
            raise EngineDead(f"{self.config.name} cannot serve: {self._failure}") from self._failure

    def live(self) -> list[Request]:
        """Every request that has not ended."""
        return [*self.scheduler.in_flight(), *self._held]

    @property
    def failure(self) -> BaseException | None:
        """What made the engine dead, if anything has."""
        return self._failure

    @property
    def next_step(self) -> int:
        """Number of the step that comes next."""
        return self._next_step

    def kill(self, error: BaseException) -> None:
        """The engine is dead from now on, as after a step that failed."""
        self._fail(error)

    # --- the device ---------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Something is about to change what the next step does, or how long it takes. Here a single step is
        all that is ever under way, and what has begun is not changed.
        """

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """While it lasts no step runs and no weight changes."""
        self._claims += 1
        try:
            self.interrupt()
            await self._device.acquire()
        finally:
            self._claims -= 1
        try:
            self._settle()
            yield
        finally:
            self._device.release()

    async def exclusively(self, function: Callable[[], T]) -> T:
        """Runs a blocking function while no step runs and no weight changes."""
        self.check_alive()
        async with self.held():
            return await self.runner.run(function)

    # --- steps --------------------------------------------------------------------------------------

    def _may_step(self) -> bool:
        return self._state is not RunState.FROZEN and self.scheduler.has_work

    async def _run(self) -> None:
        try:
            while True:
                while not self._may_step():
                    self._wake.clear()
                    await self._wake.wait()
                async with self._device:
                    if self._may_step():
                        await self._step()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a failing step must surface at every waiting request
            self._fail(error)

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        began_s, began_seq = loop.time(), self.recorder.next_seq
        plan = self.scheduler.schedule(self.identity.weights)
        self._report_hits(plan)
        if not plan.scheduled:
            raise EngineError("no waiting request fits into the KV blocks")
        if self.weights_lost:
            raise EngineError(f"the weights are gone: {self.weights_lost}")
        self._stepping = True
        try:
            output = await self.runner.run(lambda: self.policy.step(plan.scheduled))
            await self._take_time(plan)
        finally:
            self._stepping = False
        step, self._next_step = self._next_step, self._next_step + 1
        finished = self._book.apply(plan, output, self.identity, step, loop.time())
        self._announce_steps(plan, step, began_seq, loop.time() - began_s)
        self._end(finished)

    async def _take_time(self, plan: StepPlan) -> None:
        await asyncio.sleep(self._duration_s(plan))

    def _duration_s(self, plan: StepPlan) -> float:
        """Of the next step, as it begins."""
        timed_s = self._timing.step_s(plan, self._next_step) if self._timing else 0.0
        return timed_s + (self._latency(plan) if self._latency else 0.0)

    def _announce_steps(
        self, plan: StepPlan, first_step: int, began_seq: int, duration_s: float, steps: int = 1
    ) -> None:
        """``steps`` steps have ended. Every rank took part in all of them."""
        for rank in range(self.config.ranks):
            self.recorder.emit(
                step_event(
                    self.config.name,
                    plan,
                    self.identity,
                    first_step,
                    began_seq,
                    duration_s,
                    steps=steps,
                    shard=rank,
                )
            )

    # --- the end of requests --------------------------------------------------------------------------

    def _end(self, finished: list[Request]) -> None:
        """Nothing runs on blocks of ``finished`` any more, nor of those that were aborted meanwhile."""
        self.scheduler.remove([*finished, *self._leaving])
        self._leaving.clear()
        for request in finished:
            self._finish(request)

    def _settle(self) -> None:
        """Requests are about to be looked at between two steps, or aborted during one."""

    def _report_hits(self, plan: StepPlan) -> None:
        for request, tokens, content in plan.hits:
            self.counters.prefix_hits += tokens
            self.recorder.emit(hit_event(self.config.name, request, tokens, content, self.identity))

    def _finish(self, request: Request) -> None:
        if request.done.done():
            return
        reason = request.finish_reason or "abort"
        self.counters.finished[reason] += 1
        self.recorder.emit(finished_event(self.config.name, request))
        if self.on_finish is not None:
            self.on_finish(request)
        request.done.set_result(None)
        if request.extras.on_token is not None:
            request.extras.on_token()
        self._announce_change()

    def _abort(self, requests: list[Request]) -> None:
        """Ends requests as aborted at once; their blocks are freed when no step uses them."""
        live = [request for request in requests if request.finish_reason is None]
        if not live:
            return
        self._settle()
        for request in live:
            request.finish_reason = "abort"
        gone = {id(request) for request in live}
        self._held = deque(request for request in self._held if id(request) not in gone)
        if self._stepping:
            self._leaving += live
        else:
            self.scheduler.remove(live)
        for request in live:
            self._finish(request)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        message = f"{self.config.name} cannot serve: {error}"
        for request in [*self.scheduler.in_flight(), *self._held]:
            if not request.done.done():
                request.done.set_exception(EngineDead(message))
                request.done.exception()  # a request whose client is gone has nobody to retrieve it
                if request.extras.on_token is not None:
                    request.extras.on_token()
        self._announce_change()
        if self.on_death is not None:
            self.on_death()

    def _announce_change(self) -> None:
        """Lets every drain look again."""
        changes, self._changes = self._changes, []
        for change in changes:
            if not change.done():
                change.set_result(None)
