"""Which bytes go into which bucket: decided once, identical on both sides, refused by name where it is not.

A plan depends on names, shapes and dtypes only, so sender and receiver can compute or exchange it before any
weight moves::

    plan = BucketPlan.build(dict(model.named_parameters()), wire_dtype="bfloat16")
    theirs = BucketPlan.from_json(json.loads(message))
    if (difference := plan.difference(theirs)) is not None:
        raise HandshakeError(difference)

The module ``layout`` describes the two layouts. Tied tensors (same memory, shape and strides) are sent once,
under the first name; the other names are aliases.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from grpo_lab.errors import PackingError
from grpo_lab.packing.dtypes import CAST_SOURCES, dtype_name, dtype_named
from grpo_lab.packing.layout import PLACEMENTS, Described, Layout, Piece, check_names, check_options

if TYPE_CHECKING:
    import torch

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as it is sent. ``strides`` (elements) and ``source_dtype`` are the sender's own matter."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source_dtype: str
    wire_dtype: str
    aliases: tuple[str, ...]
    nbytes: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """What a plan amounts to. ``payload_bytes`` counts tied tensors once; ``wire_bytes`` has the padding."""

    buckets: int
    tensors: int
    aliases: int
    split_tensors: int
    payload_bytes: int
    padding_bytes: int
    wire_bytes: int
    max_bucket_bytes: int
    largest_tensor: str
    largest_tensor_bytes: int


@dataclass(frozen=True)
class BucketPlan:
    """The tensors in order, cut into buckets. Build with :meth:`build` or :meth:`from_json`."""

    layout: Layout
    bucket_bytes: int
    wire_dtype: str | None
    tensors: tuple[TensorEntry, ...]
    bucket_sizes: tuple[int, ...]

    @classmethod
    def build(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        wire_dtype: str | None = None,
        layout: Layout = "aligned",
        bucket_bytes: int = 64 << 20,
    ) -> BucketPlan:
        """Plans for `tensors` in their order. Tensors may be on the meta device (ties cannot be seen there).

        `wire_dtype` applies to float32, float16 and bfloat16 sources; everything else is sent as it is.
        Raises PackingError for an unknown dtype or layout, a bucket smaller than an element, a name that is
        empty, and what the ``vllm`` layout cannot carry.
        """
        check_options(layout, bucket_bytes, wire_dtype)
        first_of: dict[tuple[Any, ...], str] = {}
        aliases: dict[str, list[str]] = {}
        described: list[Described] = []
        for name, tensor in tensors.items():
            identity = _identity(tensor)
            if identity is not None:
                first = first_of.setdefault(identity, name)
                if first != name:
                    aliases.setdefault(first, []).append(name)
                    continue
            source = dtype_named(dtype_name(tensor), f"tensor {name!r}")
            wire = wire_dtype if wire_dtype is not None and source.name in CAST_SOURCES else source.name
            described.append(Described(name, tuple(tensor.shape), _strides(tensor), source.name, wire, ()))
        named = [d.with_aliases(tuple(aliases.get(d.name, ()))) for d in described]
        return cls._lay_out(named, layout, bucket_bytes, wire_dtype)

    @classmethod
    def _lay_out(
        cls, described: list[Described], layout: Layout, bucket_bytes: int, wire_dtype: str | None
    ) -> BucketPlan:
        check_names(described)
        sizes: list[int] = []
        entries = tuple(
            TensorEntry(
                d.name, d.shape, d.strides, d.source_dtype, d.wire_dtype, d.aliases, d.nbytes, tuple(pieces)
            )
            for d, pieces in zip(described, PLACEMENTS[layout](described, bucket_bytes, sizes), strict=True)
        )
        return cls(layout, bucket_bytes, wire_dtype, entries, tuple(sizes))

    @property
    def num_buckets(self) -> int:
        return len(self.bucket_sizes)

    def bucket_nbytes(self, index: int) -> int:
        """Bytes of bucket `index`, padding between tensors included. Raises PackingError if there is none."""
        self.check_bucket(index)
        return self.bucket_sizes[index]

    @property
    def max_bucket_nbytes(self) -> int:
        """The capacity that a slot needs; in the vllm layout it may exceed ``bucket_bytes``."""
        return max(self.bucket_sizes, default=0)

    def check_bucket(self, index: int) -> None:
        """Raises PackingError unless `index` is a bucket of this plan."""
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < self.num_buckets:
            raise PackingError(f"no bucket {index!r}: the plan has {self.num_buckets}, counted from 0")

    @cached_property
    def tensors_of_bucket(self) -> tuple[range, ...]:
        """For each bucket the positions in ``tensors`` that have a piece in it.

        Those without elements belong to the bucket of the tensor before them, so that a pack looks at each.
        """
        spans: list[tuple[int, int]] = [(0, 0)] * self.num_buckets
        last = 0
        for position, entry in enumerate(self.tensors if spans else ()):
            buckets = [piece.bucket for piece in entry.pieces] or [last]
            for bucket in buckets:
                start, stop = spans[bucket]
                spans[bucket] = (start if stop else position, position + 1)
            last = buckets[-1]
        return tuple(range(*span) for span in spans)

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        """Every name, aliases included."""
        return {name: entry for entry in self.tensors for name in entry.names}

    def to_json(self) -> dict[str, Any]:
        """Plain data that :meth:`from_json` turns into an equal plan."""
        return {
            "format": FORMAT,
            "layout": self.layout,
            "bucket_bytes": self.bucket_bytes,
            "wire_dtype": self.wire_dtype,
            "digest": self.digest(),
            "tensors": [
                {
                    "name": e.name,
                    "shape": list(e.shape),
                    "strides": list(e.strides),
                    "source_dtype": e.source_dtype,
                    "wire_dtype": e.wire_dtype,
                    "aliases": list(e.aliases),
                }
                for e in self.tensors
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BucketPlan:
        """Raises PackingError naming the first field that is missing, malformed, or against the digest."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise PackingError(f"not a bucket plan of format {FORMAT}: {str(data)[:80]!r}")
        layout, bucket_bytes, wire_dtype = (data.get(k) for k in ("layout", "bucket_bytes", "wire_dtype"))
        check_options(layout, bucket_bytes, wire_dtype)
        tensors = data.get("tensors")
        if not isinstance(tensors, list):
            raise PackingError("field 'tensors' of the bucket plan must be a list")
        described = [Described.parse(t) for t in tensors]
        plan = cls._lay_out(described, cast(Layout, layout), cast(int, bucket_bytes), wire_dtype)
        if data.get("digest") != plan.digest():
            raise PackingError(
                f"the bucket plan's digest is {data.get('digest')!r}, but its tensors give {plan.digest()!r}"
            )
        return plan

    def digest(self) -> str:
        """SHA-256 (hex) of what both sides agree on: names, shapes, wire dtypes, layout, bucket size."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        tensors = [[e.name, list(e.shape), e.wire_dtype, list(e.aliases)] for e in self.tensors]
        agreed = [self.layout, self.bucket_bytes, tensors]
        return hashlib.sha256(json.dumps(agreed, separators=(",", ":")).encode()).hexdigest()

    def difference(self, other: BucketPlan) -> str | None:
        """The first thing on which the two geometries differ, in words; None if they are equal."""
        if self.digest() == other.digest():
            return None
        for field in ("layout", "bucket_bytes"):
            if getattr(self, field) != getattr(other, field):
                return f"{field}: {getattr(self, field)!r} here, {getattr(other, field)!r} there"
        for position, (ours, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            for field in ("name", "shape", "wire_dtype", "aliases"):
                here, there = getattr(ours, field), getattr(theirs, field)
                if here != there:
                    where = "" if field == "name" else f" ({ours.name})"
                    return f"{field} of tensor {position}{where}: {here!r} here, {there!r} there"
        longer, side = (self, "here") if len(self.tensors) > len(other.tensors) else (other, "there")
        extra = longer.tensors[min(len(self.tensors), len(other.tensors))]
        return f"{len(self.tensors)} tensors here, {len(other.tensors)} there: {extra.name!r} is only {side}"

    def statistics(self) -> PlanStatistics:
        payload, wire = sum(e.nbytes for e in self.tensors), sum(self.bucket_sizes)
        largest = max(self.tensors, key=lambda e: e.nbytes, default=None)
        return PlanStatistics(
            buckets=self.num_buckets,
            tensors=len(self.tensors),
            aliases=sum(len(e.aliases) for e in self.tensors),
            split_tensors=sum(len(e.pieces) > 1 for e in self.tensors),
            payload_bytes=payload,
            padding_bytes=wire - payload,
            wire_bytes=wire,
            max_bucket_bytes=self.max_bucket_nbytes,
            largest_tensor=largest.name if largest else "",
            largest_tensor_bytes=largest.nbytes if largest else 0,
        )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Equal for two tensors that are the same elements of the same memory; None if that cannot be known."""
    if getattr(tensor, "full_tensor", None) is not None:  # a DTensor: its own shard stands for the whole
        return ("sharded", tuple(tensor.shape), *(_identity(tensor.to_local()) or (id(tensor),)))  # type: ignore[attr-defined]
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    return (str(tensor.device), tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """As the packer will see the tensor: a DTensor is gathered into contiguous memory first."""
    if getattr(tensor, "full_tensor", None) is None:
        return tuple(tensor.stride())
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(tensor.shape)]))
