"""Weight transfer as its own component, apart from the rollout worker.

``CoordinatedSync`` is the coordinator behind the trainer's narrow face, ``WeightTransferClient`` the same
coordinator behind the five public methods, for other trainers. ``FiveMethodSync`` drives whatever
object was injected, and ``CountingSync`` is for runs without a transfer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import psutil
import torch

from grpo_lab.errors import SyncError
from grpo_lab.events import MemoryMeasured
from grpo_lab.ports import Bridge, Engine, Ranks, Recorder
from grpo_lab.protocol.canary import Canary
from grpo_lab.protocol.coordinator import Coordinator, SyncReport, SyncSettings
from grpo_lab.trainer.bridge import ThreadBridge
from grpo_lab.trainer.protocols import NamedTensors, SyncOutcome, WeightTransferProtocol
from grpo_lab.trainer.ranks import make_ranks
from grpo_lab.trainer.weight_source import PackedSource, ScoreFunction
from grpo_lab.transport.receivers import make_transport
from grpo_lab.transport.sender import RingTransport

T = TypeVar("T")
MakeEngines = Callable[[], Awaitable[Sequence[Engine]]]
MAX_CANARY_TOKEN_ID = 50  # small ids exist in every vocabulary


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """What ``CoordinatedSync`` needs beyond the protocol's own settings. ``turns``: the most of a sync."""

    sync: SyncSettings = field(default_factory=SyncSettings)
    transport: str = "shm"
    bucket_bytes: int = 64 << 20
    wire_dtype: str | None = None
    ring_slots: int = 2
    pack_threads: int = 1
    turns: int = 1


def ring_transport(settings: TransferSettings, recorder: Recorder) -> RingTransport:
    """The transport that ``settings`` names."""
    return make_transport(
        settings.transport,  # type: ignore[arg-type]
        recorder=recorder,
        slots=settings.ring_slots,
        accept_timeout_s=settings.sync.timeouts.handshake_s,
        progress_timeout_s=settings.sync.timeouts.transfer_s,
    )


def resident_bytes() -> int:
    """Memory of this process."""
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True, slots=True)
class SyncWorld:
    """Where the syncs happen; by default in the real world. ``memory`` None: nothing to measure."""

    bridge: Callable[[], Bridge] = ThreadBridge
    transport: Callable[[TransferSettings, Recorder], RingTransport] = ring_transport
    memory: Callable[[], int] | None = resident_bytes


