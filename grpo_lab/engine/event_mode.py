"""Event mode: the engine's loop runs once for each change of the batch, not once for each step.

What happens is what happens in step mode: the same scheduler, blocks, tokens, versions and times. Only the
records differ, as steps between two changes of the batch are told as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_lab.engine.cohort import Cohort
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.drawn import DrawnPolicy
from grpo_lab.engine.failures import BadRequest
from grpo_lab.engine.latency import LatencyModel
from grpo_lab.engine.policy import Policy
from grpo_lab.engine.request import NO_EXTRAS, Extras, Request, Scheduled
from grpo_lab.engine.scheduler import StepPlan
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.engine.steps import StepLatency
from grpo_lab.errors import ConfigError, EngineError
from grpo_lab.ports import Recorder
from grpo_lab.types import RequestKind, SamplingParams


class Jump:
    """Steps that run one after another without a change of the batch; ``ends_s`` are the times of their ends.

    ``cut`` makes the step that is under way the last one: nothing that arrives can change a step that has
    begun, and no further one begins without it.
    """

    def __init__(self, ends_s: np.ndarray) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends_s = ends_s
        self.steps = len(ends_s)
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._loop.call_at(float(ends_s[-1]), self._end)

    @property
    def ended_steps(self) -> int:
        """How many have ended by now."""
        return int(np.searchsorted(self._ends_s[: self.steps], self._loop.time(), side="right"))

    def end_s(self, steps: int) -> float:
        return float(self._ends_s[steps - 1])

    def cut(self) -> None:
        steps = min(self.steps, self.ended_steps + 1)
        if steps < self.steps:
            self.steps = steps
            self._timer.cancel()
            self._timer = self._loop.call_at(self.end_s(steps), self._end)

    def drop(self, steps: int) -> None:
        """The first ``steps`` are booked: the rest is the jump from now on."""
        self._ends_s = self._ends_s[steps:]
        self.steps -= steps

    def close(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


@dataclass(slots=True)
class _UnderWay:
    """The steps that run now: ``plan`` each, from ``began_s`` on."""

    plan: StepPlan
    jump: Jump
    began_s: float
    began_seq: int


class EventCore(EngineCore):
    """``EngineCore`` that jumps from one change of the batch to the next.

    Sequences that only decode form a ``Cohort``. A step with anything else in it (prompts, chunks of them,
    recomputation) is run by itself, beside the cohort. A jump ends at the first end of a member, before a
    step that has too few free blocks, and where an arrival, abort, pause or weight switch cuts it. A step
    that must preempt is one of step mode: the cohort dissolves, and forms again.

    Its policy knows a sample's length when it begins (``DrawnPolicy``), or ``ConfigError``. Requests that
    look at every token (stop strings, top logprobs, streams) are refused with ``BadRequest``. ``latency``
    is asked once for each jump and added to its first step: whoever changes it calls ``interrupt``.

    With ``cache_outputs`` every admission dissolves the cohort, as what its members have said may be found.
    """

    def __init__(
        self,
        policy: Policy,
        recorder: Recorder,
        config: EngineConfig | None = None,
        *,
        timing: LatencyModel,
        latency: StepLatency | None = None,
    ) -> None:
        if not isinstance(policy, DrawnPolicy):
            words = "one with final_tokens and draw, for event mode"
            raise ConfigError("policy", type(policy).__name__, words)
        super().__init__(policy, recorder, config, latency=latency, timing=timing)
        self._model, self._drawn = timing, policy
        self._cohort = Cohort(policy, self.scheduler, self._book)
        self._under_way: _UnderWay | None = None

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        kind: RequestKind = "rollout",
        term: int = 0,
        stop_strings: tuple[str, ...] = (),
        top_logprobs: int = 0,
        extras: Extras = NO_EXTRAS,
    ) -> Request:
        if stop_strings or top_logprobs or extras != NO_EXTRAS:
            raise BadRequest("event mode has no single tokens: what looks at them needs step mode")
        request = super().submit(prompt_token_ids, sampling, request_id, kind, term)
        self._drawn.begin(request)
        return request

    def interrupt(self) -> None:
        if self._under_way is not None:
            self._under_way.jump.cut()

    # --- steps --------------------------------------------------------------------------------------

    async def _step(self) -> None:
        cohort, scheduler = self._cohort, self.scheduler
        if not cohort.steps_within(1, scheduler.pool.num_free) or self._may_find_outputs():
            self._settle()
        cohort.cover(1)
        plan = scheduler.schedule(self.identity.weights, len(cohort), cohort.context_tokens)
        self._report_hits(plan)
        if not plan.sequences:
            raise EngineError("no waiting request fits into the KV blocks")
        if self.weights_lost:
            raise EngineError(f"the weights are gone: {self.weights_lost}")
        # After a preemption nothing was admitted; who waits for the device waits for this step alone.
        alone = plan.scheduled or plan.preempted or self._claims
        await self._run_steps(plan, 1 if alone else self._horizon())

    def _may_find_outputs(self) -> bool:
        scheduler = self.scheduler
        room = scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs
        return bool(room and scheduler.cache_outputs and scheduler.pool.caching)

    def _horizon(self) -> int:
        """Steps until the batch changes by itself; the first of them is covered."""
        most = self._cohort.steps_to_next_end()
        return 1 + self._cohort.steps_within(most - 1, self.scheduler.pool.num_free)

    async def _run_steps(self, plan: StepPlan, steps: int) -> None:
        began_s = asyncio.get_running_loop().time()
        times_s = np.empty(steps + 1)
        times_s[0], times_s[1:] = began_s, self._model.durations_s(plan, self._next_step, steps)
        if self._latency is not None:
            times_s[1] += self._latency(plan)
        # Summed in the order of step mode, so that both come to the same times to the last bit.
        jump = Jump(np.cumsum(times_s)[1:])
        under_way = self._under_way = _UnderWay(plan, jump, began_s, self.recorder.next_seq)
        self._stepping = True
        try:
            await jump.over
        finally:
            self._stepping = False
            self._under_way = None
            jump.close()
        self._book_last(under_way)

    def _book_last(self, under_way: _UnderWay) -> None:
        """The jump is over: its steps, and what they ended."""
        plan, steps, now_s = under_way.plan, under_way.jump.steps, asyncio.get_running_loop().time()
        drawing = [item.request for item in plan.scheduled if item.samples]
        self._cohort.cover(steps)
        self._cohort.advance(steps)
        last = self._next_step + steps - 1
        finished = self._cohort.take_finished(self.identity, last, now_s)
        for request in finished:
            request.finish_reason = self._book.ending(request)
            assert request.finish_reason is not None, f"{request.request_id} ends without a reason"
        if plan.scheduled:
            output = self.policy.step(plan.scheduled)
            finished += self._book.apply(plan, output, self.identity, last, now_s)
            self.counters.steps -= 1  # counted with all others
        self._announce(under_way, steps)
        for request in drawing:
            if request.finish_reason is None:
                self._cohort.join(request)
        self._end(finished)

    def _announce(self, under_way: _UnderWay, steps: int) -> None:
        first, self._next_step = self._next_step, self._next_step + steps
        self.counters.steps += steps
        duration_s = under_way.jump.end_s(steps) - under_way.began_s
        self._announce_steps(under_way.plan, first, under_way.began_seq, duration_s, steps)

    def _settle(self) -> None:
        """Books all steps that have ended, and makes the one under way, if any, one of step mode."""
        cohort, under_way, now_s = self._cohort, self._under_way, asyncio.get_running_loop().time()
        if under_way is None:
            cohort.dissolve(self.identity, self._next_step - 1, now_s)
            return
        jump = under_way.jump
        jump.cut()
        if ended := min(jump.ended_steps, jump.steps - 1):
            cohort.cover(ended + 1)
            cohort.advance(ended)
            self._announce(under_way, ended)
            under_way.began_s, under_way.began_seq = jump.end_s(ended), self.recorder.next_seq
            jump.drop(ended)
        members = cohort.dissolve(self.identity, self._next_step - 1, now_s)
        under_way.plan.scheduled[:0] = [
            Scheduled(request, request.num_computed_tokens, 1) for request in members
        ]
