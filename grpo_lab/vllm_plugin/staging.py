"""Receives a whole weight update into memory of its own and verifies it. Knows nothing of vLLM.

The receivers of ``grpo_lab.transport`` are coroutines and vLLM's worker is not: they run on a private event
loop, in the worker's own thread, for as long as a call lasts. Every wait in them is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar, cast

import torch

from grpo_lab.errors import BucketCorrupt, HandshakeError, TransportError
from grpo_lab.packing import BucketPlan, Unpacker, hash64
from grpo_lab.ports import WeightReceiver
from grpo_lab.types import Bucket, JsonDict, SyncId

T = TypeVar("T")


class StagedUpdate:
    """The receiving side of one engine: ``join`` once, then ``begin``, ``receive``, ``take`` for each update.

    ``take`` hands out tensors only when every bucket of the plan has arrived with the hash that its sender
    declared; whatever fails before that has touched nothing.
    """

    def __init__(self, receivers: Mapping[str, Callable[[], WeightReceiver]]) -> None:
        self._receivers = receivers
        self._loop = asyncio.new_event_loop()
        self._receiver: WeightReceiver | None = None
        self._unpacker: Unpacker | None = None
        self._staging: dict[str, torch.Tensor] = {}
        self._sync: SyncId | None = None

    @property
    def plan(self) -> BucketPlan | None:
        """The joined transfer's plan."""
        return self._unpacker.plan if self._unpacker is not None else None

    @property
    def sync(self) -> SyncId | None:
        """The update that is staged whole."""
        return self._sync

    def join(self, info: JsonDict, plan: BucketPlan) -> None:
        """Leaves the old transfer and joins the one of ``info``. Raises ``HandshakeError`` or
        ``TransportError``.
        """
        backend = info.get("backend")
        factory = self._receivers.get(backend) if isinstance(backend, str) else None
        if factory is None:
            raise HandshakeError(f"backend={backend!r}; this engine has {', '.join(sorted(self._receivers))}")
        self.leave()
        receiver = factory()
        self._run(receiver.join(info))
        self._receiver, self._unpacker = receiver, Unpacker(plan)
        self._staging = _allocated(plan)

    def begin(self) -> None:
        """Whatever was staged is not to be loaded any more."""
        self._sync = None

    def receive(self, info: JsonDict) -> SyncId:
        """Receives and verifies every bucket. Raises ``BucketCorrupt`` or ``TransportError``."""
        self._sync = None
        sync = _identity(info)
        self._run(self._receive(sync, info))
        self._sync = sync
        return sync

    def take(self) -> dict[str, torch.Tensor]:
        """The staged tensors under all their names. Raises ``TransportError`` when they are not whole."""
        if self._sync is None:
            raise TransportError("no verified weights are staged: update_weights must succeed first")
        return dict(self._staging)

    def leave(self) -> None:
        """Leaves the transfer; may be called at any time."""
        receiver, self._receiver = self._receiver, None
        self._unpacker, self._sync, self._staging = None, None, {}
        if receiver is not None:
            self._run(receiver.close())

    def close(self) -> None:
        """The end; nothing may be called after it."""
        if not self._loop.is_closed():
            self.leave()
            self._loop.close()

    async def _receive(self, sync: SyncId, info: JsonDict) -> None:
        receiver, unpacker = self._receiver, self._unpacker
        if receiver is None or unpacker is None:
            raise TransportError("weight transfer not initialized. Call init_weight_transfer_engine first.")
        hashes: set[int] = set()
        async with aclosing(cast(AsyncGenerator[Bucket, None], receiver.receive(sync, info))) as buckets:
            async for bucket in buckets:
                self._take(unpacker, bucket, hashes)
        missing = [index for index in range(unpacker.plan.num_buckets) if index not in hashes]
        if missing:
            raise TransportError(
                f"{len(missing)} of {unpacker.plan.num_buckets} buckets never came: {missing[:8]}"
            )

    def _take(self, unpacker: Unpacker, bucket: Bucket, hashes: set[int]) -> None:
        index, nbytes = bucket.index, bucket.memory.nbytes
        expected = unpacker.plan.bucket_nbytes(index)
        found = hash64(bucket.memory)
        if index in hashes:
            raise BucketCorrupt(f"bucket {index} came twice")
        if found != bucket.hash64 or nbytes != expected:
            raise BucketCorrupt(
                f"bucket {index} is corrupt: {nbytes} bytes with hash {found:#018x}; "
                f"{expected} bytes with hash {bucket.hash64:#018x} were sent"
            )
        unpacker.unpack(index, bucket.memory, self._staging)
        hashes.add(index)

    def _run(self, step: Awaitable[T]) -> T:
        return self._loop.run_until_complete(step)


def _allocated(plan: BucketPlan) -> dict[str, torch.Tensor]:
    """One tensor for every entry, under all its names."""
    staging: dict[str, torch.Tensor] = {}
    for entry in plan.tensors:
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.wire_dtype), device="cpu")
        staging.update(dict.fromkeys(entry.names, tensor))
    return staging


def _identity(info: JsonDict) -> SyncId:
    try:
        return SyncId.parse(str(info.get("sync")))
    except ValueError as error:
        raise HandshakeError(f"update_info['sync']: {error}") from error
