"""Model parameters as contiguous buckets of bytes, and back, at the speed of memory.

``plan`` decides the geometry (pure Python), ``packer`` moves the bytes (C++), ``dtypes`` lists what can be
moved. The compiled extension is loaded when a Packer, an Unpacker or hash64 is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_lab.packing.layout import Layout, Piece
from grpo_lab.packing.plan import BucketPlan, PlanStatistics, TensorEntry

if TYPE_CHECKING:
    from grpo_lab.packing.packer import PackedBucket, Packer, Unpacker, hash64, instruction_sets

__all__ = [
    "BucketPlan",
    "Layout",
    "PackedBucket",
    "Packer",
    "Piece",
    "PlanStatistics",
    "TensorEntry",
    "Unpacker",
    "hash64",
    "instruction_sets",
]

_COMPILED = {"PackedBucket", "Packer", "Unpacker", "hash64", "instruction_sets"}


def __getattr__(name: str) -> object:
    if name not in _COMPILED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_lab.packing import packer  # noqa: PLC0415 - loads the extension

    return getattr(packer, name)
