"""The packer against its peers, on equal terms.

Every contender moves the same tensors bucket by bucket into (or out of) memory that was touched before,
except those whose way is fresh memory. All are run in turn, `repeats` times, and medians are compared, so
that noise of the machine falls on all of them. `flat_copy_s` is the limit: a flat pass
with non-temporal stores that reads as many bytes and writes as many (a cast to half the width reads two for
each that it writes), and neither casts nor hashes.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from grpo_lab.packing.dtypes import DTYPES
from grpo_lab.packing.layout import Layout
from grpo_lab.packing.native import extension
from grpo_lab.packing.packer import Packer, Unpacker
from grpo_lab.packing.plan import BucketPlan
from grpo_lab.packing.ring import allocate_ring, as_bytes
from grpo_lab.packing.shapes import MODELS, Shape

KiB, MiB = 1 << 10, 1 << 20
_LINE, _SMALL_BYTES = 64, 16 * KiB


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the benchmark, over the model's tensors in order, those that fit into `max_parameters`."""

    op: str  # "pack" or "unpack"
    model: str
    source_dtype: str
    wire_dtype: str
    bucket_bytes: int
    strides: str = "contiguous"  # or "transposed": every matrix is the transpose of what is in memory
    layout: Layout = "aligned"
    hash: bool = True
    threads: int = 2
    torch_threads: int = 2
    refresh: bool = True  # look for moved tensors at each pack
    max_parameters: int = 1 << 28


@dataclass(frozen=True, slots=True)
class Row(Case):
    """A case and what was measured; seconds are medians for all buckets of the case together."""

    source_bytes: int = 0
    wire_bytes: int = 0
    buckets: int = 0
    tensors: int = 0
    ours_s: float = 0.0
    peers_s: dict[str, float] = dataclasses.field(default_factory=dict)
    flat_copy_s: float = 0.0
    verify_s: float | None = None  # unpack only: hashing what arrived
    with_hash_s: float | None = None  # rows without hash only: ours with it
    repeats: int = 0


