"""The receiving process of ``bench sync``: joins, verifies and loads as an engine does, and keeps times."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from grpo_lab.packing import BucketPlan, Unpacker
from grpo_lab.ports import WeightReceiver
from grpo_lab.transport.receivers import RECEIVERS
from grpo_lab.types import JsonDict, SyncId

MATRIX = (1024, 1024)


def make_tensors(nbytes: int) -> dict[str, torch.Tensor]:
    """About `nbytes` of touched bf16 memory: square matrices and a norm for each, as in a decoder."""
    matrices = max(1, round(nbytes / (2 * math.prod(MATRIX))))
    tensors = {f"matrix.{i}": torch.full(MATRIX, 1.0, dtype=torch.bfloat16) for i in range(matrices)}
    norms = {f"norm.{i}": torch.full(MATRIX[:1], 1.0, dtype=torch.bfloat16) for i in range(matrices)}
    return tensors | norms


@dataclass(frozen=True, slots=True)
class Received:
    """One bucket: moments on the machine's monotonic clock, which all processes share."""

    arrived_s: float
    verified_s: float
    loaded_s: float


@dataclass(slots=True)
class Transfer:
    receiver: WeightReceiver
    unpacker: Unpacker


class ReceivingProcess:
    """Obeys one command after the other until the pipe ends. Answers ("ok", value) or ("error", text)."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._transfers: dict[str, Transfer] = {}
        self._targets: dict[str, torch.Tensor] = {}
        self._worker = ThreadPoolExecutor(1)  # so that the next bucket is fetched meanwhile
        self._commands: dict[str, Callable[..., Any]] = {
            "prepare": self.prepare,
            "join": self.join,
            "receive": self.receive,
            "leave": self.leave,
        }

    async def prepare(self, nbytes: int) -> None:
        """Makes the tensors that later syncs load into."""
        self._targets = {}
        self._targets = make_tensors(nbytes)

    async def join(self, key: str, info: JsonDict) -> None:
        receiver = RECEIVERS[info["backend"]]()
        await receiver.join(info)
        plan = BucketPlan.from_json(info["plan"])
        self._transfers[key] = Transfer(receiver, Unpacker(plan, num_threads=self._num_threads))

    async def receive(self, key: str, sync: SyncId, info: JsonDict) -> list[Received]:
        """Takes one whole sync. Raises ``BucketCorrupt`` when a bucket is not what was sent."""
        transfer, loop, received = self._transfers[key], asyncio.get_running_loop(), []
        unpacker, targets, clock = transfer.unpacker, self._targets, time.monotonic
        async with contextlib.aclosing(transfer.receiver.receive(sync, info)) as buckets:  # type: ignore[type-var]
            async for bucket in buckets:
                arrived_s = clock()
                await loop.run_in_executor(
                    self._worker, unpacker.verify, bucket.index, bucket.memory, bucket.hash64
                )
                verified_s = clock()
                await loop.run_in_executor(
                    self._worker, unpacker.unpack, bucket.index, bucket.memory, targets
                )
                received.append(Received(arrived_s, verified_s, clock()))
        return received

    async def leave(self) -> None:
        """Leaves all transfers."""
        transfers, self._transfers = self._transfers, {}
        for transfer in transfers.values():
            await transfer.receiver.close()

    async def serve(self, pipe: Connection) -> None:
        try:
            while True:
                name, *arguments = await asyncio.to_thread(pipe.recv)
                try:
                    answer = ("ok", await self._commands[name](*arguments))
                except Exception as error:  # the parent raises it
                    answer = ("error", f"{type(error).__name__}: {error}")
                pipe.send(answer)
        except (EOFError, OSError):  # the parent is done, or dead
            return
        finally:
            await self.leave()
            self._worker.shutdown()


def main(pipe: Connection, num_threads: int) -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and with it the pipe
    torch.set_num_threads(1)
    asyncio.run(ReceivingProcess(num_threads).serve(pipe))
