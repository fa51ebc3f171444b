"""A simulated cluster with calibrated times: the protocol's own code, a light trainer, measured durations.

Besides what each part costs alone it has what they cost each other on shared cores: a model step is slower
while the trainer computes, an optimizer step while engines do, requests hold the engine up when they arrive
and when they are answered, and the worker sends and takes one at a time.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.latency import LatencyModel
from grpo_lab.engine.policy import Policy
from grpo_lab.engine.request import Request
from grpo_lab.engine.scheduler import StepPlan
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.events import Record
from grpo_lab.harness.calibration import Calibration, Spread
from grpo_lab.ports import Engine, PromptSource, Recorder, RewardModel, SampleQueue
from grpo_lab.protocol.rollout_worker import RolloutSettings, RolloutWorker
from grpo_lab.sim.engine_host import VOCABULARY, SimulatedPolicy
from grpo_lab.sim.greenlet_bridge import virtual_sleep
from grpo_lab.sim.light_trainer import LightTrainer
from grpo_lab.sim.network import SimulatedEngine, SimulatedTransport
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import Scenario
from grpo_lab.sim.world import simulate
from grpo_lab.types import (
    Bucket,
    Completion,
    GenerateRequest,
    JsonDict,
    PauseMode,
    RolloutGroup,
    SamplingParams,
    SyncId,
)

SLICES = 40
"""An optimizer step looks so often how many engines compute beside it."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Cluster:
    """What to simulate: the scenario, whose own times do not count, and the bucket size of the weights."""

    scenario: Scenario
    bucket_bytes: int


def simulate_calibrated(cluster: Cluster, calibration: Calibration, *, checked: bool = False) -> list[Record]:
    """The trace of the cluster; its randomness is the scenario's seed. Raises what ``simulate`` raises."""
    records: list[Record] = []
    parts = _parts(Machine(cluster, calibration))
    simulate(cluster.scenario, parts=parts, records=records, checked=checked)
    return records


class Line:
    """The worker's loop: it takes one thing after the other."""

    def __init__(self) -> None:
        self._free_s = 0.0

    async def passed(self, service_s: float, latency_s: float) -> None:
        """Waits for its turn, is served, and is ``latency_s`` on its way."""
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(now_s, self._free_s) + service_s
        await asyncio.sleep(self._free_s - now_s + latency_s)


@dataclass(slots=True)
class Machine:
    """What the actors of one simulation share: who computes now, the request lines, and random numbers."""

    cluster: Cluster
    calibration: Calibration
    training: bool = False
    stepping: int = 0
    line: Line = field(default_factory=Line)
    _sources: dict[str, random.Random] = field(default_factory=dict)
    _lengths: dict[str, int] = field(default_factory=dict)
    _shared: dict[str, float] = field(default_factory=dict)

    def draw(self, what: str, spread: Spread) -> float:
        """Seconds of a gamma distribution with this mean and deviation, from a source of ``what``'s own."""
        if spread.mean_s <= 0 or spread.sd_s <= 0:
            return max(spread.mean_s, 0.0)
        shape = (spread.mean_s / spread.sd_s) ** 2
        return self.source(what).gammavariate(shape, spread.mean_s / shape)

    def source(self, what: str) -> random.Random:
        if what not in self._sources:
            self._sources[what] = random.Random(f"{self.cluster.scenario.seed} {what}")
        return self._sources[what]

    def length(self, sample: str) -> int:
        """Tokens of a completion: a Gaussian copula gives samples of one group their correlation."""
        if sample not in self._lengths:
            group, seed = sample.split(".s", maxsplit=1)[0], self.cluster.scenario.seed
            rho = self.calibration.lengths.within_group_correlation
            if group not in self._shared:
                self._shared[group] = random.Random(f"{seed} lengths {group}").gauss()
            own = random.Random(f"{seed} length {sample}").gauss()
            u = _NORMAL.cdf(math.sqrt(rho) * self._shared[group] + math.sqrt(1.0 - rho) * own)
            self._lengths[sample] = self.calibration.lengths.tokens(min(u, 1.0 - 1e-9))
        return self._lengths[sample]


class CalibratedPolicy(SimulatedPolicy):
    """Lengths as measured. A sample that a pause cut off goes on for what is left of it."""

    machine: Machine

    def _length(self, request: Request) -> float:
        sample, _, continuation = request.request_id.partition(".c")
        done = self.machine.cluster.scenario.max_tokens - request.sampling.max_tokens if continuation else 0
        return max(1, self.machine.length(sample) - done)


class CalibratedCore(EngineCore):
    """Steps that take what the calibration says, longer where trainer and requests want the cores too."""

    machine: Machine

    def __init__(
        self, policy: Policy, recorder: Recorder, config: EngineConfig, *, timing: LatencyModel, **rest: Any
    ) -> None:
        fit = self.machine.calibration.engine_step
        calibrated = LatencyModel(
            max(fit.base_s, 1e-6),
            fit.prefill_token_s,
            fit.sequence_s,
            fit.context_token_s,
            jitter=fit.jitter,
            seed=timing.seed,
        )
        super().__init__(policy, recorder, config, timing=calibrated, **rest)
        self._fit = fit
        self._admitted = self._finished = 0
        self._ended_s = 0.0

    def submit(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *words: Any, **options: Any
    ) -> Request:
        self._admitted += 1
        return super().submit(prompt_token_ids, sampling, *words, **options)

    async def _take_time(self, plan: StepPlan) -> None:
        loop, fit = asyncio.get_running_loop(), self._fit
        idle_s = loop.time() - self._ended_s
        answering_s = max(0.0, self._finished * fit.finished_s - idle_s)
        self._finished = 0
        self.machine.stepping += 1
        try:
            await asyncio.sleep((self._duration_s(plan) + answering_s) * self._slowdown)
            # Those that come while these are taken in hold up the next step: else a burst would be one step.
            held_up_s, self._admitted = self._admitted * fit.admitted_s, 0
            await asyncio.sleep(held_up_s * self._slowdown)
        finally:
            self.machine.stepping -= 1
            self._ended_s = loop.time()

    @property
    def _slowdown(self) -> float:
        return 1.0 + self._fit.trainer_slowdown * self.machine.training

    def _finish(self, request: Request) -> None:
        self._finished += not request.done.done()
        super()._finish(request)


