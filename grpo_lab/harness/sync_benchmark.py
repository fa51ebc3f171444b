"""Whole weight syncs between real processes, timed phase by phase.

A sender and one or two receivers move the same tensors over each transport, `pipelined` (a ring of two slots)
and `sequential` (one slot: nothing overlaps). All ways of a case take turns, and medians are reported.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from operator import itemgetter
from typing import Any, Literal

from grpo_lab.errors import TransportError
from grpo_lab.harness.sync_receiver import Received, main, make_tensors
from grpo_lab.packing import BucketPlan, Packer
from grpo_lab.recorders import ListRecorder, run_clock
from grpo_lab.trainer.interrupts import children_born_deaf
from grpo_lab.transport.receivers import make_transport
from grpo_lab.transport.sender import RingTransport
from grpo_lab.types import Bucket, SyncId

Kind = Literal["shm", "gloo"]
Mode = Literal["pipelined", "sequential"]
KINDS: tuple[Kind, ...] = ("shm", "gloo")
MODES: tuple[Mode, ...] = ("pipelined", "sequential")
SLOTS: Mapping[Mode, int] = {"pipelined": 2, "sequential": 1}
PHASES = ("gather", "pack", "wire", "verify", "load")
ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class SyncCase:
    """What all transports and modes move in turn."""

    receivers: int
    model_bytes: int
    bucket_bytes: int


@dataclass(frozen=True, slots=True)
class SyncRow(SyncCase):
    """Medians of one way. ``phases_s`` sums over buckets, and of several receivers takes the slower.

    ``wire`` is from the end of a bucket's pack to its arrival; in a pipelined sync that includes waiting
    until the receiver has time for it. Over shared memory the packer puts bytes where receivers read them.
    """

    transport: Kind
    mode: Mode
    buckets: int
    total_s: float
    phases_s: dict[str, float]
    repeats: int


@dataclass(slots=True)
class Times:
    """One sync."""

    gather_s: float = 0.0
    pack_s: float = 0.0
    total_s: float = 0.0
    packed_at_s: list[float] = field(default_factory=list)

    def phases_s(self, receivers: Sequence[Sequence[Received]]) -> dict[str, float]:
        per_receiver = [
            (
                sum(b.arrived_s - at for at, b in zip(self.packed_at_s, buckets, strict=True)),
                sum(b.verified_s - b.arrived_s for b in buckets),
                sum(b.loaded_s - b.verified_s for b in buckets),
            )
            for buckets in receivers
        ]
        slowest = (max(values) for values in zip(*per_receiver, strict=True))
        return dict(zip(PHASES, (self.gather_s, self.pack_s, *slowest), strict=True))


class ReceiverProcess:
    """A spawned receiver at the other end of a pipe."""

    def __init__(self, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, num_threads), daemon=True)
        with children_born_deaf():
            self._process.start()
        theirs.close()

    def ask(self, *command: Any) -> None:
        """Raises ``TransportError`` when the process is dead."""
        try:
            self._pipe.send(command)
        except OSError as error:
            raise TransportError(f"a receiver died, exit code {self._process.exitcode}") from error

    async def answer(self) -> Any:
        """Raises ``TransportError`` when the process failed, died, or says nothing for two minutes."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptor = self._pipe.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await readable.wait()
            outcome, value = self._pipe.recv()
        except TimeoutError:
            raise TransportError(f"a receiver did not answer within {ANSWER_TIMEOUT_S:g} s") from None
        except (EOFError, OSError) as error:
            raise TransportError(f"a receiver died, exit code {self._process.exitcode}") from error
        finally:
            loop.remove_reader(descriptor)
        if outcome != "ok":
            raise TransportError(f"a receiver failed: {value}")
        return value

    def end(self) -> None:
        """It ends by itself when the pipe does; otherwise it is killed."""
        self._pipe.close()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_TIMEOUT_S)


@contextmanager
def receiver_processes(count: int, num_threads: int) -> Iterator[list[ReceiverProcess]]:
    """`count` receivers, gone on the way out, whatever happened."""
    started: list[ReceiverProcess] = []
    try:
        for _ in range(count):
            started.append(ReceiverProcess(num_threads))
        yield started
    finally:
        for process in started:
            process.end()


