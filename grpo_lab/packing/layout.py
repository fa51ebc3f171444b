"""Where tensors go: the two layouts of buckets, and what they refuse.

``aligned``: each tensor begins at a multiple of 256 bytes; the gaps are zero. A tensor that does not fit in
what is left of a bucket opens a new one; one that is larger than a bucket is split at element boundaries.

``vllm``: no gaps, and a bucket closes with the tensor that makes it *exceed* the size, as vLLM's packed
consumer expects (vllm/distributed/weight_transfer/packed_tensor.py). What that consumer cannot view is
refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from grpo_lab.errors import PackingError
from grpo_lab.packing.dtypes import Dtype, dtype_named

Layout = Literal["aligned", "vllm"]
ALIGNMENT_BYTES = 256
_MAX_PIECES = 1 << 20
_LIMIT = 1 << 62  # bytes of one tensor; keeps every sum of offsets within 64 bits


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` elements of a tensor, from row-major position `first`, at byte `offset` of bucket `bucket`."""

    bucket: int
    offset: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor before it has a place."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source_dtype: str
    wire_dtype: str
    aliases: tuple[str, ...]

    def with_aliases(self, aliases: tuple[str, ...]) -> Described:
        return replace(self, aliases=aliases)

    @property
    def wire(self) -> Dtype:
        return dtype_named(self.wire_dtype, f"tensor {self.name!r}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        nbytes = self.numel * self.wire.itemsize
        if nbytes >= _LIMIT:
            raise PackingError(
                f"tensor {self.name!r} of shape {self.shape} has {nbytes} bytes; the limit is {_LIMIT}"
            )
        return nbytes

    @classmethod
    def parse(cls, data: Any) -> Described:
        """Every field is checked: a plan may come from another process."""
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            raise PackingError(f"a tensor of the bucket plan has no name: {str(data)[:80]}")
        what = f"tensor {data['name']!r}"

        def checked(field: str, valid: Callable[[Any], bool], wanted: str) -> Any:
            value = data.get(field)
            if not valid(value):
                raise PackingError(f"{what}: field {field!r} is {str(value)[:80]}; it must be {wanted}")
            return value

        def sizes(value: Any) -> bool:
            return isinstance(value, list) and all(type(n) is int and 0 <= n < _LIMIT for n in value)

        shape = tuple(checked("shape", sizes, "a list of sizes"))
        strides = tuple(
            checked("strides", lambda v: sizes(v) and len(v) == len(shape), "a stride for each size")
        )
        aliases = checked(
            "aliases", lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v), "names"
        )
        source, wire = (dtype_named(data.get(k, ""), what) for k in ("source_dtype", "wire_dtype"))
        if source != wire and not (source.castable and wire.castable):
            raise PackingError(f"{what}: {source.name} cannot be sent as {wire.name}")
        return cls(data["name"], shape, strides, source.name, wire.name, tuple(aliases))


def check_options(layout: Any, bucket_bytes: Any, wire_dtype: Any) -> None:
    if layout not in get_args(Layout):
        raise PackingError(f"layout {layout!r} is unknown; use one of {', '.join(get_args(Layout))}")
    if type(bucket_bytes) is not int or not 16 <= bucket_bytes < _LIMIT:
        raise PackingError(
            f"bucket_bytes is {bucket_bytes!r}; it must be an integer from 16 (one element) to {_LIMIT}"
        )
    if wire_dtype is not None and not dtype_named(wire_dtype, "wire_dtype").castable:
        raise PackingError(f"wire_dtype {wire_dtype!r} is not a float dtype that weights can be cast to")


def check_names(described: list[Described]) -> None:
    seen: set[str] = set()
    for entry in described:
        for name in (entry.name, *entry.aliases):
            if not isinstance(name, str) or not name:
                raise PackingError(f"tensor name {name!r} is not a non-empty string")
            if name in seen:
                raise PackingError(f"tensor name {name!r} appears twice in the bucket plan")
            seen.add(name)


def _place_aligned(described: list[Described], bucket_bytes: int, sizes: list[int]) -> Iterator[list[Piece]]:
    """Yields each tensor's pieces and appends the buckets' sizes."""
    for entry in described:
        if entry.numel == 0:
            yield []
            continue
        start = -(-sizes[-1] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if sizes else 0
        if not sizes or start + entry.nbytes > bucket_bytes:
            start = 0
            sizes.append(0)
        itemsize, first, pieces = entry.wire.itemsize, 0, []
        capacity = bucket_bytes // itemsize
        if entry.numel // capacity > _MAX_PIECES:
            raise PackingError(
                f"tensor {entry.name!r} ({entry.nbytes} bytes) would be cut into more than {_MAX_PIECES} "
                f"buckets of {bucket_bytes} bytes; use larger buckets"
            )
        while first < entry.numel:
            if first:
                sizes.append(0)
            count = min(entry.numel - first, capacity)
            pieces.append(Piece(len(sizes) - 1, start, first, count))
            sizes[-1] = start + count * itemsize
            first += count
        yield pieces


def _place_vllm(described: list[Described], bucket_bytes: int, sizes: list[int]) -> Iterator[list[Piece]]:
    """As :func:`_place_aligned`, for vLLM's packed consumer, which views tensors in the bytes it gets."""
    closed = True
    for entry in described:
        if not entry.shape:
            raise PackingError(
                f"tensor {entry.name!r} has no dimension: vLLM's packed consumer cannot view it; "
                "reshape it to (1,) or use layout='aligned'"
            )
        if closed:
            sizes.append(0)
        start, itemsize = sizes[-1], entry.wire.itemsize
        if start % itemsize:
            raise PackingError(
                f"tensor {entry.name!r} ({entry.wire_dtype}) would begin at byte {start} of bucket "
                f"{len(sizes) - 1}, not a multiple of {itemsize}: vLLM's packed consumer cannot view it; "
                "send tensors with an odd number of bytes last or use layout='aligned'"
            )
        yield [Piece(len(sizes) - 1, start, 0, entry.numel)] if entry.numel else []
        sizes[-1] = start + entry.nbytes
        closed = sizes[-1] > bucket_bytes


PLACEMENTS: dict[Layout, Callable[[list[Described], int, list[int]], Iterator[list[Piece]]]] = {
    "aligned": _place_aligned,
    "vllm": _place_vllm,
}
