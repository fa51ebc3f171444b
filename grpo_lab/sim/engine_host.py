"""The machine that an engine runs on: starts it, kills it, starts it again, and lets it stall."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.drawn import RepeatPolicy, lognormal_quantile
from grpo_lab.engine.event_mode import EventCore
from grpo_lab.engine.latency import LatencyModel
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.request import Request, Scheduled, StepOutput, sample_key
from grpo_lab.engine.rl_state import ReceiverFactory, RlState
from grpo_lab.engine.sampling import uniforms
from grpo_lab.engine.scheduler import StepPlan
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.errors import EngineUnreachable
from grpo_lab.events import MemberDied, MemberStarted, MemberStopped
from grpo_lab.ports import Recorder
from grpo_lab.protocol.sample_request import CONTINUATION_SEED_STRIDE
from grpo_lab.sim.life import Life
from grpo_lab.sim.scenario import PREFILL_SHARE, SEQUENCE_SHARE, SHARED_PREFIX_TOKENS, Scenario

T = TypeVar("T")

VOCABULARY = 64
_PARETO_EXPONENT = 1.2


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

    def outputs(self, request: Request, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, logprobs = super().outputs(request, start, count)
        if self._lengths != "geometric":
            tokens[np.arange(start + 1, start + count + 1) >= self._length(request)] = self.vocab_size - 1
        return tokens, logprobs

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


class WordlessPolicy(RepeatPolicy):
    """``SimulatedPolicy`` of lengths alone. What is left of a sample that was cut off is not drawn again:
    if it were, every cut would make long samples shorter.
    """

    def __init__(self, scenario: Scenario, shapes: Mapping[str, tuple[int, ...]], max_model_len: int) -> None:
        median = scenario.mean_tokens * math.exp(-(scenario.length_sigma**2) / 2)
        quantile = lognormal_quantile(median, scenario.length_sigma)
        super().__init__(quantile, VOCABULARY, max_model_len, scenario.kv_blocks, shapes)
        self._seed = scenario.seed
        self._max_tokens = scenario.max_tokens

    def _drawn_length(self, request: Request) -> int:
        _, _, continuation = request.request_id.partition(".c")
        seed = request.sampling.seed
        if not continuation or seed is None:
            return super()._drawn_length(request)
        first_seed = seed - int(continuation) * CONTINUATION_SEED_STRIDE
        done = self._max_tokens - request.sampling.max_tokens
        return self._length_of(sample_key(self._seed, "", first_seed)) - done

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
        self._timing = LatencyModel(
            scenario.token_s,
            prefill_token_s=scenario.token_s * PREFILL_SHARE,
            sequence_s=scenario.token_s * SEQUENCE_SHARE,
            context_token_s=scenario.context_token_s,
            jitter=scenario.step_jitter,
            seed=random.Random(f"{scenario.seed} steps of {name}").getrandbits(64),
        )
        self.incarnation: Incarnation | None = None

    @property
    def stock(self) -> bool:
        return self._scenario.stock

    def start(self) -> None:
        self._starts += 1
        start_id = f"start-{self._starts}"
        self._supervisor.emit(
            MemberStarted(member=self.name, role="engine", incarnation=self._starts, start=start_id)
        )
        self._recorder.observe(self._supervisor.last_id)
        life = Life(self._recorder, self._starts)
        policy_type, core_type, rl_type = self._types
        policy = self._policy(policy_type)
        config = EngineConfig(
            self.name,
            max_num_seqs=self._scenario.slots,
            max_batched_tokens=self._scenario.batch_tokens,
            seed=self._scenario.seed,
            start_id=start_id,
            prefix_policy=self._scenario.prefix_policy,
            cache_outputs=self._scenario.cache_outputs,
            ranks=self._scenario.engine_ranks,
        )
        if self._scenario.engine_mode == "event" and core_type is EngineCore:
            core_type = EventCore
        core = core_type(policy, life, config, timing=self._timing, latency=self._stall_s(life))
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
        if self.incarnation is not None:
            self.incarnation.core.interrupt()

    async def not_stalled(self) -> None:
        while (left_s := self._stalled_until_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left_s)

    def _stall_s(self, life: Life) -> Callable[[StepPlan], float]:
        def stall_s(_: StepPlan) -> float:
            left_s = self._stalled_until_s - asyncio.get_running_loop().time()
            return max(0.0, left_s) if life.alive else 0.0

        return stall_s

    def _policy(self, policy_type: type[SimulatedPolicy]) -> SyntheticPolicy:
        scenario = self._scenario
        if scenario.lengths != "lognormal":
            return policy_type(scenario, self._shapes)
        longest = scenario.max_tokens + scenario.prompt_tokens + SHARED_PREFIX_TOKENS
        return WordlessPolicy(scenario, self._shapes, longest)

    def _tear_down(self, gone: Incarnation) -> None:
        task = asyncio.get_running_loop().create_task(gone.tear_down(), name=f"end of {self.name}")
        self._endings.append(task)
