"""Mutants of the way from parameters to the engine: source, packing, transport, landing, handshake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

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
from grpo_lab.sim.network import SimulatedTransport
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.coordinator import with_delivery
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.types import Bucket, SyncId


class Trusting(Delivery):
    """A coordinator that writes the canary's verdict down and goes on: a 200 was enough."""

    async def _score(self, sync: SyncId, engine: Engine) -> None:
        with suppress(SyncError):
            await super()._score(sync, engine)


TRUSTING = with_delivery(Trusting)


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


class OtherOrderThanSaid(PackedSource):
    """The payload is grouped in another order than its metadata says; the bytes add up.

    Field: SkyRL#1816: payload by dtype, names in the model's order.
    Planted: the plan keeps the model's order, the tensors are bound in reverse.
    Exposed by: any update. S6, by the canary.
    """

    def __init__(self, named_tensors: Any, *args: Any, **kwargs: Any) -> None:
        def reversed_payload() -> Any:
            tensors = dict(named_tensors())
            return iter(zip(tensors, reversed(list(tensors.values())), strict=True))

        super().__init__(reversed_payload, *args, **kwargs)


class PacksTooEarly(PackedSource):
    """The pack reads before the gather has ended.

    Field: vllm-ascend#12713, ms-swift#9060: no event between the producer's stream and the copy.
    Planted: pack, then the end of the gather.
    Exposed by: any update. S10.
    """

    def _pack(self, index: int) -> Bucket:
        packer = self._packer
        assert packer is not None
        place = {
            "term": self._sync.term,
            "version": self._sync.version,
            "attempt": self._sync.attempt,
            "bucket": index,
        }
        self._recorder.emit(GatherBegan(**place, rank=self._rank))
        slot = index % packer.slots
        self._recorder.emit(BucketPackBegan(**place, slot=slot))
        packer.gather(index)
        packed = packer.pack(index)
        self._recorder.emit(BucketPacked(**place, slot=slot, nbytes=packed.nbytes, hash64=packed.hash64))
        self._recorder.emit(GatherEnded(**place, rank=self._rank))
        return Bucket(packed.index, packed.slot, packed.memory, packed.nbytes, packed.hash64)


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


class SlotTooEarly(SimulatedTransport):
    """A ring slot is packed again before its readers have ended.

    Field: vllm-ascend#12713: one event for two slots.
    Planted: the sender does not wait for a slot.
    Exposed by: more buckets than slots, and a link with latency. S10.
    """

    async def send(self, sync: SyncId, buckets: AsyncIterator[Bucket]) -> float:
        board = self._require_session().board

        async def free_at_once(slot: int, timeout_s: float) -> None:
            board._held[slot] = None

        board.wait_free = free_at_once  # type: ignore[method-assign]
        return await super().send(sync, buckets)


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


MUTANTS = (
    Mutant("M12", ("S6", "D5"), spaces.CANARY, SameAsBefore, {"source": SameAsBefore, **TRUSTING}),
    Mutant("M14", ("D5",), spaces.QUIET, SendsTheFrozenPart, {"source": SendsTheFrozenPart}),
    Mutant("M16-a", ("S10",), spaces.QUIET, PacksTooEarly, {"source": PacksTooEarly}),
    Mutant("M16-b", ("S10",), spaces.QUIET, SlotTooEarly, {"transport": SlotTooEarly}),
    Mutant("M16-c", ("S6",), spaces.UPDATE_ERRORS, ChangesWhileRead, {"source": ChangesWhileRead}),
    Mutant(
        "M17", ("S6", "S9"), spaces.CANARY, OtherOrderThanSaid, {"source": OtherOrderThanSaid, **TRUSTING}
    ),
    Mutant("M43", ("S10", "S9"), spaces.QUIET, PacksTooEarly, {"source": PacksTooEarly}),
    Mutant("M47", ("S6",), spaces.CANARY, Swapped, {"source": Swapped, **TRUSTING}),
    Mutant("M66", ("S30",), spaces.QUIET, NeverGivesBack, {"transport": NeverGivesBack}),
)
