"""The packer again, in a few lines of torch: obviously right, slow, for tests only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from grpo_lab.packing.plan import BucketPlan


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as one dimension of uint8."""
    # Not contiguous(): it leaves strides of empty and one-element tensors that cannot be viewed as bytes.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def pack_reference(plan: BucketPlan, tensors: Mapping[str, torch.Tensor], bucket: int) -> bytes:
    """The bytes of one bucket."""
    memory = torch.zeros(plan.bucket_nbytes(bucket), dtype=torch.uint8)
    for entry in plan.tensors:
        wire = tensors[entry.name].to(getattr(torch, entry.wire_dtype)).contiguous().view(-1)
        for piece in entry.pieces:
            if piece.bucket == bucket:
                data = raw_bytes(wire[piece.first : piece.first + piece.count])
                memory[piece.offset : piece.offset + data.numel()] = data
    return memory.numpy().tobytes()


def vllm_reference(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> list[bytes]:
    """All buckets as vLLM's packed producer cuts and concatenates them (its `packed_broadcast_producer`)."""
    buckets: list[list[torch.Tensor]] = [[]]
    for tensor in tensors:
        if sum(t.numel() for t in buckets[-1]) > bucket_bytes:
            buckets.append([])
        buckets[-1].append(raw_bytes(tensor))
    return [torch.cat(bucket).numpy().tobytes() for bucket in buckets if bucket]