class CalibratedEngine(SimulatedEngine):
    """Requests queue on their way out and back; control calls take what they took."""

    machine: Machine

    async def generate(self, request: GenerateRequest) -> Completion:
        fit, line = self.machine.calibration.requests, self.machine.line
        await line.passed(fit.dispatch_s, fit.request_latency_s)
        completion = await super().generate(request)
        await line.passed(fit.reply_s, fit.reply_latency_s)
        return completion

    async def start_id(self) -> str:
        await self._take("other")
        return await super().start_id()

    async def pause(self, mode: PauseMode, clear_cache: bool, term: int) -> None:
        await super().pause(mode, clear_cache, term)
        await self._take("pause")

    async def start_update(self, sync: SyncId) -> None:
        await self._take("transfer")
        await super().start_update(sync)

    async def resume(self, term: int) -> None:
        await self._take("resume")
        await super().resume(term)

    async def _take(self, phase: str) -> None:
        spread: Spread = getattr(self.machine.calibration.sync, phase)
        await asyncio.sleep(self.machine.draw(f"{self.name} {phase}", spread))


class CalibratedTransport(SimulatedTransport):
    """The simulated weights are one bucket, which takes as long as all buckets of the real ones."""

    machine: Machine

    async def carry(self, member: str, bucket: Bucket) -> Sequence[Bucket]:
        await asyncio.sleep(self.machine.calibration.sync.carry_s(self.machine.cluster.bucket_bytes))
        return [bucket]


class CalibratedTrainer(LightTrainer):
    """Steps by their tokens; the time that they take depends on who computes beside them."""

    machine: Machine

    def _compute(self, groups: Sequence[RolloutGroup]) -> float:
        machine, fit = self.machine, self.machine.calibration.trainer_step
        tokens = sum(
            len(sample.prompt_token_ids) + len(sample.completion_token_ids)
            for group in groups
            for sample in group.samples
        )
        alone_s = fit.base_s + fit.token_s * fit.computed_share * tokens
        slice_s = machine.draw("trainer", Spread(alone_s, alone_s * fit.cv, fit.n)) / SLICES
        duration_s = 0.0
        machine.training = True
        try:
            for _ in range(SLICES if fit.engine_slowdown > 0 else 1):
                took_s = slice_s * (1.0 + fit.engine_slowdown * machine.stepping)
                took_s *= 1 if fit.engine_slowdown > 0 else SLICES
                virtual_sleep(took_s)
                duration_s += took_s
        finally:
            machine.training = False
        return duration_s

    def _train_step(self) -> None:
        super()._train_step()
        virtual_sleep(self.machine.calibration.trainer_step.overhead_s)


class Prompts:
    """Port ``PromptSource``: prompts of the measured lengths, no two alike."""

    def __init__(self, machine: Machine) -> None:
        self._quantiles = machine.calibration.prompt_quantiles
        self._source = machine.source("prompts")
        self._next = 0

    def next(self) -> tuple[int, tuple[int, ...], JsonDict]:
        index, self._next = self._next, self._next + 1
        length = int(self._source.choice(self._quantiles))
        return index, tuple(self._source.randrange(VOCABULARY - 1) for _ in range(max(length, 1))), {}


class Rewards:
    """Port ``RewardModel``: 0 or 1, after the measured time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def score(
        self, row: JsonDict, completions: Sequence[tuple[int, ...]]
    ) -> list[tuple[float | None, tuple[float | None, ...]]]:
        await asyncio.sleep(self._machine.draw("reward", self._machine.calibration.reward))
        values = [float(len(ids) % 2) for ids in completions]
        return [(value, (value,)) for value in values]


class CalibratedWorker(RolloutWorker):
    """The protocol's worker with measured prompts and rewards."""

    machine: Machine

    def __init__(
        self,
        engines: Sequence[Engine],
        prompts: PromptSource,
        rewards: RewardModel,
        queue: SampleQueue,
        recorder: Recorder,
        settings: RolloutSettings,
        **options: Any,
    ) -> None:
        own = (Prompts(self.machine), Rewards(self.machine))
        super().__init__(engines, *own, queue, recorder, settings, **options)


def _parts(machine: Machine) -> Parts:
    """Classes of this one simulation: the world makes their instances itself."""

    def bound(kind: Any) -> Any:
        return type(kind.__name__, (kind,), {"machine": machine})

    return Parts(
        core=bound(CalibratedCore),
        policy=bound(CalibratedPolicy),
        client=bound(CalibratedEngine),
        transport=bound(CalibratedTransport),
        trainer=bound(CalibratedTrainer),
        worker=bound(CalibratedWorker),
    )
