"""The network of a simulated cluster: port ``Engine`` over latency, loss and partitions, and a transport
with bandwidth whose buckets may be damaged on the way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from grpo_lab.engine.failures import BadRequest, NotInService, StaleTerm, UpdateError
from grpo_lab.engine.request import Request
from grpo_lab.engine.runs import frozen
from grpo_lab.errors import (
    EngineError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    GrpoLabError,
    SimulationError,
)
from grpo_lab.sim.engine_host import EngineHost, Incarnation
from grpo_lab.sim.faults import Crash, Faults, Stall
from grpo_lab.sim.life import Life
from grpo_lab.sim.scenario import BUCKET_CALL, CRASHES, TRAINER, Fault, Scenario
from grpo_lab.sim.stalls import outside
from grpo_lab.sim.topology import Relay
from grpo_lab.transport.frames import Announce
from grpo_lab.transport.memory import InMemoryTransport
from grpo_lab.transport.sender import Session
from grpo_lab.types import (
    Bucket,
    Completion,
    EngineCapabilities,
    GenerateRequest,
    JsonDict,
    PauseMode,
    SyncId,
    VersionSpan,
)

T = TypeVar("T")

ABILITIES = EngineCapabilities(
    staged=True, hashes=True, token_versions=True, term_fencing=True, score_while_paused=True, events=True
)
STOCK = EngineCapabilities(token_versions=True)
NO_ANSWER_S = 300.0  # until a client by itself gives up an answer; the protocol's own bounds are shorter
_STATUSES: dict[type[EngineError], int] = {BadRequest: 400, StaleTerm: 409, NotInService: 503}
_REFUSALS = {"busy": 429, "unavailable": 503, "error": 500}


def nobody(member: str, duration_s: float) -> None:
    raise SimulationError(f"this world does not let {member} stall")


class Network:
    """All links. Each draws its latencies from a source of its own, in the order of its messages."""

    def __init__(self, scenario: Scenario, faults: Faults, crash: Crash, stall: Stall = nobody) -> None:
        self.faults = faults
        self.crash = crash
        self.stall = stall
        self.topology = scenario.topology
        self.ring_slots = scenario.ring_slots
        self._scenario = scenario
        self._sources: dict[str, random.Random] = {}

    def latency_s(self, link: str, engine: str) -> float:
        """One way of one message."""
        source = self._sources.get(link)
        if source is None:
            source = self._sources[link] = random.Random(f"{self._scenario.seed} {link}")
        drawn = 1.0 + self._scenario.jitter * source.random()
        return self._scenario.network_s * drawn * self.faults.slowness(engine)

    def parted(self, engine: str, actor: str) -> bool:
        """Whether nothing that ``actor`` sends arrives at ``engine``."""
        return any(self.faults.cut(engine, kind) for kind in ("partition", f"partition_{actor}"))

    def transfer_s(self, nbytes: int, engine: str) -> float:
        return nbytes / self._scenario.bandwidth_bytes_s * self.faults.slowness(engine)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A message under way lives on when its sender gives up, or dies."""
        task = outside(work, name)
        task.add_done_callback(_retrieve)
        return task


