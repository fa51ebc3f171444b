"""The machine that an engine runs on: starts it, kills it, starts it again, and lets it stall."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.request import Request, Scheduled, StepOutput
from grpo_lab.engine.rl_state import ReceiverFactory, RlState
from grpo_lab.engine.sampling import uniforms
from grpo_lab.engine.scheduler import StepPlan
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.errors import EngineUnreachable
from grpo_lab.events import MemberDied, MemberStarted, MemberStopped
from grpo_lab.ports import Recorder
from grpo_lab.sim.life import Life
from grpo_lab.sim.scenario import Scenario

T = TypeVar("T")

VOCABULARY = 64
_PARETO_EXPONENT = 1.2
_PER_SEQUENCE, _PER_PREFILL_TOKEN = 0.01, 0.002  # of a step without a batch


def model_score(weights: Mapping[str, Tensor], sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Stands for logprobs: a function of all weights and of the tokens, as a forward pass is. Every element
    counts by its place, so that two tensors of one shape in each other's place give other scores.
    """
    total = 0.0
    for number, name in enumerate(sorted(weights), start=1):
        values = weights[name].flatten().double()
        total += number * float(values @ torch.linspace(1, 2, len(values), dtype=torch.float64))
    return [[-abs(total) * (1 + token) / VOCABULARY for token in ids[1:]] for ids in sequences]


class SimulatedPolicy(SyntheticPolicy):
    """Synthetic tokens, with the scenario's distribution of lengths and scores that depend on the weights."""

    def __init__(self, scenario: Scenario, shapes: Mapping[str, tuple[int, ...]]) -> None:
        mean = 1e9 if scenario.lengths != "geometric" else float(scenario.mean_tokens)
        super().__init__(VOCABULARY, mean, num_blocks=scenario.kv_blocks, shapes=shapes)
        self._lengths = scenario.lengths
        self._mean_tokens = scenario.mean_tokens

    def step(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        output = super().step(scheduled)
        if self._lengths != "geometric":
            drawing = [item.request for item in scheduled if item.samples]
            for row, request in enumerate(drawing):
                if request.num_output_tokens + 1 >= self._length(request):
                    output.token_ids[row] = self.vocab_size - 1
        return output

    def _length(self, request: Request) -> float:
        if self._lengths == "fixed":
            return self._mean_tokens
        u = float(uniforms([request.sample_key], [0])[0])
        return self._mean_tokens * float((1.0 - u) ** (-1.0 / _PARETO_EXPONENT)) / 2

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return model_score(self.parameters(), sequences)


class Incarnation:
    """One run of the engine's process."""

    def __init__(self, life: Life, core: EngineCore, rl: RlState) -> None:
        self.life = life
        self.core = core
        self.rl = rl
        self._handlers: dict[asyncio.Task[Any], None] = {}

    async def handle(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Serves one request. Raises ``EngineUnreachable`` when the process dies meanwhile."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._handlers[task] = None
        task.add_done_callback(lambda done: self._handlers.pop(done, None))
        try:
            return await task
        except asyncio.CancelledError:
            if self.life.alive or not task.cancelled():
                raise
            raise EngineUnreachable(f"{name}: connection reset, the engine has died") from None

    def kill(self) -> None:
        self.life.end()
        for task in list(self._handlers):
            task.cancel()

    async def tear_down(self) -> None:
        await self.core.close()
        await self.rl.close()


class EngineHost:
    """Owns the incarnations of one engine; a restarted one holds the weights that it had on disk."""

    def __init__(
        self,
        name: str,
        scenario: Scenario,
        shapes: Mapping[str, tuple[int, ...]],
        recorder: Recorder,
        supervisor: Recorder,
        receivers: Mapping[str, ReceiverFactory],
        *,
        policy: type[SimulatedPolicy] = SimulatedPolicy,
        core: type[EngineCore] = EngineCore,
        rl: type[RlState] = RlState,
    ) -> None:
        self._types = (policy, core, rl)
        self.name = name
        self._scenario = scenario
        self._shapes = shapes
        self._recorder = recorder
        self._supervisor = supervisor
        self._receivers = receivers
        self._starts = 0
        self._stalled_until_s = 0.0
        self._endings: list[asyncio.Task[None]] = []
        self.incarnation: Incarnation | None = None

    def start(self) -> None:
        self._starts += 1
        start_id = f"start-{self._starts}"
        self._supervisor.emit(
            MemberStarted(member=self.name, role="engine", incarnation=self._starts, start=start_id)
        )
        self._recorder.observe(self._supervisor.last_id)
        life = Life(self._recorder, self._starts)
        policy_type, core_type, rl_type = self._types
        policy = policy_type(self._scenario, self._shapes)
        config = EngineConfig(
            self.name,
            max_num_seqs=self._scenario.slots,
            max_batched_tokens=256,
            seed=self._scenario.seed,
            start_id=start_id,
        )
        core = core_type(policy, life, config, latency=self._step_latency(life))
        core.start()
        self.incarnation = Incarnation(life, core, rl_type(core, self._receivers))

    def crash(self, detail: str) -> bool:
        """The process is gone, with all that it had. False when there was none."""
        gone, self.incarnation = self.incarnation, None
        if gone is None:
            return False
        gone.kill()
        self._supervisor.observe(self._recorder.last_id)
        self._supervisor.emit(MemberDied(member=self.name, detail=detail))
        self._tear_down(gone)
        return True

    async def stop(self) -> None:
        gone, self.incarnation = self.incarnation, None
        if gone is not None:
            await gone.tear_down()
            gone.life.end()
            self._supervisor.observe(self._recorder.last_id)
            self._supervisor.emit(MemberStopped(member=self.name))
        await asyncio.gather(*self._endings)

    def stall(self, duration_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        self._stalled_until_s = max(self._stalled_until_s, now_s + duration_s)

    async def not_stalled(self) -> None:
        while (left_s := self._stalled_until_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left_s)

    def _step_latency(self, life: Life) -> Callable[[StepPlan], float]:
        def latency(plan: StepPlan) -> float:
            now_s = asyncio.get_running_loop().time()
            batch = 1.0 + _PER_SEQUENCE * len(plan.scheduled) + _PER_PREFILL_TOKEN * plan.prefill_tokens
            stalled_s = max(0.0, self._stalled_until_s - now_s) if life.alive else 0.0
            return self._scenario.token_s * batch + stalled_s

        return latency

    def _tear_down(self, gone: Incarnation) -> None:
        task = asyncio.get_running_loop().create_task(gone.tear_down(), name=f"end of {self.name}")
        self._endings.append(task)