class Sender:
    """One transport with a ring of so many slots, its receivers joined."""

    def __init__(
        self, kind: Kind, slots: int, plan: BucketPlan, receivers: Sequence[ReceiverProcess]
    ) -> None:
        self.kind, self.slots, self._plan = kind, slots, plan
        self._receivers = receivers
        self._transport: RingTransport = make_transport(
            kind,
            recorder=ListRecorder("trainer", run_clock()),
            slots=slots,
            accept_timeout_s=60.0,
            progress_timeout_s=60.0,
        )
        self._version = 0
        self._thread = ThreadPoolExecutor(1)  # packs, as the trainer's thread does

    @property
    def mode(self) -> Mode:
        return "sequential" if self.slots == 1 else "pipelined"

    @property
    def key(self) -> str:
        return f"{self.kind}-{self.slots}"

    async def open(self, num_threads: int) -> None:
        members = [f"engine-{i}" for i in range(len(self._receivers))]
        await self._transport.open(members, self._plan.to_json())
        for member, receiver in zip(members, self._receivers, strict=True):
            receiver.ask("join", self.key, self._transport.init_info(member))
            await receiver.answer()
        await self._transport.accept()
        self._packer = Packer(self._plan, ring=list(self._transport.ring), num_threads=num_threads)

    async def sync(self, tensors: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Moves `tensors` once; returns seconds in all, and of each phase."""
        self._version += 1
        sync, times, clock = SyncId(1, self._version, 1), Times(), time.monotonic
        info = self._transport.update_info(sync)
        for receiver in self._receivers:
            receiver.ask("receive", self.key, sync, info)
        began_s = clock()
        self._packer.bind(tensors)
        times.gather_s = clock() - began_s
        await self._transport.send(sync, self._buckets(times))
        times.total_s = clock() - began_s
        return times.total_s, times.phases_s([await receiver.answer() for receiver in self._receivers])

    async def _buckets(self, times: Times) -> AsyncIterator[Bucket]:
        loop, clock = asyncio.get_running_loop(), time.monotonic
        for index in range(self._plan.num_buckets):
            began_s = clock()
            packed = await loop.run_in_executor(self._thread, self._packer.pack, index)
            times.packed_at_s.append(clock())
            times.pack_s += times.packed_at_s[-1] - began_s
            yield Bucket(packed.index, packed.slot, packed.memory, packed.nbytes, packed.hash64)

    async def close(self) -> None:
        self._thread.shutdown()
        await self._transport.close()


async def measure(
    case: SyncCase, processes: Sequence[ReceiverProcess], *, repeats: int, num_threads: int
) -> list[SyncRow]:
    """All transports and modes in turn, `repeats` times after one round that warms up."""
    ways = [(kind, SLOTS[mode]) for kind in KINDS for mode in MODES]
    return await measure_ways(case, ways, processes, repeats=repeats, num_threads=num_threads)


async def measure_ways(
    case: SyncCase,
    ways: Sequence[tuple[Kind, int]],
    processes: Sequence[ReceiverProcess],
    *,
    repeats: int,
    num_threads: int,
    fastest: bool = False,
) -> list[SyncRow]:
    """These transports, each with a ring of so many slots, in turn; a row each.

    ``fastest``: its fastest sync instead of medians; other work on the machine can only add to a time.
    """
    receivers = processes[: case.receivers]
    tensors = make_tensors(case.model_bytes)
    plan = BucketPlan.build(tensors, bucket_bytes=case.bucket_bytes)
    for receiver in receivers:
        receiver.ask("prepare", case.model_bytes)
        await receiver.answer()
    senders = [Sender(kind, slots, plan, receivers) for kind, slots in ways]
    measured: dict[str, list[tuple[float, dict[str, float]]]] = {sender.key: [] for sender in senders}
    try:
        for sender in senders:
            await sender.open(num_threads)
        for _ in range(repeats + 1):
            for sender in senders:
                measured[sender.key].append(await sender.sync(tensors))
        for receiver in receivers:
            receiver.ask("leave")
            await receiver.answer()
    finally:
        for sender in senders:
            await sender.close()
    return [_row(case, sender, plan, measured[sender.key][1:], fastest) for sender in senders]


def _row(
    case: SyncCase,
    sender: Sender,
    plan: BucketPlan,
    syncs: Sequence[tuple[float, dict[str, float]]],
    fastest: bool,
) -> SyncRow:
    chosen = [min(syncs, key=itemgetter(0))] if fastest else syncs
    return SyncRow(
        receivers=case.receivers,
        model_bytes=plan.statistics().wire_bytes,
        bucket_bytes=case.bucket_bytes,
        transport=sender.kind,
        mode=sender.mode,
        buckets=plan.num_buckets,
        total_s=statistics.median(total_s for total_s, _ in chosen),
        phases_s={name: statistics.median(phases[name] for _, phases in chosen) for name in PHASES},
        repeats=len(syncs),
    )


def cases(quick: bool) -> Iterator[SyncCase]:
    """In order of size; two sizes of buckets tell the cost of a bucket from the cost of a byte."""
    for megabytes in (10, 100) if quick else (10, 100, 500, 2000):
        for bucket_bytes in (4 << 20, 32 << 20):
            for receivers in (1, 2):
                yield SyncCase(receivers, megabytes * MB, bucket_bytes)
