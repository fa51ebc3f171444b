"""A simulated cluster with calibrated times: the protocol's own code, a light trainer, measured durations.

Trainer, rollout worker and engines are processes that share the machine's cores: what they do is measured in
core-seconds, which take longer while others compute (``Sharing``). Worker and engines do one thing after the
other: an engine's model steps, requests that arrive or are answered, and the calls of a weight sync wait for
each other.
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

SLICES = 50
"""An optimizer step looks so often who computes beside it."""
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
    """A process that does one thing after the other."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until it has done all that was given to it."""
        return max(0.0, self._free_s - asyncio.get_running_loop().time())

    def give(self, work_s: float) -> float:
        """Core-seconds to be done after the rest; returns the seconds until they are."""
        now_s = asyncio.get_running_loop().time()
        work_s *= self._machine.slowdown(self)
        self._free_s = max(now_s, self._free_s) + work_s
        return self._free_s - now_s


@dataclass(slots=True)
class Machine:
    """What the actors of one simulation share: who computes now, their lines, and random numbers."""

    cluster: Cluster
    calibration: Calibration
    training: bool = False
    _lines: dict[str, Line] = field(default_factory=dict)
    _sources: dict[str, random.Random] = field(default_factory=dict)
    _lengths: dict[str, int] = field(default_factory=dict)
    _shared: dict[str, float] = field(default_factory=dict)

    def line(self, process: str) -> Line:
        if process not in self._lines:
            self._lines[process] = Line(self)
        return self._lines[process]

    def slowdown(self, own: Line | None) -> float:
        """How much longer a process takes now, given the others that compute; None: the trainer's."""
        computing = sum(line is own or line.left_s > 0 for line in self._lines.values())
        trainer, other = self.calibration.sharing.speeds(self.training or own is None, computing)
        return 1.0 / (trainer if own is None else other)

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
        self._line = self.machine.line(config.name)

    def submit(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *words: Any, **options: Any
    ) -> Request:
        self._line.give(self._fit.admitted_s)
        return super().submit(prompt_token_ids, sampling, *words, **options)

    async def _take_time(self, plan: StepPlan) -> None:
        # Once only: what comes in meanwhile is done after the step, else a burst would keep steps away.
        await asyncio.sleep(self._line.left_s)
        await asyncio.sleep(self._line.give(self._duration_s(plan)))

    def _finish(self, request: Request) -> None:
        if not request.done.done():
            self._line.give(self._fit.finished_s)
        super()._finish(request)


class CalibratedEngine(SimulatedEngine):
    """Requests queue on their way out and back; control calls take what they took, after what the engine
    has to do before them.
    """

    machine: Machine

    async def generate(self, request: GenerateRequest) -> Completion:
        fit, line = self.machine.calibration.requests, self.machine.line("worker")
        await asyncio.sleep(line.give(fit.dispatch_s) + fit.request_latency_s)
        completion = await super().generate(request)
        await asyncio.sleep(line.give(fit.reply_s) + fit.reply_latency_s)
        return completion

    async def start_id(self) -> str:
        await self._take("other")
        return await super().start_id()

    async def pause(self, mode: PauseMode, clear_cache: bool, term: int) -> None:
        await super().pause(mode, clear_cache, term)
        await asyncio.sleep(self._draw("pause"))  # at once: before the answers of the step that has ended

    async def start_update(self, sync: SyncId) -> None:
        await self._take("transfer")
        await super().start_update(sync)

    async def resume(self, term: int) -> None:
        await self._take("resume")
        await super().resume(term)

    async def _take(self, phase: str) -> None:
        await asyncio.sleep(self.machine.line(self.name).left_s)
        await asyncio.sleep(self._draw(phase))

    def _draw(self, phase: str) -> float:
        spread: Spread = getattr(self.machine.calibration.sync, phase)
        return self.machine.draw(f"{self.name} {phase}", spread) * self.machine.slowdown(None)


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
        left_s = machine.draw("trainer", Spread(alone_s, alone_s * fit.cv, fit.n))
        slice_s, duration_s = left_s / SLICES, 0.0
        machine.training = True
        try:
            while left_s > 1e-9:
                speed = 1.0 / machine.slowdown(None)
                took_s = min(slice_s, left_s / speed)  # of time, not of work: slow ones would count less
                virtual_sleep(took_s)
                left_s -= took_s * speed
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
