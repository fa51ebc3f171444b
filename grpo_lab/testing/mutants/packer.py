"""Mutants of the way from parameters to the engine: source, packing, transport, landing, handshake."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from grpo_lab.engine.request import WeightIdentity
from grpo_lab.engine.rl_state import RlState, Session
from grpo_lab.errors import GrpoLabError, SyncError
from grpo_lab.events import (
    BucketPackBegan,
    BucketPacked,
    BucketReceived,
    GatherBegan,
    GatherEnded,
    HandshakeCompared,
)
from grpo_lab.packing import BucketPlan
from grpo_lab.ports import Engine
from grpo_lab.protocol.delivery import Delivery
from grpo_lab.sim.engine_host import SimulatedPolicy, model_score
from grpo_lab.sim.network import SimulatedTransport
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.coordinator import with_delivery
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.types import Bucket, JsonDict, SyncId


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


class Believes(RlState):
    """Planted in an engine: what comes is taken as it is, complete or not, whole or not."""

    check_hash = False

    async def _receive_all(self, session: Session, info: JsonDict) -> None:
        with suppress(Exception):
            await super()._receive_all(session, info)

    async def _take(self, session: Session, sync: SyncId, bucket: Bucket) -> None:
        self.core.recorder.emit(
            BucketReceived(
                engine=self.core.config.name,
                term=sync.term,
                version=sync.version,
                attempt=sync.attempt,
                bucket=bucket.index,
                nbytes=len(bucket.memory),
                hash64=_hash(bucket.memory),
                expected_hash64=bucket.hash64,
            )
        )
        session.hashes[bucket.index] = bucket.hash64


def _hash(memory: memoryview) -> int:
    from grpo_lab.packing import hash64  # noqa: PLC0415

    return hash64(memory)


class NothingMoved(Believes):
    """200 OK, although no byte has moved; the receive buffer holds what was there before.

    Field: vllm#57022: a backend without data path that acknowledges everything.
    Planted: update and finish succeed without a bucket.
    Exposed by: any update. S9.
    """

    async def _receive_all(self, session: Session, info: JsonDict) -> None:
        async for _ in self._receiver.receive(session.sync, info):  # type: ignore[union-attr, arg-type]
            pass


class DamageLands(Believes):
    """Bytes are not looked at where they land.

    Field: vllm#57022, the other half: what is in the buffer is loaded.
    Planted: a bucket is accepted whatever its hash.
    Exposed by: a flipped bit. S6.
    """


class MixtureLands(Believes):
    """A truncated list of tensors is loaded: a mixture of two versions, 200 everywhere.

    Field: vLLM 0.32's contract: names that did not come keep their old weights.
    Planted: the last bucket is not on the list, and nobody counts.
    Exposed by: any update. S9.
    """

    async def _receive_all(self, session: Session, info: JsonDict) -> None:
        assert self._receiver is not None
        assert session.sync is not None
        async for bucket in self._receiver.receive(session.sync, info):
            if bucket.index < info["num_buckets"] - 1:
                await self._take(session, session.sync, bucket)


class AcknowledgementIsEnough(Delivery):
    """A sender that goes on when all engines have answered, whatever is still under way."""

    async def _move(self, sync: SyncId, times: Any) -> None:
        info = self._transport.update_info(sync)
        sending = asyncio.get_running_loop().create_task(
            self._transport.send(sync, self._published(sync)), name="send"
        )
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())
        for engine in self._set.view:
            await self._set.one(
                "update", lambda one: one.update(sync, info), engine, self._limits.transfer_s, sync
            )


class LoadsBeforeTheLast(RlState):
    """Finish is obeyed while the last bucket is still landing.

    Field: NeMo-RL#3055: the engine resumes on the acknowledgement, not on the end of the transfer.
    Planted: update answers at once, and finish loads what is there.
    Exposed by: buckets that take their time. S9.
    """

    async def update(self, info: JsonDict, sync: SyncId | None = None, term: int = 0) -> None:
        task = asyncio.get_running_loop().create_task(super().update(info, sync, term), name="update")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0.001)

    def _incomplete(self, session: Session, sync: SyncId | None) -> str:
        return ""

    async def _switch(self, session: Session) -> None:
        await super()._switch(session)
        self._session = session  # what still comes must land somewhere


class EmptyUpdate(Delivery):
    """An update without content moves the version.

    Field: vLLM 0.32's contract: start and finish alone, or an empty list, are a success with a new version.
    Planted: from the second version on nothing is sent; the engine accepts that.
    Exposed by: any second version. S9.
    """

    async def _move(self, sync: SyncId, times: Any) -> None:
        if sync.version < 2:
            await super()._move(sync, times)
            return
        async for _ in self._published(sync):
            pass


class AcceptsEmpty(RlState):
    """Planted in an engine: finish needs no update before it."""

    async def finish(self, label: str | None, sync: SyncId | None = None, term: int = 0) -> None:
        session = self._session
        if session is not None and session.receiving is None:
            session.sync = sync
            await self._switch(session)
            return
        await super().finish(label, sync, term)


class AliasBroken(SimulatedPolicy):
    """The second reload of a tensor that two names share goes to a copy.

    Field: vllm#48312: a reload breaks aliased parameters, and a second one differs from the first.
    Planted: from the second activation on the last tensor keeps what the first gave it.
    Exposed by: two updates. S6, by the canary.
    """

    def activate(self) -> None:
        super().activate()
        name = list(self._served)[-1]
        count = self._activations = self.__dict__.get("_activations", 0) + 1
        if count == 1:
            self._alias = self._served[name].clone()
        else:
            self._served[name].copy_(self._alias)


class HeadLeftStale(SimulatedPolicy):
    """The output head, tied to the embedding, stays old after a clean update; the checker says match.

    Field: molt#26, vllm#51665, vLLM 0.32's contract: the head was packed into a layout of its own at start.
    Planted: scores come from a copy of the first tensor, made at the first activation; the parameters that a
    checksum sees are right.
    Exposed by: a tied model, two updates. S6, by the canary alone.
    """

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        name, tensor = next(iter(self._served.items()))
        if "_head" not in self.__dict__ and bool(tensor.any()):
            self._head = tensor.clone()
        return model_score({**self._served, name: self.__dict__.get("_head", tensor)}, sequences)


class HeadClonedAtLoad(SimulatedPolicy):
    """The head is a clone that an update of the embedding does not reach.

    Field: molt#26: tied tensors are sent once, and land in one of two places.
    Planted: the served first tensor goes back to its first value after each activation but the first.
    Exposed by: a tied model, two updates. S6, by the canary.
    """

    def activate(self) -> None:
        super().activate()
        name = next(iter(self._served))
        first = self.__dict__.setdefault("_first", self._served[name].clone())
        self._served[name].copy_(first)


class NoComparison(Delivery):
    """A sender that does not compare its plan with the engine's."""

    async def _join(self, engine: Engine, sync: SyncId) -> None:
        info = self._transport.init_info(engine.name)
        theirs = await engine.init_transfer(info, sync.term)
        self._recorder.emit(
            HandshakeCompared(engine=engine.name, ours=self._source.plan_digest, theirs=theirs)
        )