class SimulatedEngine:
    """Port ``Engine``: ``host``'s engine as the actor ``life`` sees it."""

    def __init__(self, host: EngineHost, life: Life, network: Network) -> None:
        self._host = host
        self._life = life
        self._network = network

    @property
    def name(self) -> str:
        return self._host.name

    @property
    def capabilities(self) -> EngineCapabilities:
        return STOCK if self._host.stock else ABILITIES

    async def health(self) -> None:
        async def serve(at: Incarnation) -> None:
            at.core.check_alive()

        await self._call("health", serve)

    async def start_id(self) -> str:
        async def serve(at: Incarnation) -> str:
            at.core.check_alive()
            return at.core.config.start_id

        return await self._call("start_id", serve)

    async def world_size(self) -> int:
        return 1

    async def pause(self, mode: PauseMode, clear_cache: bool, term: int) -> None:
        await self._call("pause", lambda at: at.core.pause(mode, clear_cache, self._known(term)))

    async def resume(self, term: int) -> None:
        await self._call("resume", lambda at: at.core.resume(self._known(term)))

    async def is_paused(self) -> bool:
        async def serve(at: Incarnation) -> bool:
            at.core.check_alive()
            return at.core.is_paused

        return await self._call("is_paused", serve)

    async def init_transfer(self, info: JsonDict, term: int) -> str:
        return await self._call("init_transfer", lambda at: at.rl.init(info, self._known(term)))

    async def start_update(self, sync: SyncId) -> None:
        await self._call("start_update", lambda at: at.rl.start(sync))

    async def update(self, sync: SyncId, info: JsonDict) -> None:
        await self._call("update", lambda at: at.rl.update(info, sync))

    async def finish_update(self, sync: SyncId) -> None:
        async def serve(at: Incarnation, fault: Fault | None) -> None:
            if fault is not None:
                await at.rl.abandon(sync)
                raise UpdateError(f"CUDA out of memory while loading {sync}")
            await at.rl.finish(str(sync), sync)

        met = self._network.faults.strike("finish_update", self.name, self._life.actor)
        await self._call("finish_update", lambda at: serve(at, met.get("oom")), met)

    async def abandon_update(self, sync: SyncId) -> None:
        if self._host.stock:
            raise EngineRefused(f"abandon_update of {self.name}: HTTP 404: no such route", 404)
        await self._call("abandon_update", lambda at: at.rl.abandon(sync))

    async def weight_info(self) -> str:
        async def serve(at: Incarnation) -> str:
            at.core.check_alive()
            return at.rl.weight_version

        return await self._call("weight_info", serve)

    async def checksums(self) -> dict[str, str]:
        return {}

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._call("score", lambda at: at.core.score(sequences))

    async def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            await self._call("abort", lambda at: at.core.abort(request_ids))

    async def generate(self, request: GenerateRequest) -> Completion:
        async def serve(at: Incarnation) -> Completion:
            submitted = at.core.submit(
                request.prompt_token_ids,
                request.sampling,
                request.request_id,
                request.kind,
                self._known(request.term),
            )
            return _completion(self.name, await at.core.wait(submitted))

        return await self._call("generate", serve)

    async def close(self) -> None:
        """A simulated connection needs no closing."""

    # --- inside ---------------------------------------------------------------------------------------

    def _known(self, term: int) -> int:
        """A stock engine takes no notice of terms."""
        return 0 if self._host.stock else term

    async def _call(
        self,
        call: str,
        serve: Callable[[Incarnation], Awaitable[T]],
        met: dict[str, Fault] | None = None,
    ) -> T:
        self._require_alive()
        faults = self._network.faults
        met = faults.strike(call, self.name, self._life.actor) if met is None else met
        self._before(call, met)
        reply = await self._exchange(call, serve, met)
        if "crash_after" in met:
            self._crash(met["crash_after"])
            if met["crash_after"].target == self.name:
                raise EngineUnreachable(f"{call} of {self.name}: connection reset, the engine has died")
        self._require_alive()
        if "lose_reply" in met:
            raise EngineUnreachable(f"{call} of {self.name}: the connection was reset before an answer")
        if "hang_reply" in met or faults.cut(self.name, "partition_replies"):
            await self._no_answer(call)
        late_s = met["late_reply"].duration_s if "late_reply" in met else 0.0
        await asyncio.sleep(self._latency_s("reply") + late_s)
        self._require_alive()
        result, event_id, error = reply
        self._life.observe(event_id)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _before(self, call: str, met: dict[str, Fault]) -> None:
        """What hits a call before it leaves. Raises what the caller sees."""
        if "stall" in met:
            target, duration_s = met["stall"].target, met["stall"].duration_s
            if target == self.name:
                self._host.stall(duration_s)
            else:
                self._network.stall(target, duration_s)
        if "crash_before" in met:
            self._crash(met["crash_before"])
        self._require_alive()
        if "refuse" in met:
            raise EngineUnreachable(f"{call} of {self.name}: connection refused")
        for kind, status in _REFUSALS.items():
            if kind in met:
                raise EngineRefused(f"{call} of {self.name}: HTTP {status}: injected", status, kind)

    async def _exchange(
        self, call: str, serve: Callable[[Incarnation], Awaitable[T]], met: dict[str, Fault]
    ) -> tuple[T | None, str, EngineError | None]:
        if "lose_request" in met or self._network.parted(self.name, self._life.actor):
            await self._no_answer(call)
        delay_s = self._latency_s("request") + (met["delay"].duration_s if "delay" in met else 0.0)
        name = f"{call} from {self._life.actor} on {self.name}"
        if "duplicate" in met:
            self._network.spawn(self._deliver(serve, 2 * delay_s, name), f"second {name}")
        message = self._network.spawn(self._deliver(serve, delay_s, name), name)
        try:
            return await asyncio.shield(message)
        except asyncio.CancelledError:
            if call == "generate":
                message.cancel()  # the server sees that its client has gone
            raise

    async def _deliver(
        self, serve: Callable[[Incarnation], Awaitable[T]], delay_s: float, name: str
    ) -> tuple[T | None, str, EngineError | None]:
        """The way to the engine and what it does there: (result, its newest event, its error)."""
        cause = self._life.last_id
        await asyncio.sleep(delay_s)
        await self._host.not_stalled()
        at = self._host.incarnation
        if at is None:
            raise EngineUnreachable(f"{name}: connection refused, the engine is down")
        at.life.observe(cause)
        try:
            result = await at.handle(_run(serve, at), name)
        except EngineUnreachable:
            raise
        except GrpoLabError as error:
            status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 500)
            refused = EngineRefused(f"{name}: HTTP {status}: {error}", status, str(error))
            return None, at.life.last_id, refused
        await self._host.not_stalled()
        if not at.life.alive:
            raise EngineUnreachable(f"{name}: connection reset, the engine has died")
        return result, at.life.last_id, None

    async def _no_answer(self, call: str) -> None:
        await asyncio.sleep(NO_ANSWER_S)
        raise EngineTimeout(f"{call} of {self.name}: no answer within {NO_ANSWER_S:g} s")

    def _latency_s(self, way: str) -> float:
        return self._network.latency_s(f"{self._life.actor} {self.name} {way}", self.name)

    def _crash(self, fault: Fault) -> None:
        assert fault.kind in CRASHES
        self._network.crash(fault.target, fault.duration_s)

    def _require_alive(self) -> None:
        if not self._life.alive:
            raise EngineUnreachable(f"{self._life.actor} has died: its connections are gone")


