"""Filling buckets and emptying them.

Sender::

    packer = Packer(plan, slots=2, num_threads=2)
    packer.bind(dict(model.named_parameters()))
    for index in range(plan.num_buckets):
        bucket = packer.pack(index)          # overlaps with sending the bucket before it
        send(bucket.memory, bucket.hash64)   # valid until the slot is packed again

Receiver::

    unpacker = Unpacker(plan)
    unpacker.verify(index, memory, hash64)   # BucketCorrupt unless these are the sender's bytes
    unpacker.unpack(index, memory, staging)

A Packer may be used from several threads, one call at a time; several packers work at once. The 64-bit hash
finds accidents (a flipped, truncated, swapped or stale bucket), not attackers.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from grpo_lab.errors import BucketCorrupt, PackingError
from grpo_lab.packing.dtypes import DTYPES, dtype_name, dtype_named
from grpo_lab.packing.native import BoundTensors, buckets_of, extension, memory_of
from grpo_lab.packing.plan import BucketPlan, TensorEntry
from grpo_lab.packing.ring import allocate_ring, as_bytes, check_ring, stays_in_cache

# Below this, ordinary stores into the targets are faster than non-temporal ones.
STREAM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """A filled slot. ``memory`` is exactly ``nbytes`` long; ``hash64`` is 0 if the packer does not hash."""

    index: int
    slot: int
    memory: memoryview
    nbytes: int
    hash64: int


class Packer:
    """Packs bound tensors into a ring of slots: gather, cast and hash in one pass over memory.

    `ring` gives foreign memory (shared-memory slots, say), each at least ``plan.max_bucket_nbytes`` long and
    best aligned to 64 bytes; without it `slots` buffers are allocated and touched once.
    `refresh` looks at every pack whether tensors moved in memory or changed shape, strides or dtype and binds
    again; without it, bind() must follow every change (worth it for tens of thousands of tiny tensors, where
    looking costs as much as packing).
    `isa` forces one of ``instruction_sets()``; the default takes the best that the CPU has.
    """

    def __init__(
        self,
        plan: BucketPlan,
        *,
        slots: int = 2,
        num_threads: int = 1,
        ring: Sequence[object] | None = None,
        hash: bool = True,
        refresh: bool = True,
        isa: str = "auto",
    ) -> None:
        if ring is None and (type(slots) is not int or not 1 <= slots <= 1024):
            raise PackingError(f"slots is {slots!r}; it must be from 1 to 1024")
        self.plan = plan
        self._pool = _pool(num_threads)
        self._isa = _checked_isa(isa)
        self._hash = bool(hash)
        self._refreshes = bool(refresh)
        self._ring = (
            allocate_ring(slots, plan.max_bucket_nbytes)
            if ring is None
            else check_ring(ring, plan.max_bucket_nbytes)
        )
        self._streams = not stays_in_cache(len(self._ring) * plan.max_bucket_nbytes)
        self._views = extension.Views(buckets_of(plan), False)
        self._mapping: Mapping[str, torch.Tensor] | None = None
        self._watched = BoundTensors(())
        self._starts = array("Q")  # where each position's tensors begin in `_watched`, and the end
        self._sharded: dict[int, torch.Tensor] = {}
        self._gathered: dict[int, torch.Tensor] = {}
        self._gathered_for = -1  # the bucket

    @property
    def slots(self) -> int:
        return len(self._ring)

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the tensors to pack from. They are kept alive and read at each pack, not now.

        Call again after tensors of the mapping were replaced by others. Raises PackingError naming the tensor
        if one is missing, unknown to the plan, of another shape or dtype, not in host memory, or tied in the
        plan but no longer tied. A failed bind leaves nothing bound.
        """
        self._gathered.clear()
        self._bind(tensors)

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._unbind()
        for name in tensors:
            if name not in self.plan.by_name:
                raise PackingError(f"tensor {name!r} is not in the bucket plan; build a new plan")
        watched: list[torch.Tensor] = []
        try:
            for position, entry in enumerate(self.plan.tensors):
                self._starts.append(len(watched))
                watched += self._bind_one(position, entry, tensors)
            for position in [p for p in self._gathered if p not in self._sharded]:
                del self._gathered[position]
            for position, full in self._gathered.items():
                self._views.move(position, memory_of(full, self.plan.tensors[position].name))
        except PackingError:
            self._unbind()
            self._gathered.clear()
            raise
        self._starts.append(len(watched))
        self._watched, self._mapping = BoundTensors(watched), tensors

    def _bind_one(
        self, position: int, entry: TensorEntry, tensors: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns what to look at before each pack: the tensor, and those that are tied to it."""
        tensor = _get(tensors, entry.name)
        _check_same(entry, tensor, (entry.source_dtype,))
        tied = _tied(entry, tensor, tensors)
        if _is_sharded(tensor):
            self._sharded[position] = tensor
            self._add(position, entry, entry.strides, (0, 0, 0))
            return []
        self._add(position, entry, tensor.stride(), memory_of(tensor, entry.name))
        return [tensor, *tied]

    def pack(self, bucket_index: int, slot: int | None = None) -> PackedBucket:
        """Fills `slot` (default: the index modulo the number of slots) with the bucket, in any order of
        buckets.

        Raises PackingError if there is no such bucket or slot, or nothing is bound.
        """
        self.plan.check_bucket(bucket_index)
        if slot is None:
            slot = bucket_index % len(self._ring)
        if type(slot) is not int or not 0 <= slot < len(self._ring):
            raise PackingError(f"no slot {slot!r}: the ring has {len(self._ring)}, counted from 0")
        nbytes = self.plan.bucket_nbytes(bucket_index)
        memory = self._ring[slot][:nbytes]
        how = (self._pool, bucket_index, memory, self._hash, self._streams, self._isa)
        hash64: int | None = None
        if self._refreshes and not self._sharded and (watch := self._watched.watch):
            span = self.plan.tensors_of_bucket[bucket_index]
            tensors = (span.start, span.stop)
            hash64 = extension.pack_watched(self._views, watch, self._starts, tensors, *how)
        if hash64 is None:  # something changed, or is to be gathered, or looking is a pass of its own
            if self._refreshes:
                self._refresh(bucket_index)
            self.gather(bucket_index)
            hash64 = extension.pack(self._views, *how)
        return PackedBucket(bucket_index, slot, memory, nbytes, hash64)

    def gather(self, bucket_index: int) -> None:
        """Gathers the bucket's DTensors, one at a time; pack does so itself.

        A rank that only takes part in the collectives calls this for each bucket in place of pack.
        """
        if self._mapping is None:
            raise PackingError("no tensors are bound; call bind() before pack()")
        wanted = self.plan.tensors_of_bucket[bucket_index] if self._sharded else range(0)
        # A tensor that reaches into the next bucket is kept for it. Packing a bucket again is another sync.
        kept = wanted if bucket_index > self._gathered_for else range(0)
        self._gathered_for = bucket_index
        for position in [p for p in self._gathered if p not in kept]:
            self._views.move(position, (0, 0, 0))
            del self._gathered[position]
        for position in wanted:
            if position in self._gathered or position not in self._sharded:
                continue
            full = self._sharded[position].full_tensor().contiguous()  # type: ignore[attr-defined]
            self._views.move(position, memory_of(full, self.plan.tensors[position].name))
            self._gathered[position] = full

    def _add(
        self, position: int, entry: TensorEntry, strides: Sequence[int], memory: tuple[int, int, int]
    ) -> None:
        try:
            self._views.add(position, DTYPES[entry.source_dtype].code, entry.shape, strides, memory)
        except ValueError as error:
            raise PackingError(f"tensor {entry.name!r}: {error}") from None

    def _refresh(self, bucket_index: int) -> None:
        """Binds again if one of the bucket's tensors changed. What was gathered is kept: that was a
        collective, and other ranks do not know."""
        span = self.plan.tensors_of_bucket[bucket_index]
        if self._mapping is None or not span:
            return
        if self._watched.changed(range(self._starts[span.start], self._starts[span.stop])):
            self._bind(self._mapping)

    def _unbind(self) -> None:
        self._views.clear()
        self._mapping, self._watched = None, BoundTensors(())
        self._starts = array("Q")
        self._sharded.clear()


class Unpacker:
    """Checks buckets and writes their tensors back."""

    def __init__(self, plan: BucketPlan, *, num_threads: int = 1, isa: str = "auto") -> None:
        self.plan = plan
        self._pool = _pool(num_threads)
        self._isa = _checked_isa(isa)
        self._buckets = buckets_of(plan)

    def verify(self, bucket_index: int, memory: object, hash64: int) -> None:
        """Raises BucketCorrupt unless `memory` has the bucket's size and the sender's hash."""
        data = self._sized(bucket_index, memory)
        found = extension.hash64(data, self._pool, self._isa)
        if found != hash64:
            raise BucketCorrupt(f"bucket {bucket_index}: expected hash {hash64:#018x}, found {found:#018x}")

    def unpack(self, bucket_index: int, memory: object, into: Mapping[str, torch.Tensor]) -> None:
        """Writes the bucket's tensors into those of `into`, which may be strided views, under any of their
        names.

        Targets have the wire dtype, or any float dtype if the wire's is one. Where both a tensor and its
        alias are given, both are written. Raises PackingError naming the tensor that is missing, has another
        shape or a dtype that does not fit, or whose elements share memory; BucketCorrupt if the size is
        wrong.
        """
        data = self._sized(bucket_index, memory)
        Targets(self, into, self.plan.tensors_of_bucket[bucket_index])._unpack(bucket_index, data)

    def bind(self, into: Mapping[str, torch.Tensor]) -> Targets:
        """Checks all targets once, for many syncs into the same tensors."""
        return Targets(self, into, range(len(self.plan.tensors)))

    def _sized(self, bucket_index: int, memory: object) -> memoryview:
        expected = self.plan.bucket_nbytes(bucket_index)
        data = as_bytes(memory, f"bucket {bucket_index}")
        if data.nbytes != expected:
            raise BucketCorrupt(f"bucket {bucket_index}: expected {expected} bytes, found {data.nbytes}")
        return data


class Targets:
    """Tensors that an Unpacker writes to, kept alive. Bind again if their memory moved."""

    def __init__(self, unpacker: Unpacker, into: Mapping[str, torch.Tensor], positions: range) -> None:
        self._unpacker = unpacker
        self._into = into
        self._views = extension.Views(unpacker._buckets, True)
        self._starts: dict[int, int] = {}
        self._bound = BoundTensors(t for p in positions for t in self._add(p, unpacker.plan.tensors[p]))

    def unpack(self, bucket_index: int, memory: object) -> None:
        """As :meth:`Unpacker.unpack`. Raises PackingError if a target changed since it was bound."""
        data = self._unpacker._sized(bucket_index, memory)
        span = self._unpacker.plan.tensors_of_bucket[bucket_index]
        if span:
            end = self._starts.get(span.stop, len(self._bound))
            if self._bound.changed(range(self._starts[span.start], end)):
                raise PackingError(
                    f"targets of bucket {bucket_index} moved in memory or changed; bind them again"
                )
        self._unpack(bucket_index, data)

    def _unpack(self, bucket_index: int, data: memoryview) -> None:
        unpacker = self._unpacker
        stream = data.nbytes >= STREAM_BYTES
        extension.unpack(self._views, unpacker._pool, bucket_index, data, stream, unpacker._isa)

    def _add(self, position: int, entry: TensorEntry) -> list[torch.Tensor]:
        """Binds every tensor that is given for the entry, once."""
        self._starts[position] = len(self._views)
        bound: list[torch.Tensor] = []
        written: set[tuple[int, tuple[int, ...]]] = set()
        dtypes = tuple(DTYPES) if DTYPES[entry.wire_dtype].castable else (entry.wire_dtype,)
        for name in entry.names:
            if name not in self._into:
                continue
            tensor = self._into[name]
            _check_same(entry, tensor, dtypes, name)
            memory, strides = memory_of(tensor, name), tensor.stride()
            if (memory[0], strides) in written:
                continue
            written.add((memory[0], strides))
            dtype = dtype_named(dtype_name(tensor), f"tensor {name!r}")
            try:
                self._views.add(position, dtype.code, entry.shape, strides, memory)
            except ValueError as error:
                raise PackingError(
                    f"target {name!r} ({dtype.name}, sent as {entry.wire_dtype}): {error}"
                ) from None
            bound.append(tensor)
        if not written:
            names = ", ".join(entry.names)
            raise PackingError(f"no target for tensor {entry.name!r}; give one under one of {names}")
        return bound


def hash64(memory: object) -> int:
    """The hash of a bucket's bytes: a tree of XXH3-64 over leaves of 64 KiB (``csrc/xxh3.h``)."""
    return extension.hash64(as_bytes(memory, "memory"), extension.Pool(1))


def instruction_sets() -> list[str]:
    """What this CPU can run, best first; the last one is portable C++."""
    return extension.instruction_sets()


def _pool(num_threads: int) -> extension.Pool:
    if type(num_threads) is not int or not 1 <= num_threads <= 256:
        raise PackingError(f"num_threads is {num_threads!r}; it must be from 1 to 256")
    return extension.Pool(num_threads)


def _checked_isa(isa: str) -> str:
    if isa != "auto" and isa not in extension.instruction_sets():
        raise PackingError(
            f"isa {isa!r} is not available; this CPU has {', '.join(extension.instruction_sets())}"
        )
    return isa


def _get(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    try:
        return tensors[name]
    except KeyError:
        raise PackingError(f"tensor {name!r} of the bucket plan was not given") from None


def _check_same(entry: TensorEntry, tensor: torch.Tensor, dtypes: tuple[str, ...], name: str = "") -> None:
    name = name or entry.name
    if tuple(tensor.shape) != entry.shape:
        raise PackingError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}; the bucket plan has {entry.shape}"
        )
    if dtype_name(tensor) not in dtypes:
        raise PackingError(
            f"tensor {name!r} has dtype {dtype_name(tensor)}; the bucket plan has {' or '.join(dtypes)}"
        )


def _tied(
    entry: TensorEntry, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The aliases that are given as tensors of their own. A tie that was cut would send one for two."""
    found = []
    for alias in entry.aliases:
        other = tensors.get(alias)
        if other is None or other is tensor:
            continue
        _check_same(entry, other, (entry.source_dtype,), alias)
        ours, theirs = tensor, other
        if _is_sharded(tensor) or _is_sharded(other):
            ours, theirs = tensor.to_local(), other.to_local()  # type: ignore[attr-defined]
        if theirs.data_ptr() != ours.data_ptr() or theirs.stride() != ours.stride():
            raise PackingError(
                f"tensor {alias!r} was tied to {entry.name!r} and is no more; build a new plan"
            )
        found.append(other)
    return found


def _is_sharded(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "full_tensor", None) is not None
