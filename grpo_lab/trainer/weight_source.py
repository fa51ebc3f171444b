"""The trainer's parameters as packed buckets: port ``WeightSource`` over ``packing``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from grpo_lab.errors import TransportError
from grpo_lab.events import BucketPackBegan, BucketPacked, GatherBegan, GatherEnded
from grpo_lab.packing import BucketPlan, Packer
from grpo_lab.ports import Bridge, Recorder
from grpo_lab.trainer.protocols import NamedTensors
from grpo_lab.types import Bucket, JsonDict, SyncId

ScoreFunction = Callable[[Sequence[Sequence[int]]], list[list[float]]]


class PackedSource:
    """Gathers and packs in the trainer's thread, one bucket at a time, straight into the transport's ring.

    The trainer is blocked in the sync while this runs, so the parameters do not change under it (S10);
    a retry packs the same weights again. On ranks that do not send, ``next`` takes part in the gathers
    and packs nothing.

    Args:
        ring: gives the slots of the transport's present life; empty on ranks that do not send.
    """

    def __init__(
        self,
        named_tensors: NamedTensors,
        bridge: Bridge,
        recorder: Recorder,
        *,
        ring: Callable[[], Sequence[memoryview]],
        score: ScoreFunction,
        bucket_bytes: int,
        wire_dtype: str | None,
        num_threads: int,
        sends: bool,
        rank: int = 0,
    ) -> None:
        self._named_tensors = named_tensors
        self._bridge = bridge
        self._recorder = recorder
        self._ring = ring
        self._score = score
        self._num_threads = num_threads
        self._sends = sends
        self._rank = rank
        self._plan = BucketPlan.build(dict(named_tensors()), wire_dtype=wire_dtype, bucket_bytes=bucket_bytes)
        self._json = self._plan.to_json()
        self._digest = self._plan.digest()
        self._packer: Packer | None = None
        self._packs_into: Sequence[memoryview] = ()
        self._sync = SyncId(0, 0, 0)
        self._next = 0
        self._phases_s = {"gather": 0.0, "pack": 0.0}

    @property
    def plan(self) -> JsonDict:
        return self._json

    @property
    def plan_digest(self) -> str:
        return self._digest

    @property
    def num_buckets(self) -> int:
        return self._plan.num_buckets

    @property
    def num_tensors(self) -> int:
        return len(self._plan.tensors)

    def phases_s(self) -> dict[str, float]:
        return dict(self._phases_s)

    async def begin(self, sync: SyncId) -> None:
        self._sync = sync
        self._next = 0
        self._phases_s = {"gather": 0.0, "pack": 0.0}
        await self._bridge.in_caller(self._bind)

    async def next(self) -> Bucket | None:
        if self._next >= self._plan.num_buckets:
            return None
        index, self._next = self._next, self._next + 1
        return await self._bridge.in_caller(lambda: self._pack(index))

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._bridge.in_caller(lambda: self._score(sequences))

    def _bind(self) -> None:
        started_s = time.perf_counter()
        ring = self._ring() if self._sends else ()
        if self._packer is None or ring is not self._packs_into:
            # Every open of the transport makes new slots.
            self._packs_into = ring
            foreign = list(ring) if self._sends else None
            self._packer = Packer(self._plan, slots=1, ring=foreign, num_threads=self._num_threads)
        self._packer.bind(dict(self._named_tensors()))
        self._phases_s["gather"] += time.perf_counter() - started_s

    def _abandoned(self) -> bool:
        """Whether the transport has given the ring up: its receivers may still read from the slots (S10)."""
        try:
            return self._ring() is not self._packs_into
        except TransportError:
            return True

    def _pack(self, index: int) -> Bucket:
        packer = self._packer
        assert packer is not None, "begin() comes first"
        started_s = time.perf_counter()
        bucket = {**_fields(self._sync), "bucket": index}
        self._recorder.emit(GatherBegan(**bucket, rank=self._rank))
        packer.gather(index)
        self._recorder.emit(GatherEnded(**bucket, rank=self._rank))
        gathered_s = time.perf_counter()
        self._phases_s["gather"] += gathered_s - started_s
        if not self._sends or self._abandoned():
            return Bucket(index, 0, memoryview(b""), 0, 0)
        place = {**bucket, "slot": index % packer.slots}
        self._recorder.emit(BucketPackBegan(**place))
        packed = packer.pack(index)
        self._recorder.emit(BucketPacked(**place, nbytes=packed.nbytes, hash64=packed.hash64))
        self._phases_s["pack"] += time.perf_counter() - gathered_s
        return Bucket(packed.index, packed.slot, packed.memory, packed.nbytes, packed.hash64)


def _fields(sync: SyncId) -> dict[str, int]:
    return {"term": sync.term, "version": sync.version, "attempt": sync.attempt}
