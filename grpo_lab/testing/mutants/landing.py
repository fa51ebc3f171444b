"""Mutants of where weights land: what an engine accepts, compares and loads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from grpo_lab.engine.rl_state import RlState, Session
from grpo_lab.events import BucketReceived, HandshakeCompared
from grpo_lab.packing import BucketPlan, hash64
from grpo_lab.ports import Engine
from grpo_lab.protocol.delivery import Delivery
from grpo_lab.sim.engine_host import SimulatedPolicy, model_score
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.coordinator import with_delivery
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.testing.mutants.packer import TRUSTING
from grpo_lab.types import Bucket, JsonDict, SyncId


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
                hash64=hash64(bucket.memory),
                expected_hash64=bucket.hash64,
            )
        )
        session.hashes[bucket.index] = bucket.hash64


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
    Mutant("M13-a", ("S9",), spaces.QUIET, NothingMoved, {"rl": NothingMoved}),
    Mutant("M13-b", ("S6",), spaces.BAD_BUCKETS, DamageLands, {"rl": DamageLands}),
    Mutant(
        "M15",
        ("S9",),
        spaces.SLOW_LINKS,
        LoadsBeforeTheLast,
        {"rl": LoadsBeforeTheLast, **with_delivery(AcknowledgementIsEnough)},
    ),
    Mutant("M18", ("H1",), spaces.QUIET, OtherDtype, {"rl": OtherDtype, **with_delivery(NoComparison)}),
    Mutant("M19", ("S6",), spaces.CANARY, HeadClonedAtLoad, {"policy": HeadClonedAtLoad, **TRUSTING}),
    Mutant("M20", ("H1",), spaces.QUIET, OtherNames, {"rl": OtherNames, **with_delivery(NoComparison)}),
    Mutant(
        "M45", ("S9", "S6"), spaces.QUIET, EmptyUpdate, {"rl": AcceptsEmpty, **with_delivery(EmptyUpdate)}
    ),
    Mutant("M46", ("S9",), spaces.QUIET, MixtureLands, {"rl": MixtureLands}),
    Mutant(
        "M48", ("H1",), spaces.QUIET, RoundsSilently, {"rl": RoundsSilently, **with_delivery(NoComparison)}
    ),
    Mutant("M49", ("S6",), spaces.CANARY, HeadLeftStale, {"policy": HeadLeftStale, **TRUSTING}),
    Mutant("M77", ("H1",), spaces.QUIET, NoHandshake, with_delivery(NoHandshake)),
)
