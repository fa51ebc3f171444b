"""Mutants of the way from parameters to the engine: source, packing, transport, landing, handshake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from grpo_lab.errors import SyncError
from grpo_lab.events import (
    BucketPackBegan,
    BucketPacked,
    GatherBegan,
    GatherEnded,
)
from grpo_lab.ports import Engine
from grpo_lab.protocol.delivery import Delivery
from grpo_lab.sim.engine_host import SimulatedPolicy
from grpo_lab.sim.light_trainer import LightTrainer
from grpo_lab.sim.network import SimulatedTransport
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.clusters import Clusters
from grpo_lab.testing.mutants.coordinator import with_delivery
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.transport.sender import RingTransport
from grpo_lab.types import Bucket, SyncId


class Trusting(Delivery):
    """A coordinator that writes the canary's verdict down and goes on: a 200 was enough."""

    async def _score(self, sync: SyncId, engine: Engine) -> None:
        with suppress(SyncError):
            await super()._score(sync, engine)


TRUSTING = with_delivery(Trusting)


class MixedPolicy(SimulatedPolicy):
    """Environment: an engine with parameters of two dtypes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        for tensors in (self._served, self._staging):
            tensors.update(in_two_dtypes(tensors))


class MixedTrainer(LightTrainer):
    """Environment: a trainer with parameters of two dtypes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._weights.update(in_two_dtypes(self._weights))


def in_two_dtypes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    half = (torch.float16, torch.float32)
    return {name: tensor.to(half[place % 2]) for place, (name, tensor) in enumerate(tensors.items())}


class SameAsBefore(PackedSource):
    """The source hands out the weights that it gathered first.

    Field: vllm#32718: a cache in front of the gather; NeMo-RL and others had the like.
    Planted: tensors are cloned once, at the first version, and packed ever after.
    Exposed by: any second version. D5, S6 by the canary.
    """

    def __init__(self, named_tensors: Any, *args: Any, **kwargs: Any) -> None:
        cached: dict[str, Tensor] = {}

        def first() -> Any:
            if not cached:
                cached.update({name: tensor.clone() for name, tensor in named_tensors()})
            return iter(cached.items())

        super().__init__(first, *args, **kwargs)


class SendsTheFrozenPart(PackedSource):
    """What is trained is not what is sent.

    Field: verl#7495: the adapter is trained and the base model is sent; the policy stays where it was.
    Planted: every tensor that is sent is a copy from before training.
    Exposed by: any second version. D5.
    """

    def __init__(self, named_tensors: Any, *args: Any, **kwargs: Any) -> None:
        before = {name: tensor.clone() for name, tensor in named_tensors()}
        super().__init__(lambda: iter(before.items()), *args, **kwargs)


class Swapped(PackedSource):
    """Two tensors of one shape are in each other's place.

    Field: vLLM 0.32's contract: gate and up swapped; the checksums of the engine are equal to the right ones.
    Planted: the first two tensors trade names.
    Exposed by: any update. S6, by the canary alone.
    """

    def __init__(self, named_tensors: Any, *args: Any, **kwargs: Any) -> None:
        def swapped() -> Any:
            tensors = dict(named_tensors())
            first, second = list(tensors)[:2]
            tensors[first], tensors[second] = tensors[second], tensors[first]
            return iter(tensors.items())

        super().__init__(swapped, *args, **kwargs)


class GroupedByDtype(PackedSource):
    """The payload is grouped by dtype, its metadata is in another order; the bytes add up.

    Field: SkyRL#1816: payload by dtype, names in the model's order.
    Planted: the plan keeps the model's order; the bytes are those of the float32 tensors, then those of the
    half ones, laid over it from the beginning.
    Exposed by: mixed dtypes, whose order in the model is not that of the groups. S6, by the canary.
    """

    def __init__(self, named_tensors: Any, *args: Any, **kwargs: Any) -> None:
        def grouped() -> Any:
            tensors = dict(named_tensors())
            groups = sorted(tensors.values(), key=lambda tensor: -tensor.element_size())
            payload = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in groups])
            place = 0
            for name, tensor in tensors.items():
                nbytes = tensor.numel() * tensor.element_size()
                taken = payload[place : place + nbytes].clone().view(tensor.dtype)
                place += nbytes
                yield name, taken.reshape(tensor.shape).nan_to_num()

        super().__init__(grouped, *args, **kwargs)


class PacksTooEarly(PackedSource):
    """The pack reads before the gather has ended.

    Field: vllm-ascend#12713: no event between the producer's stream and the copy.
    Planted: pack, then the end of the gather.
    Exposed by: any update. S10.
    """

    def _pack(self, index: int) -> Bucket:
        packer = self._packer
        assert packer is not None
        place = place_of(self._sync, index)
        self._recorder.emit(GatherBegan(**place, rank=self._rank))
        slot = index % packer.slots
        self._recorder.emit(BucketPackBegan(**place, slot=slot))
        packer.gather(index)
        packed = packer.pack(index)
        self._recorder.emit(BucketPacked(**place, slot=slot, nbytes=packed.nbytes, hash64=packed.hash64))
        self._recorder.emit(GatherEnded(**place, rank=self._rank))
        return Bucket(packed.index, packed.slot, packed.memory, packed.nbytes, packed.hash64)