class SimulatedTransport(InMemoryTransport):
    """Buckets over links with bandwidth, latency and the scenario's faults."""

    def __init__(self, life: Life, network: Network, timeout_s: float) -> None:
        super().__init__(
            life, slots=network.ring_slots, accept_timeout_s=timeout_s, progress_timeout_s=timeout_s
        )
        self._network = network
        self._relay: Relay | None = None
        self._due_s: dict[int, Mapping[str, float]] = {}
        self._opened = 1_000_000 * life.incarnation  # no invitation of an older trainer fits
        self._held: dict[str, list[Bucket]] = {}

    async def _allocate(self, session: Session) -> str:
        self._held.clear()  # what was under way on an old connection does not arrive on a new one
        if self._network.topology != "independent":
            self._relay = Relay(self._network.topology, session.members)
        return await super()._allocate(session)

    async def _dispatch(self, announce: Announce) -> None:
        network, now_s = self._network, asyncio.get_running_loop().time()
        if self._relay is not None:
            self._due_s[announce.bucket] = self._relay.arrivals_s(
                now_s,
                lambda member: network.transfer_s(announce.nbytes, member),
                lambda member: network.latency_s(f"buckets {member}", member),
            )
        await super()._dispatch(announce)

    async def carry(self, member: str, bucket: Bucket) -> Sequence[Bucket]:
        network = self._network
        met = network.faults.strike(BUCKET_CALL, member)
        late_s = met["late"].duration_s if "late" in met else 0.0
        await asyncio.sleep(self._way_s(member, bucket) + late_s)
        if "lose" in met or network.parted(member, TRAINER):
            return []
        if "flip" in met and bucket.nbytes:
            bucket.memory[bucket.nbytes // 2] ^= 0x10
        if "truncate" in met:
            bucket = dataclasses.replace(bucket, memory=bucket.memory[: bucket.nbytes // 2])
        if "swap" in met:
            self._held.setdefault(member, []).append(bucket)
            return []
        arrived = [bucket, bucket] if "repeat" in met else [bucket]
        return [*arrived, *self._held.pop(member, [])]

    def _way_s(self, member: str, bucket: Bucket) -> float:
        network = self._network
        if self._relay is None:
            latency_s = network.latency_s(f"buckets {member}", member)
            return latency_s + network.transfer_s(bucket.nbytes, member)
        due_s = self._due_s[bucket.index][member]
        return max(0.0, due_s - asyncio.get_running_loop().time())


def _completion(engine: str, request: Request) -> Completion:
    spans = tuple(
        VersionSpan(*span.identity.weights, span.start, span.end, span.kv[1]) for span in request.spans
    )
    return Completion(
        request.request_id,
        frozen(request.output_token_ids),
        frozen(request.logprobs),
        request.finish_reason or "abort",
        spans,
        engine,
    )


async def _run(serve: Callable[[Incarnation], Awaitable[T]], at: Incarnation) -> T:
    return await serve(at)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Whoever waits for the answer sees the exception; a caller that gave up does not want it."""
    if not task.cancelled():
        task.exception()