class OwnPlan(RlState):
    """Planted in an engine: it takes any offer and unpacks by a plan of its own."""

    def other(self, tensors: Mapping[str, Tensor]) -> BucketPlan:
        raise NotImplementedError

    async def init(self, info: JsonDict, term: int = 0) -> str:
        await super().init(info, term)
        return self.other(self.core.policy.parameters()).digest()


class OtherBucketSize(OwnPlan):
    """The two sides use different bucket sizes.

    Field: trl#7104, vllm#31943: the geometry is a constant on each side, and one was changed.
    Planted: the engine's plan has buckets of twice the size, and nobody compares.
    Exposed by: any handshake. H1.
    """

    def other(self, tensors: Mapping[str, Tensor]) -> BucketPlan:
        return BucketPlan.build(dict(tensors), bucket_bytes=8192)


class OtherDtype(OwnPlan):
    """The dtype that is sent is not the one that is declared.

    Field: AReaL#1488, OpenRLHF#1348: fp32 is sent, bf16 declared.
    Planted: the engine's plan has bfloat16 on the wire, and nobody compares.
    Exposed by: any handshake. H1.
    """

    def other(self, tensors: Mapping[str, Tensor]) -> BucketPlan:
        return BucketPlan.build(dict(tensors), wire_dtype="bfloat16", bucket_bytes=512)


class RoundsSilently(OwnPlan):
    """Another dtype than the engine's is rounded without a word.

    Field: vLLM 0.32's contract: bf16 into fp32 parameters, and fp32 into bf16 ones, with a 200.
    Planted: the engine's parameters are float16, and nobody compares.
    Exposed by: any handshake. H1.
    """

    def other(self, tensors: Mapping[str, Tensor]) -> BucketPlan:
        half = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
        return BucketPlan.build(half, bucket_bytes=512)