class CoordinatedSync:
    """Implements ``WeightSync`` with the protocol's coordinator on a loop of its own.

    All ranks call every method together. ``close`` may be called on every path, and again.
    """

    def __init__(
        self,
        make_engines: MakeEngines,
        named_tensors: NamedTensors,
        score: ScoreFunction,
        recorder: Recorder,
        settings: TransferSettings,
        world: SyncWorld = SyncWorld(),
    ) -> None:
        self._make_engines = make_engines
        self._world = world
        self._recorder = recorder
        self._settings = settings
        self._named_tensors = named_tensors
        self._score = score
        self._bridge: Bridge | None = None
        self._coordinator: Coordinator | None = None
        self._engines: Sequence[Engine] = ()
        self._limits = settings.sync.timeouts
        self._sync_s = self._limits.sync_s(settings.sync.attempts, settings.turns)

    def connect(self, term: int, base_version: int) -> None:
        """Waits for the engines and joins them. Raises ``SyncError`` or ``HandshakeError``."""
        self.close()
        self._bridge = bridge = self._world.bridge()
        ranks = make_ranks(bridge, self._limits.agree_s)
        transport = self._make_transport() if ranks.rank == 0 else None
        source = PackedSource(
            self._read,
            bridge,
            self._recorder,
            ring=(lambda: transport.ring) if transport is not None else (lambda: ()),
            score=self._score,
            bucket_bytes=self._settings.bucket_bytes,
            wire_dtype=self._settings.wire_dtype,
            num_threads=self._settings.pack_threads,
            sends=transport is not None,
            rank=ranks.rank,
        )

        async def start() -> None:
            self._engines = await self._found(ranks)
            self._coordinator = Coordinator(
                self._engines,
                transport or self._make_transport(),
                source,
                ranks,
                self._recorder,
                self._settings.sync,
            )
            await self._coordinator.connect(term, base_version)

        bridge.call(start(), self._limits.connect_phase_s)

    def sync(self, named_tensors: NamedTensors, optimizer_step: int) -> SyncOutcome:
        """Raises ``SyncError`` when training cannot go on."""
        self._named_tensors = named_tensors
        report = self._call(lambda one: one.sync(optimizer_step))
        if self._world.memory is not None:
            memory_bytes = self._world.memory()
            self._recorder.emit(MemoryMeasured(member=self._recorder.actor, resident_bytes=memory_bytes))
        total_s = report.phases_s["total"]
        return SyncOutcome(report.version, report.committed, report.phases_s, total_s, report.fenced)

    def pause(self) -> None:
        self._call(lambda one: one.pause())

    def transfer(self, named_tensors: NamedTensors) -> bool:
        self._named_tensors = named_tensors
        return self._call(lambda one: one.transfer())

    def resume(self) -> SyncReport:
        return self._call(lambda one: one.resume())

    def close(self) -> None:
        bridge, self._bridge = self._bridge, None
        if bridge is None:
            return
        coordinator, self._coordinator = self._coordinator, None
        try:
            bridge.call(self._shut_down(coordinator), self._limits.shutdown_s)
        finally:
            bridge.close()

    async def _found(self, ranks: Ranks) -> Sequence[Engine]:
        """Rank 0's engines. When it finds none, the other ranks hear of it at once."""
        engines: Sequence[Engine] = ()
        failure: Exception | None = None
        try:
            engines = await self._make_engines() if ranks.rank == 0 else ()
        except Exception as error:
            failure = error
        if not await ranks.agree(failure is None, self._limits.agree_s):
            raise failure or SyncError("connect: rank 0 found no engines; its error says why")
        return engines

    async def _shut_down(self, coordinator: Coordinator | None) -> None:
        try:
            if coordinator is not None:
                await coordinator.close()
        finally:
            engines, self._engines = self._engines, ()
            await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)

    def _call(self, step: Callable[[Coordinator], Awaitable[T]]) -> T:
        if self._bridge is None or self._coordinator is None:
            raise SyncError("the weight transfer is not connected: call connect (init_weight_transfer) first")
        coordinator = self._coordinator

        async def run() -> T:
            return await step(coordinator)

        return self._bridge.call(run(), self._sync_s)

    def _read(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._named_tensors()

    def _make_transport(self) -> RingTransport:
        return self._world.transport(self._settings, self._recorder)


class WeightTransferClient:
    """The five public methods over the coordinator: a drop-in ``weight_transfer`` for other trainers.

    ``resume`` must follow ``pause`` on every path. ``send_weights`` raises ``SyncError`` when the version did
    not move; the engines then serve the previous one.
    """

    def __init__(self, sync: CoordinatedSync, *, term: int = 1, base_version: int = 0) -> None:
        self._sync = sync
        self._term = term
        self._version = base_version

    @property
    def version(self) -> int:
        """The committed version."""
        return self._version

    def init_weight_transfer(self) -> None:
        """Each call begins a new term, so that an older client's messages change nothing any more."""
        self._sync.connect(self._term, self._version)
        self._term += 1

    def pause(self) -> None:
        self._sync.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(iterator)
        if not self._sync.transfer(lambda: iter(tensors.items())):
            raise SyncError(f"version {self._version + 1} was not committed; the trace says why")

    def resume(self) -> None:
        self._version = self._sync.resume().version

    def destroy(self) -> None:
        self._sync.close()


class FiveMethodSync:
    """Drives an injected ``WeightTransferProtocol``. It proves nothing, so a sync counts when no method
    raised; ``resume`` is called whatever happened before.
    """

    def __init__(self, transfer: WeightTransferProtocol) -> None:
        self._transfer = transfer
        self._version = 0

    def connect(self, term: int, base_version: int) -> None:
        self._version = base_version
        self._transfer.init_weight_transfer()

    def sync(self, named_tensors: NamedTensors, optimizer_step: int) -> SyncOutcome:
        started_s = time.perf_counter()
        try:
            self._transfer.pause()  # inside: it may have paused some engines before it raised
            self._transfer.send_weights(named_tensors())
        finally:
            self._transfer.resume()
        self._version += 1
        return SyncOutcome(self._version, committed=True, total_s=time.perf_counter() - started_s)

    def close(self) -> None:
        self._transfer.destroy()


class CountingSync:
    """No transfer: the worker was injected and looks after its weights itself. Versions still count."""

    def __init__(self) -> None:
        self._version = 0

    def connect(self, term: int, base_version: int) -> None:
        self._version = base_version

    def sync(self, named_tensors: NamedTensors, optimizer_step: int) -> SyncOutcome:
        self._version += 1
        return SyncOutcome(self._version, committed=True)

    def close(self) -> None:
        """Nothing was opened."""


def fixed_canary(count: int, length: int, vocabulary: int, tolerance: float) -> Canary:
    """``count`` sequences of ``length`` token ids, the same in every run of a vocabulary."""
    limit = min(vocabulary, MAX_CANARY_TOKEN_ID)
    generator = torch.Generator().manual_seed(20_260_601)
    tokens = torch.randint(0, limit, (count, length), generator=generator)
    return Canary(tuple(tuple(int(token) for token in row) for row in tokens), tolerance)
