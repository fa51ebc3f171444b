"""Verified tensors into a live vLLM model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from grpo_lab.errors import EngineError


@torch.no_grad()
def load_weights(model: Any, model_config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Layer by layer, as vLLM's own checkpoint-format backends do: kernels need their weights re-packed.

    Raises ``EngineError`` when a parameter got no weights; whatever raises leaves the model torn.
    """
    wanted = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    loaded = model.load_weights(iter(tensors.items()))
    finalize_layerwise_reload(model, model_config)
    repack_heads(model)
    if loaded is not None and (missing := sorted(wanted - set(loaded))):
        raise EngineError(f"{len(missing)} parameters got no weights: {', '.join(missing[:8])}")


def repack_heads(model: torch.nn.Module) -> None:
    """A head tied to the embedding gets no weights of its own, so the reload leaves its packed copy (on a
    CPU, of the matrix that the kernel reads) as it was: outputs would mix a new body with an old head.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