class GatheredBehind(PackedSource):
    """A bucket is copied while the gather behind it still writes into it.

    Field: ms-swift#9060: gather and copy are on two streams; with a slow gather the copy takes what the
    buffer held before.
    Planted: a bucket is packed as soon as its gather has begun, from the tensors of the version before; the
    gather's end is told when the next bucket is asked for.
    Exposed by: a gather that is slower than the copy, any second version. S10; S6 by the canary.
    """

    def __init__(self, named_tensors: Any, *args: Any, **kwargs: Any) -> None:
        self._before: dict[str, Tensor] = {}

        def late() -> Any:
            now = dict(named_tensors())
            held = self._before or now
            self._before = {name: tensor.clone() for name, tensor in now.items()}
            return iter(held.items())

        super().__init__(late, *args, **kwargs)
        self._open: dict[str, int] | None = None

    def _pack(self, index: int) -> Bucket:
        self._end_gather()
        packer, place = self._packer, place_of(self._sync, index)
        assert packer is not None
        self._recorder.emit(GatherBegan(**place, rank=self._rank))
        self._open = place
        slot = index % packer.slots
        packer.gather(index)
        self._recorder.emit(BucketPackBegan(**place, slot=slot))
        packed = packer.pack(index)
        self._recorder.emit(BucketPacked(**place, slot=slot, nbytes=packed.nbytes, hash64=packed.hash64))
        return Bucket(packed.index, packed.slot, packed.memory, packed.nbytes, packed.hash64)

    async def next(self) -> Bucket | None:
        bucket = await super().next()
        if bucket is None:
            self._end_gather()
        return bucket

    def _end_gather(self) -> None:
        place, self._open = self._open, None
        if place is not None:
            self._recorder.emit(GatherEnded(**place, rank=self._rank))


def place_of(sync: SyncId, bucket: int) -> dict[str, int]:
    return {"term": sync.term, "version": sync.version, "attempt": sync.attempt, "bucket": bucket}


class ChangesWhileRead(PackedSource):
    """A parameter changes between two buckets of one version.

    Field: vllm-ascend#16999: the next optimizer step begins while the sync still reads.
    Planted: the last tensor moves when the first bucket has been packed; a retry packs it again.
    Exposed by: a retry, which must send the same bytes. S6.
    """

    def _pack(self, index: int) -> Bucket:
        bucket = super()._pack(index)
        if index == 0:
            *_, (_, last) = self._named_tensors()
            last.add_(0.001)
        return bucket


class WaitsForNoSlot(RingTransport):
    """A ring slot is packed again before its readers have ended."""

    async def send(self, sync: SyncId, buckets: AsyncIterator[Bucket]) -> float:
        board = self._require_session().board

        async def free_at_once(slot: int, timeout_s: float) -> None:
            board._held[slot] = None

        board.wait_free = free_at_once  # type: ignore[method-assign]
        return await super().send(sync, buckets)


class SlotTooEarly(WaitsForNoSlot, SimulatedTransport):
    """A ring slot is packed again before its readers have ended.

    Field: vllm-ascend#12713: one event for two slots.
    Planted: the sender does not wait for a slot.
    Exposed by: more buckets than slots, and a link with latency. S10.
    """


class NeverGivesBack(SimulatedTransport):
    """The transport's memory is not given back.

    Own case: close() returns early when nobody listens any more.
    Planted: what was allocated stays open.
    Exposed by: any end. S30.
    """

    async def close(self) -> None:
        if self._session is not None:
            self._session.resource = ""
        await super().close()


MIXED_DTYPES = Clusters(
    "mixed dtypes", spaces.CANARY.scenarios, environment={"policy": MixedPolicy, "trainer": MixedTrainer}
)
"""Every second tensor is of half precision, in the trainer and in the engines."""

MUTANTS = (
    Mutant("M12", ("S6", "D5"), spaces.CANARY, SameAsBefore, {"source": SameAsBefore, **TRUSTING}),
    Mutant("M14", ("D5",), spaces.QUIET, SendsTheFrozenPart, {"source": SendsTheFrozenPart}),
    Mutant("M16-a", ("S10",), spaces.QUIET, PacksTooEarly, {"source": PacksTooEarly}),
    Mutant("M16-b", ("S10",), spaces.QUIET, SlotTooEarly, {"transport": SlotTooEarly}),
    Mutant("M16-c", ("S6",), spaces.UPDATE_ERRORS, ChangesWhileRead, {"source": ChangesWhileRead}),
    Mutant("M17", ("S6", "S9"), MIXED_DTYPES, GroupedByDtype, {"source": GroupedByDtype, **TRUSTING}),
    Mutant("M43", ("S10", "S6"), spaces.CANARY, GatheredBehind, {"source": GatheredBehind, **TRUSTING}),
    Mutant("M47", ("S6",), spaces.CANARY, Swapped, {"source": Swapped, **TRUSTING}),
    Mutant("M66", ("S30",), spaces.QUIET, NeverGivesBack, {"transport": NeverGivesBack}),
)