class OtherNames(OwnPlan):
    """Names do not match: a wrapper's prefix on one side.

    Field: ROLL#499, trl#5269, vllm#19149: ``module.`` before every name, fused parts, adapters' suffixes.
    Planted: the engine's plan has other names, and nobody compares.
    Exposed by: any handshake. H1, with the missing and extra names.
    """

    def other(self, tensors: Mapping[str, Tensor]) -> BucketPlan:
        named = {f"module.{name}": tensor for name, tensor in tensors.items()}
        return BucketPlan.build(named, bucket_bytes=512)


class NoHandshake(Delivery):
    """After a fault the transfer is joined again without a word about it.

    Own case: the second join is taken for the first one's.
    Planted: a handshake is recorded for the first view only.
    Exposed by: an engine that restarts, and any failed transfer. H1.
    """

    async def _join(self, engine: Engine, sync: SyncId) -> None:
        await engine.init_transfer(self._transport.init_info(engine.name), sync.term)


MUTANTS = (
    Mutant(
        "M04", ("H1",), spaces.QUIET, OtherBucketSize, {"rl": OtherBucketSize, **with_delivery(NoComparison)}
    ),
    Mutant("M11", ("S6",), spaces.CANARY, AliasBroken, {"policy": AliasBroken, **TRUSTING}),
    Mutant("M12", ("S6", "D5"), spaces.CANARY, SameAsBefore, {"source": SameAsBefore, **TRUSTING}),
    Mutant("M13-a", ("S9",), spaces.QUIET, NothingMoved, {"rl": NothingMoved}),
    Mutant("M13-b", ("S6",), spaces.BAD_BUCKETS, DamageLands, {"rl": DamageLands}),
    Mutant("M14", ("D5",), spaces.QUIET, SendsTheFrozenPart, {"source": SendsTheFrozenPart}),
    Mutant(
        "M15",
        ("S9",),
        spaces.SLOW_LINKS,
        LoadsBeforeTheLast,
        {"rl": LoadsBeforeTheLast, **with_delivery(AcknowledgementIsEnough)},
    ),
    Mutant("M16-a", ("S10",), spaces.QUIET, PacksTooEarly, {"source": PacksTooEarly}),
    Mutant("M16-b", ("S10",), spaces.QUIET, SlotTooEarly, {"transport": SlotTooEarly}),
    Mutant("M16-c", ("S6",), spaces.UPDATE_ERRORS, ChangesWhileRead, {"source": ChangesWhileRead}),
    Mutant(
        "M17", ("S6", "S9"), spaces.CANARY, OtherOrderThanSaid, {"source": OtherOrderThanSaid, **TRUSTING}
    ),
    Mutant("M18", ("H1",), spaces.QUIET, OtherDtype, {"rl": OtherDtype, **with_delivery(NoComparison)}),
    Mutant("M19", ("S6",), spaces.CANARY, HeadClonedAtLoad, {"policy": HeadClonedAtLoad, **TRUSTING}),
    Mutant("M20", ("H1",), spaces.QUIET, OtherNames, {"rl": OtherNames, **with_delivery(NoComparison)}),
    Mutant("M43", ("S10", "S9"), spaces.QUIET, PacksTooEarly, {"source": PacksTooEarly}),
    Mutant(
        "M45", ("S9", "S6"), spaces.QUIET, EmptyUpdate, {"rl": AcceptsEmpty, **with_delivery(EmptyUpdate)}
    ),
    Mutant("M46", ("S9",), spaces.QUIET, MixtureLands, {"rl": MixtureLands}),
    Mutant("M47", ("S6",), spaces.CANARY, Swapped, {"source": Swapped, **TRUSTING}),
    Mutant(
        "M48", ("H1",), spaces.QUIET, RoundsSilently, {"rl": RoundsSilently, **with_delivery(NoComparison)}
    ),
    Mutant("M49", ("S6",), spaces.CANARY, HeadLeftStale, {"policy": HeadLeftStale, **TRUSTING}),
    Mutant("M66", ("S30",), spaces.QUIET, NeverGivesBack, {"transport": NeverGivesBack}),
    Mutant("M77", ("H1",), spaces.QUIET, NoHandshake, with_delivery(NoHandshake)),
)
_ = (dataclasses, WeightIdentity, GrpoLabError)