def make_tensors(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random values, the same for every contender, and the block of bytes that the larger tensors lie in.

    One block, so that a flat copy can read the very same pages: some are faster than others. Small tensors
    have memory of their own, wherever the heap puts it.
    """
    dtype = getattr(torch, case.source_dtype)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1 << 20, generator=generator).to(dtype)
    shapes = dict(_shapes(case, dtype.itemsize))
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes.values()]
    block = torch.ones(sum(-(-size // _LINE) * _LINE for size in sizes), dtype=torch.uint8)
    tensors: dict[str, torch.Tensor] = {}
    used = 0
    for (name, shape), size in zip(shapes.items(), sizes, strict=True):
        if size < _SMALL_BYTES:
            flat = torch.empty(math.prod(shape), dtype=dtype)
        else:  # a storage of its own, as every parameter has
            flat = torch.frombuffer(block.numpy(), dtype=dtype, count=math.prod(shape), offset=used)
            used += -(-size // _LINE) * _LINE
        for start in range(0, flat.numel(), values.numel()):
            part = flat[start : start + values.numel()]
            part.copy_(values[: part.numel()])
        tensors[name] = flat.view(shape[::-1]).t() if case.strides == "transposed" else flat.view(shape)
    return tensors, block


def _shapes(case: Case, itemsize: int) -> Iterator[tuple[str, Shape]]:
    left = case.max_parameters
    for name, shape in MODELS[case.model]:
        numel = math.prod(shape)
        if case.strides == "transposed" and (len(shape) != 2 or numel * itemsize > case.bucket_bytes):
            continue  # whole matrices only: a peer cannot copy a part of a transposed one as one view
        if numel <= left:
            left -= numel
            yield name, shape


class Contenders:
    """The ways to move one case's tensors, over one ring of two slots."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tensors, self.block = make_tensors(case)
        wire = None if case.wire_dtype == case.source_dtype else case.wire_dtype
        self.plan = BucketPlan.build(
            self.tensors, wire_dtype=wire, layout=case.layout, bucket_bytes=case.bucket_bytes
        )
        self.wire = getattr(torch, case.wire_dtype)
        self.ring = allocate_ring(2, self.plan.max_bucket_nbytes)
        self.packer = Packer(
            self.plan, ring=self.ring, num_threads=case.threads, hash=case.hash, refresh=case.refresh
        )
        self.packer.bind(self.tensors)
        self.unpacker = Unpacker(self.plan, num_threads=case.threads)
        self.pool = extension.Pool(case.threads)
        self.sources: list[list[torch.Tensor]] = []
        self.slots: list[list[torch.Tensor]] = []
        self.flat: list[torch.Tensor] = []
        for index in range(self.plan.num_buckets):
            self._views(index)
        self.hashes = [self.packer.pack(i).hash64 for i in range(self.plan.num_buckets)]
        self.item_bytes = DTYPES[case.source_dtype].itemsize, DTYPES[case.wire_dtype].itemsize

    def _views(self, index: int) -> None:
        """Views of the bucket's pieces in the tensors and in its slot, and one of the slot without gaps."""
        memory = torch.frombuffer(self.ring[index % 2], dtype=torch.uint8)
        sources, slots, payload = [], [], 0
        for position in self.plan.tensors_of_bucket[index]:
            entry = self.plan.tensors[position]
            tensor = self.tensors[entry.name]
            for piece in entry.pieces:
                if piece.bucket != index:
                    continue
                whole = piece.count == entry.numel
                source = tensor if whole else tensor.view(-1)[piece.first : piece.first + piece.count]
                nbytes = piece.count * self.wire.itemsize
                slot = memory[piece.offset : piece.offset + nbytes].view(self.wire)
                sources.append(source)
                slots.append(slot.view(source.shape))
                payload += nbytes
        self.sources.append(sources)
        self.slots.append(slots)
        self.flat.append(memory[:payload].view(self.wire))

    def pack(self) -> dict[str, Callable[[int], object]]:
        wire = self.wire

        def cat_fresh(index: int) -> object:
            parts = [s.to(wire).contiguous().view(-1).view(torch.uint8) for s in self.sources[index]]
            return torch.cat(parts)

        def cat_out(index: int) -> object:
            return torch.cat([s.to(wire).reshape(-1) for s in self.sources[index]], out=self.flat[index])

        def flatten_dense(index: int) -> object:
            parts = [s.to(wire).contiguous() for s in self.sources[index]]
            flat = torch._utils._flatten_dense_tensors(parts)  # type: ignore[no-untyped-call]
            return flat if len(parts) > 1 else flat.clone()  # of one tensor it would be a view

        def copy_views(index: int) -> object:
            for slot, source in zip(self.slots[index], self.sources[index], strict=True):
                slot.copy_(source)
            return None

        ways: dict[str, Callable[[int], object]] = {}
        if not self.case.hash:
            hashed = Packer(self.plan, ring=self.ring, num_threads=self.case.threads)
            hashed.bind(self.tensors)
            ways["with_hash"] = hashed.pack
        return ways | {
            "ours": self.packer.pack,
            "foreach_copy": lambda i: torch._foreach_copy_(self.slots[i], self.sources[i]),
            "cat_out": cat_out,
            "copy_views": copy_views,
            "cat_fresh": cat_fresh,
            "flatten_dense": flatten_dense,
        }

    def unpack(self) -> dict[str, Callable[[int], object]]:
        def memory(index: int) -> memoryview:
            return self.ring[index % 2][: self.plan.bucket_nbytes(index)]

        def copy_views(index: int) -> None:
            for slot, source in zip(self.slots[index], self.sources[index], strict=True):
                source.copy_(slot)

        targets = self.unpacker.bind(self.tensors)
        return {
            "ours": lambda i: targets.unpack(i, memory(i)),
            "foreach_copy": lambda i: torch._foreach_copy_(self.sources[i], self.slots[i]),
            "copy_views": copy_views,
            "verify": lambda i: extension.hash64(memory(i), self.pool),
        }

    def flat_copy(self) -> Callable[[], None]:
        """Moves as many bytes as the case, from or to its tensors' block, and does nothing else with them."""
        wire_bytes, item, wire_item = sum(e.nbytes for e in self.plan.tensors), *self.item_bytes
        unit = min(item, wire_item)
        wide, narrow = item // unit, wire_item // unit
        memory = as_bytes(self.block.numpy(), "memory")
        step = max(self.plan.max_bucket_nbytes // KiB * KiB, KiB)

        def run() -> None:
            for turn, start in enumerate(range(0, wire_bytes, step)):
                slot = self.ring[turn % 2][: min(step, wire_bytes - start)]
                part = memory[start // narrow * wide :]
                if self.case.op == "pack":
                    extension.move(slot, part, self.pool, wide, narrow)
                else:
                    extension.move(part, slot, self.pool, narrow, wide)

        return run


def measure(case: Case, repeats: int = 7, budget_s: float = math.inf) -> Row:
    """Runs all contenders in turn, `repeats` times after one round that warms up.

    On a busy machine it stops after three rounds or more once `budget_s` is spent; the row says how many.
    """
    started = time.perf_counter()
    torch.set_num_threads(case.torch_threads)
    contenders = Contenders(case)
    ways = contenders.pack() if case.op == "pack" else contenders.unpack()
    buckets = range(contenders.plan.num_buckets)
    times: dict[str, list[float]] = {name: [] for name in (*ways, "flat")}
    flat = contenders.flat_copy()
    gc.collect()
    done = 0
    while done < repeats + 1 and (done < 4 or time.perf_counter() - started < budget_s):
        done += 1
        for name, way in ways.items():
            began = time.perf_counter()
            for index in buckets:
                way(index)
            times[name].append(time.perf_counter() - began)
        flat()  # takes on what the contender before left in the cache, still to be written
        began = time.perf_counter()
        flat()
        times["flat"].append(time.perf_counter() - began)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    entries = contenders.plan.tensors
    return Row(
        **dataclasses.asdict(case),
        source_bytes=sum(e.numel for e in entries) * DTYPES[case.source_dtype].itemsize,
        wire_bytes=sum(e.nbytes for e in entries),
        buckets=len(buckets),
        tensors=len(entries),
        ours_s=medians.pop("ours"),
        flat_copy_s=medians.pop("flat"),
        verify_s=medians.pop("verify", None),
        with_hash_s=medians.pop("with_hash", None),
        peers_s=medians,
        repeats=done - 1,
    )


def peak_rss_of_syncs(syncs: int = 40) -> list[int]:
    """Peak resident bytes of this process after each of `syncs` whole syncs (pack, verify, unpack)."""
    case = Case("pack", "qwen2.5-0.5b", "float32", "bfloat16", 16 * MiB, max_parameters=160 * MiB)
    tensors, _ = make_tensors(case)
    plan = BucketPlan.build(tensors, wire_dtype=case.wire_dtype, bucket_bytes=case.bucket_bytes)
    packer, unpacker = Packer(plan, num_threads=2), Unpacker(plan, num_threads=2)
    packer.bind(tensors)
    peaks = []
    for _ in range(syncs):
        for index in range(plan.num_buckets):
            bucket = packer.pack(index)
            unpacker.verify(index, bucket.memory, bucket.hash64)
            unpacker.unpack(index, bucket.memory, tensors)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return peaks
