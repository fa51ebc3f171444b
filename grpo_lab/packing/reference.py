"""The packer again, in a few lines of torch: obviously right, slow, for tests only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from grpo_lab.packing.plan import BucketPlan


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as one dimension of uint8."""
    # Not contiguous(): it leaves strides of empty and one-element tensors that cannot be viewed as bytes.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def pack_reference(plan: BucketPlan, tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
    """The bytes of every bucket."""
    buckets = [torch.zeros(plan.bucket_nbytes(index), dtype=torch.uint8) for index in range(plan.num_buckets)]
    for entry in plan.tensors:
        wire = raw_bytes(tensors[entry.name].to(getattr(torch, entry.wire_dtype)))
        itemsize = entry.nbytes // max(entry.numel, 1)
        for piece in entry.pieces:
            data = wire[piece.first * itemsize : (piece.first + piece.count) * itemsize]
            buckets[piece.bucket][piece.offset : piece.offset + data.numel()] = data
    return [bucket.numpy().tobytes() for bucket in buckets]


def vllm_reference(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> list[bytes]:
    """All buckets as vLLM's packed producer cuts and concatenates them (its `packed_broadcast_producer`)."""
    buckets: list[list[torch.Tensor]] = [[]]
    for tensor in tensors:
        if sum(t.numel() for t in buckets[-1]) > bucket_bytes:
            buckets.append([])
        buckets[-1].append(raw_bytes(tensor))
    return [torch.cat(bucket).numpy().tobytes() for bucket in buckets if bucket]
