"""Checksums of the weights that are served, where vLLM's own see an empty parameter.

On a CPU, vLLM packs linear weights for its kernels and leaves parameters of no elements behind: their
checksum is that of the empty string whatever the kernel multiplies with. A packed matrix shows itself when it
is multiplied by the identity, which is exact: one product, and sums with zero.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.worker.gpu_worker import Worker

MAX_PROBE_ELEMENTS = 1 << 22
_MARK = "_grpo_lab_served_weights"


def report_served_weights() -> None:
    """From now on ``/weight_checker`` of this process sees packed weights too. Idempotent."""
    original = Worker.compute_weight_checksums
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def compute_weight_checksums(worker: Any) -> dict[str, str]:
        prefix = worker._weight_checksum_prefix()
        packed = served_digests(worker.model_runner.get_model())
        return {**original(worker), **{prefix + name: digest for name, digest in packed.items()}}

    setattr(compute_weight_checksums, _MARK, True)
    Worker.compute_weight_checksums = compute_weight_checksums


@torch.no_grad()
def served_digests(model: torch.nn.Module) -> dict[str, str]:
    """SHA-256 by parameter name of every packed matrix; a head's packed copy is ``<name>.weight.packed``."""
    return {name: _digest(matrix) for name, matrix in _packed(model)}


def _packed(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "cpu_linear") or weight is None:
            continue
        if weight.numel() == 0:
            yield f"{name}.weight", _multiplied_out(module, module.input_size_per_partition, weight)
        elif isinstance(module, ParallelLMHead):
            yield f"{name}.weight.packed", _multiplied_out(module, weight.shape[1], weight)


def _multiplied_out(module: Any, columns: int, weight: torch.Tensor) -> torch.Tensor:
    """The matrix as the kernel has it, (inputs, outputs), a block of rows at a time."""
    rows = max(1, MAX_PROBE_ELEMENTS // columns)
    parts = []
    for start in range(0, columns, rows):
        count = min(rows, columns - start)
        probe = torch.zeros(count, columns, dtype=weight.dtype, device=weight.device)
        probe[torch.arange(count), start + torch.arange(count)] = 1
        parts.append(module.cpu_linear(probe, weight, None))
    return torch.cat(parts)


def _digest(matrix: torch.Tensor) -> str:
    data = matrix.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()
