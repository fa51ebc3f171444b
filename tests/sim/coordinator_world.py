"""A small world for the coordinator: engines that stage real buckets, and faults by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_lab.errors import EngineRefused, EngineUnreachable, PackingError
from grpo_lab.events import (
    BucketReceived,
    EnginePaused,
    EngineResumed,
    UpdateFailed,
    UpdateStarted,
    WeightsActivated,
    WeightsLoaded,
    WeightWriteBegan,
    WeightWriteEnded,
)
from grpo_lab.packing import BucketPlan, Unpacker, hash64
from grpo_lab.protocol.canary import Canary
from grpo_lab.protocol.coordinator import Coordinator, SyncSettings
from grpo_lab.protocol.timeouts import Timeouts
from grpo_lab.sim.simulation import SimContext, run_twice
from grpo_lab.trainer.ranks import SingleRank
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.transport.memory import InMemoryTransport
from grpo_lab.types import (
    Bucket,
    Completion,
    EngineCapabilities,
    GenerateRequest,
    JsonDict,
    PauseMode,
    SyncId,
)

CANARY = Canary(((1, 2, 3),), tolerance=1e-3)
LIMITS = Timeouts(
    connect_s=5,
    handshake_s=5,
    pause_s=5,
    transfer_s=5,
    finish_s=5,
    resume_s=5,
    score_s=5,
    close_s=5,
)


class InlineBridge:
    """Runs the caller's functions where the coroutine runs."""

    async def in_caller(self, function: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        return function()

    def call(self, coroutine: Any, timeout_s: float) -> Any:
        raise AssertionError("nothing blocks here")

    def close(self) -> None: ...


@dataclass
class Fault:
    """``call`` of an engine misbehaves ``times`` times: refuse, die, hang, lose the reply, restart (before
    anything happens) or restart_after (its reply has been sent).
    """

    call: str
    kind: str
    times: int = 1


class StagingEngine:
    """An engine that verifies and stages; its weights are tensors, so torn states are visible."""

    def __init__(
        self, name: str, context: SimContext, transport: InMemoryTransport, plan: BucketPlan
    ) -> None:
        self.name = name
        self.capabilities = EngineCapabilities(True, True, True, True, True, True)
        self.recorder = context.recorder(name)
        self.faults: list[Fault] = []
        self.alive = True
        self.starts = 1
        self.paused = False
        self.identity = "default"
        self.calls: list[str] = []
        self.claims = ""  # another plan than its own
        self._transport = transport
        self._plan = plan
        self.weights = {entry.name: torch.zeros(entry.shape) for entry in plan.tensors}
        self._staged: dict[str, torch.Tensor] | None = None
        self._receiver: Any = None

    def restart(self) -> None:
        """Another process: unpaused, out of the transfer, with weights from its disk."""
        self.starts += 1
        self.alive, self.paused, self.identity = True, False, "default"
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self._staged, self._receiver = None, None

    async def _enter(self, call: str) -> Fault | None:
        self.calls.append(call)
        await asyncio.sleep(0.01)
        if not self.alive:
            raise EngineUnreachable(f"{self.name} is dead")
        for fault in self.faults:
            if fault.call == call and fault.times > 0:
                fault.times -= 1
                if fault.kind == "refuse":
                    raise EngineRefused(f"{self.name} refuses {call}", 500)
                if fault.kind == "die":
                    self.alive = False
                    raise EngineUnreachable(f"{self.name} died in {call}")
                if fault.kind == "restart":
                    self.restart()
                    raise EngineUnreachable(f"{self.name} died in {call}")
                if fault.kind == "hang":
                    await asyncio.sleep(1e6)
                return fault
        return None

    async def _leave(self, fault: Fault | None) -> None:
        if fault is not None and fault.kind == "lose_reply":
            raise EngineUnreachable(f"{self.name}: the reply was lost")
        if fault is not None and fault.kind == "restart_after":
            self.restart()

    async def health(self) -> None:
        await self._enter("health")

    async def start_id(self) -> str:
        await self._enter("start_id")
        return f"start-{self.starts}"

    async def world_size(self) -> int:
        return 1

    async def pause(self, mode: PauseMode, clear_cache: bool, term: int) -> None:
        fault = await self._enter("pause")
        self.paused = True
        self.recorder.emit(EnginePaused(engine=self.name, mode=mode, clear_cache=clear_cache, term=term))
        await self._leave(fault)

    async def resume(self, term: int) -> None:
        fault = await self._enter("resume")
        self.paused = False
        self.recorder.emit(EngineResumed(engine=self.name, term=term))
        await self._leave(fault)

    async def is_paused(self) -> bool:
        return self.paused

    async def init_transfer(self, info: JsonDict, term: int) -> str:
        fault = await self._enter("init_transfer")
        if self._receiver is not None:
            await self._receiver.close()
        self._receiver = self._transport.receiver()
        await self._receiver.join(info)
        await self._leave(fault)
        return self.claims or self._plan.digest()

    async def start_update(self, sync: SyncId) -> None:
        fault = await self._enter("start_update")
        self._staged = {name: torch.full_like(tensor, -1) for name, tensor in self.weights.items()}
        self.recorder.emit(
            UpdateStarted(engine=self.name, term=sync.term, version=sync.version, attempt=sync.attempt)
        )
        await self._leave(fault)

    async def update(self, sync: SyncId, info: JsonDict) -> None:
        fault = await self._enter("update")
        if self._receiver is None or self._staged is None:
            raise EngineRefused(f"{self.name}: weight transfer not initialized", 500)
        unpacker = Unpacker(self._plan)
        place = {"engine": self.name, "term": sync.term, "version": sync.version, "attempt": sync.attempt}
        buckets = self._receiver.receive(sync, info)
        try:
            async for bucket in buckets:
                found = hash64(bucket.memory)
                ok = found == bucket.hash64
                self.recorder.emit(
                    BucketReceived(
                        **place,
                        bucket=bucket.index,
                        nbytes=bucket.nbytes,
                        hash64=found,
                        expected_hash64=bucket.hash64,
                        accepted=ok,
                    )
                )
                unpacker.verify(bucket.index, bucket.memory, bucket.hash64)
                unpacker.unpack(bucket.index, bucket.memory, self._staged)
        except PackingError as error:
            self._staged = None
            self.recorder.emit(UpdateFailed(**place, reason=str(error)))
            raise EngineRefused(f"{self.name}: {error}", 500) from error
        finally:
            await buckets.aclose()  # not whenever it is collected: that would differ from run to run
        await self._leave(fault)

    async def finish_update(self, sync: SyncId) -> None:
        fault = await self._enter("finish_update")
        if self._staged is None:
            raise EngineRefused(f"{self.name}: nothing is staged", 500)
        place = {"engine": self.name, "term": sync.term, "version": sync.version}
        self.recorder.emit(WeightWriteBegan(**place))
        self.weights, self._staged = self._staged, None
        self.recorder.emit(WeightWriteEnded(**place))
        self.identity = str(sync)
        self.recorder.emit(
            WeightsLoaded(**place, attempt=sync.attempt, hashes_verified=True, buckets=self._plan.num_buckets)
        )
        self.recorder.emit(WeightsActivated(**place, first_step=0))
        await self._leave(fault)

    async def abandon_update(self, sync: SyncId) -> None:
        await self._enter("abandon_update")
        self._staged = None

    async def weight_info(self) -> str:
        await self._enter("weight_info")
        return self.identity

    async def checksums(self) -> dict[str, str]:
        return {}

    async def generate(self, request: GenerateRequest) -> Completion:
        raise AssertionError("no rollouts here")

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        await self._enter("score")
        return score(self.weights, sequences)

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


def score(weights: dict[str, torch.Tensor], sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """A stand-in for logprobs: any function of all weights and the tokens."""
    total = sum(float(tensor.sum()) for tensor in weights.values())
    return [[-abs(total) * token / 1000 for token in sequence[1:]] for sequence in sequences]


@dataclass
class World:
    context: SimContext
    transport: InMemoryTransport
    engines: list[StagingEngine]
    tensors: dict[str, torch.Tensor]
    coordinator: Coordinator
    log: list[str] = field(default_factory=list)

    def step(self) -> None:
        """The optimizer changes every parameter."""
        for tensor in self.tensors.values():
            tensor.add_(1)

    def holds_current(self, engine: StagingEngine) -> bool:
        return all(torch.equal(engine.weights[name], tensor) for name, tensor in self.tensors.items())

    @property
    def kinds(self) -> list[str]:
        return [record.event.kind for record in self.context.records]


Carry = Callable[[str, Bucket, InMemoryTransport], Awaitable[Sequence[Bucket]]]


def make_world(
    context: SimContext,
    engines: int = 3,
    *,
    carry: Carry | None = None,
    canary: Canary | None = None,
    **settings: Any,
) -> World:
    tensors = {f"layer{i}.weight": torch.arange(96.0).reshape(8, 12) + i for i in range(4)}
    plan = BucketPlan.build(tensors, bucket_bytes=512)
    recorder = context.recorder("trainer")

    class Transport(InMemoryTransport):
        async def carry(self, member: str, bucket: Bucket) -> Sequence[Bucket]:
            return [bucket] if carry is None else await carry(member, bucket, self)

    transport = Transport(recorder, accept_timeout_s=3, progress_timeout_s=3)
    members = [StagingEngine(f"engine-{index}", context, transport, plan) for index in range(engines)]
    source = PackedSource(
        lambda: iter(tensors.items()),
        InlineBridge(),
        recorder,
        ring=lambda: transport.ring,
        score=lambda sequences: score(tensors, sequences),
        bucket_bytes=512,
        wire_dtype=None,
        num_threads=1,
        sends=True,
    )
    coordinator = Coordinator(
        members,
        transport,
        source,
        SingleRank(),
        recorder,
        SyncSettings(canary=canary, timeouts=LIMITS, **settings),
    )
    return World(context, transport, members, tensors, coordinator)


def run(scenario, **options):
    """Connects, does ``scenario(world)``, closes; twice, with equal traces."""

    async def main(context: SimContext):
        world = make_world(context, **options)
        await world.coordinator.connect(term=1, base_version=0)
        await scenario(world)
        await world.coordinator.close()
        return world

    return run_twice(main)


def of(result, kind):
    """The events of one kind in a result's trace."""
    return [record.event for record in result.records if isinstance(record.event, kind)]
