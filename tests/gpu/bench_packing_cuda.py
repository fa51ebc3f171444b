"""Rates of the CUDA packer beside torch's ways, for `make gpu-check`. Not a test; needs a GPU."""

import sys
import time

import torch

from grpo_lab.packing import cuda as cuda_packer
from grpo_lab.packing.benchmark import MiB
from grpo_lab.packing.plan import BucketPlan
from grpo_lab.packing.shapes import MODELS


def seconds(work, rounds=7):
    """Median time until the GPU is idle again."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[rounds // 2]


def compare(source, wire):
    """One line: our rate, and what others take for the same tensors."""
    shapes = MODELS["qwen2.5-0.5b"]
    tensors = {n: torch.randn(s, device="cuda").to(getattr(torch, source)) for n, s in shapes}
    plan = BucketPlan.build(tensors, wire_dtype=wire, bucket_bytes=64 * MiB)
    packer = cuda_packer.CudaPacker(plan)
    packer.bind(tensors)
    pieces = list(tensors.values())
    slots = [torch.empty(t.shape, dtype=getattr(torch, wire), device="cuda") for t in pieces]
    ours = seconds(lambda: [packer.pack(i) for i in range(plan.num_buckets)])
    foreach = seconds(lambda: torch._foreach_copy_(slots, pieces))
    fresh = seconds(lambda: torch.cat([t.to(slots[0].dtype).view(-1) for t in pieces]))
    rate = sum(t.numel() * t.element_size() for t in pieces) / ours / 1e9
    others = f"_foreach_copy_ takes {foreach / ours:.2f}, cat {fresh / ours:.2f} of our time"
    return f"{source} to {wire}: {rate:.0f} GB/s; {others}"


if __name__ == "__main__":
    if (reason := cuda_packer.unavailable()) is not None:
        sys.exit(f"no GPU benchmark: {reason}")
    for pair in (("bfloat16", "bfloat16"), ("float32", "bfloat16")):
        sys.stdout.write(compare(*pair) + "\n")
