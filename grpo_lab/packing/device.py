"""The table of a bucket's pieces that the CUDA kernels read (``grpo::device::Piece`` in csrc/device.h)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from grpo_lab.errors import PackingError
from grpo_lab.packing.dtypes import DTYPES, dtype_name
from grpo_lab.packing.plan import BucketPlan

MAX_RANK = 6
PIECE = np.dtype(
    [
        ("offset", "<i8"),
        ("end", "<i8"),
        ("first", "<i8"),
        ("data", "<u8"),
        ("sizes", "<i8", MAX_RANK),
        ("strides", "<i8", MAX_RANK),
        ("rank", "<i4"),
        ("dtype", "<i4"),
        ("wire_dtype", "<i4"),
        ("padding", "<i4"),
    ]
)


def piece_table(plan: BucketPlan, bucket: int, tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """One record a piece, in the order of the bucket; the caller has checked the tensors."""
    rows = []
    for position in plan.tensors_of_bucket[bucket]:
        entry = plan.tensors[position]
        tensor = tensors[entry.name]
        sizes, strides = coalesced(tensor)
        if len(sizes) > MAX_RANK:
            raise PackingError(
                f"tensor {entry.name!r} has {len(sizes)} separate strides; the CUDA packer takes {MAX_RANK}: "
                "pack a contiguous copy"
            )
        fill = (0,) * (MAX_RANK - len(sizes))
        item, dtype = DTYPES[entry.wire_dtype].itemsize, DTYPES[dtype_name(tensor)].code
        for piece in entry.pieces:
            if piece.bucket == bucket:
                end = piece.offset + piece.count * item
                where = (
                    piece.offset,
                    end,
                    piece.first,
                    tensor.data_ptr(),
                    (*sizes, *fill),
                    (*strides, *fill),
                )
                rows.append((*where, len(sizes), dtype, DTYPES[entry.wire_dtype].code, 0))
    return np.array(sorted(rows), dtype=PIECE)


def coalesced(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides with unit dimensions gone and neighbours merged; empty if contiguous."""
    if tensor.is_contiguous():
        return (), ()
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    return tuple(sizes), tuple(strides)
