"""The compiled extension, and what it needs to know about a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_lab.errors import PackingError
from grpo_lab.packing.dtypes import DTYPES
from grpo_lab.packing.plan import BucketPlan

if TYPE_CHECKING:
    import torch

try:
    from grpo_lab.packing import _packing as extension
except ImportError as error:
    raise ImportError(
        f"the compiled packer is missing ({error}); build it with `pip install -e .` in the repository's root"
    ) from error

__all__ = ["buckets_of", "extension", "memory_of"]


def buckets_of(plan: BucketPlan) -> extension.Buckets:
    """The plan as the extension holds it."""
    pieces = sorted(
        (p.bucket, p.offset, t, p.first, p.count) for t, e in enumerate(plan.tensors) for p in e.pieces
    )
    return extension.Buckets(
        [(DTYPES[e.wire_dtype].code, e.numel) for e in plan.tensors],
        [(tensor, bucket, offset, first, count) for bucket, offset, tensor, first, count in pieces],
        list(plan.bucket_sizes),
    )


def memory_of(tensor: torch.Tensor, name: str) -> tuple[int, int, int]:
    """Address of the first element, and address and bytes of the storage around it."""
    if tensor.device.type != "cpu":
        raise PackingError(
            f"tensor {name!r} is on {tensor.device}; the CPU packer reads and writes host memory only"
        )
    if tensor.layout is not _strided():
        raise PackingError(f"tensor {name!r} has layout {tensor.layout}; only strided tensors can be packed")
    if tensor.is_conj() or tensor.is_neg():
        raise PackingError(
            f"tensor {name!r} is a lazy conjugate or negative view; call resolve_conj() / resolve_neg() first"
        )
    storage = tensor.untyped_storage()
    if tensor.numel() and not storage.nbytes():
        raise PackingError(f"tensor {name!r} has no memory behind it (a freed or resharded parameter?)")
    return tensor.data_ptr(), storage.data_ptr(), storage.nbytes()


def _strided() -> torch.layout:
    import torch  # noqa: PLC0415 - plans are used where torch is not

    return torch.strided
