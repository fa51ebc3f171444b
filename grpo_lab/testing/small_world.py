"""The real coordinator and the real engine model in the smallest world: no trainer, no worker, no delay.

Messages take no time, so whatever may happen together is ready together, and the tape decides. That makes
the world fit for trying all schedules (``grpo_lab.testing.scopes``) and for state machines
(``grpo_lab.testing.machines``).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from grpo_lab.errors import GrpoLabError
from grpo_lab.events import FaultsEnded, OptimizerStepApplied, Record, RunEnded, StateChanged, TermBegan
from grpo_lab.protocol.coordinator import Coordinator, SyncReport
from grpo_lab.sim.declaration import declaration
from grpo_lab.sim.engine_host import EngineHost, model_score
from grpo_lab.sim.faults import Faults
from grpo_lab.sim.life import Life
from grpo_lab.sim.light_trainer import LIMITS, SHAPES, fresh_weights, sync_settings
from grpo_lab.sim.network import Network, SimulatedEngine
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import TRAINER, Fault, Scenario
from grpo_lab.sim.watch import Watch, WatchedRecorder
from grpo_lab.trainer.ranks import SingleRank
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.transport.memory import InMemoryReceiver
from grpo_lab.types import EngineCapabilities, GenerateRequest, SamplingParams, SyncState

T = TypeVar("T")

PROMPT, COMPLETION_TOKENS = (3, 1, 4, 1, 5), 6


class InlineBridge:
    """Runs the caller's functions where the coroutine runs."""

    async def in_caller(self, function: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        return function()

    def call(self, coroutine: Any, timeout_s: float) -> Any:
        raise NotImplementedError("nobody blocks in the small world")

    def close(self) -> None:
        """Nothing waits."""


class TrainerRecorder(WatchedRecorder):
    """Tells ``on_state`` of every state that the coordinator has entered."""

    on_state: Callable[[SyncState], object] | None = None

    def _store(self, record: Record) -> None:
        super()._store(record)
        if self.on_state is not None and isinstance(record.event, StateChanged):
            self.on_state(SyncState(record.event.after))


class SmallWorld:
    """Engines of ``scenario``, a coordinator over them, and the checker over what they do.

    ``only`` names the rules that matter, where others are to be passed over.

    Attributes:
        watch: has seen every record; ``watch.violation`` is the first broken rule.
        source_broken: while it is set, reading the trainer's parameters raises ``MemoryError``.
        coordinator: the one of the present term, None before ``connect``.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: Callable[[], float],
        records: list[Record],
        parts: Parts | None = None,
        only: frozenset[str] | None = None,
    ) -> None:
        self.scenario = scenario
        self.parts = parts or Parts()
        self.watch = Watch(records, only=only)
        self.source_broken = False
        self.coordinator: Coordinator | None = None
        self.committed = 0
        self.term = 0
        self.optimizer_step = 0
        self._run = WatchedRecorder("run", clock, self.watch)
        self.recorder = TrainerRecorder(TRAINER, clock, self.watch)
        self._life = Life(self.recorder)
        self.faults = Faults(scenario, self._run, clock)
        self._network = Network(scenario, self.faults, self._crash)
        self.transport = self.parts.transport(self._life, self._network, LIMITS.transfer_s)
        self._weights = fresh_weights(scenario.seed)
        self.source = self._new_source()
        self._restarts: list[asyncio.Task[None]] = []
        self._requests: list[asyncio.Task[bool]] = []
        self._numbers = 0
        self.hosts = {name: self._host(name, clock) for name in scenario.engine_names}
        self.clients = [self.parts.client(host, self._life, self._network) for host in self.hosts.values()]

    # -- what may be done ------------------------------------------------------------------------------

    def start(self) -> None:
        """Declares the run and starts the engines; needs a running loop."""
        self._run.emit(declaration(self.scenario, self.parts))
        for host in self.hosts.values():
            host.start()
        self.recorder.observe(self._run.last_id)

    async def connect(self) -> None:
        """A new term, with the same engines."""
        self.term += 1
        self.recorder.emit(
            TermBegan(term=self.term, base_version=self.committed, optimizer_step=self.optimizer_step)
        )
        if self.coordinator is None:
            self.coordinator = self._new_coordinator()
        await self.coordinator.connect(self.term, self.committed)

    def step(self) -> None:
        """The optimizer changes every parameter."""
        for tensor in self._weights.values():
            tensor.add_(0.01)
        self.recorder.emit(
            OptimizerStepApplied(
                term=self.term, optimizer_step=self.optimizer_step, version=self.committed, loss=0.0
            )
        )
        self.optimizer_step += 1

    async def sync(self) -> SyncReport:
        """All three steps; ``committed`` follows the coordinator on every path."""
        coordinator = self.the_coordinator
        return await self.following(coordinator.sync(self.optimizer_step))

    async def following(self, work: Awaitable[T]) -> T:
        """``work``, after which ``committed`` is what the coordinator says."""
        try:
            return await work
        finally:
            self.committed = self.the_coordinator.committed

    @property
    def the_coordinator(self) -> Coordinator:
        assert self.coordinator is not None, "connect first"
        return self.coordinator

    def generate(self, engine: int = 0) -> None:
        """One evaluation request is sent to an engine; an error is an answer too."""
        client = self.clients[engine % len(self.clients)]
        self._numbers += 1
        request = GenerateRequest(
            f"evaluation-{self._numbers}",
            PROMPT,
            SamplingParams(max_tokens=COMPLETION_TOKENS),
            "evaluation",
            self.term,
        )
        self._requests.append(
            asyncio.get_running_loop().create_task(_answered(client, request), name=request.request_id)
        )

    async def unanswered(self) -> list[str]:
        """Waits for all answers; the names of the requests that got none."""
        answered = await asyncio.gather(*self._requests)
        return [task.get_name() for task, ok in zip(self._requests, answered, strict=True) if not ok]

    def end_faults(self) -> None:
        """No fault strikes any more; the liveness rules count from here."""
        self.faults.end()
        self._run.observe(self.recorder.last_id)
        self._run.emit(FaultsEnded())

    async def stop(self) -> None:
        """Closes what there is and lets the checker look at the whole trace."""
        if self.coordinator is not None:
            await self.following(self.coordinator.close())
        await asyncio.gather(*self._restarts)
        await self.unanswered()
        for host in self.hosts.values():
            await host.stop()
        self._run.observe(self.recorder.last_id)
        self._run.emit(RunEnded(outcome="clean"))
        for rule in self.watch.checker.finish().rules:
            for violation in rule.violations:
                self.watch.judge(violation)

    # -- parts -----------------------------------------------------------------------------------------

    def _host(self, name: str, clock: Callable[[], float]) -> EngineHost:
        recorder = WatchedRecorder(name, clock, self.watch)
        receivers: dict[str, Callable[[], InMemoryReceiver]] = {
            self.transport.backend: self.transport.receiver
        }
        return EngineHost(
            name,
            self.scenario,
            SHAPES,
            recorder,
            self._run,
            receivers,
            policy=self.parts.policy,
            core=self.parts.core,
            rl=self.parts.rl,
        )

    def _new_source(self) -> PackedSource:
        return self.parts.source(
            self._named_tensors,
            InlineBridge(),
            self._life,
            ring=lambda: self.transport.ring,
            score=lambda sequences: model_score(self._weights, sequences),
            bucket_bytes=self.scenario.bucket_bytes,
            wire_dtype=None,
            num_threads=1,
            sends=True,
        )

    def _new_coordinator(self) -> Coordinator:
        settings = sync_settings(self.scenario)
        return self.parts.coordinator(
            self.clients, self.transport, self.source, SingleRank(), self._life, settings
        )

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.source_broken:
            raise MemoryError("injected: no memory to gather the parameters")
        return iter(self._weights.items())

    def _crash(self, member: str, down_s: float) -> None:
        host = self.hosts[member]
        if host.crash("killed by SIGKILL"):
            loop = asyncio.get_running_loop()
            self._restarts.append(loop.create_task(_restart(host, down_s), name=f"restart of {member}"))


class OnTrial(SimulatedEngine):
    """An engine that cannot score while it is paused: a coordinator with a canary tries it in PROBATION."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, score_while_paused=False)


class Unstaged(SimulatedEngine):
    """An engine that says of itself that a failed update leaves it without weights, as stock vLLM does."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, staged=False)


def small_scenario(*faults: Fault, **changes: Any) -> Scenario:
    """A scenario without delays for the small world."""
    defaults: dict[str, Any] = {
        "engines": 1,
        "slots": 2,
        "network_s": 0.0,
        "jitter": 0.0,
        "reward_s": 0.0,
        "token_s": 0.01,
        "bandwidth_bytes_s": 1e15,
        "bucket_bytes": 1024,
        "faults": faults,
    }
    return Scenario(**{**defaults, **changes})


async def _answered(client: SimulatedEngine, request: GenerateRequest) -> bool:
    try:
        await asyncio.wait_for(client.generate(request), LIMITS.connect_s)
    except GrpoLabError:
        return True
    except TimeoutError:
        return False
    return True


async def _restart(host: EngineHost, down_s: float) -> None:
    await asyncio.sleep(down_s)
    host.start()
