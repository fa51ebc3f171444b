"""The forward pass of Llama and Qwen2 models as plain functions over tensors (float32, CPU).

Hugging Face parameter names; q, k, v and gate, up lie behind each other in one matrix each, and the
named tensors are row slices of it, so an update written by name lands in the fused matrix directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grpo_lab.engine.model_config import ModelConfig
from grpo_lab.errors import ModelError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Attend(Protocol):
    """Attention of one layer: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]
    -> [tokens, heads * head_dim].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(slots=True)
class Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Weights:
    """One whole set of weights: ``named`` by Hugging Face names, ``layers`` fused, over the same memory."""

    def __init__(self, config: ModelConfig) -> None:
        self.named: dict[str, Tensor] = {}
        self.embedding = self._new(EMBEDDING, config.vocab_size, config.hidden_size)
        self.layers = [self._layer(config, index) for index in range(config.num_layers)]
        self.norm = self._new("model.norm.weight", config.hidden_size)
        if config.tied:
            self.head = self.embedding
        else:
            self.head = self._new(HEAD, config.vocab_size, config.hidden_size)

    def _new(self, name: str, *shape: int) -> Tensor:
        self.named[name] = torch.zeros(shape)
        return self.named[name]

    def _fused(self, prefix: str, parts: dict[str, int], suffix: str, *rest: int) -> Tensor:
        whole = torch.zeros(sum(parts.values()), *rest)
        first = 0
        for part, rows in parts.items():
            self.named[f"{prefix}.{part}.{suffix}"] = whole[first : first + rows]
            first += rows
        return whole

    def _layer(self, config: ModelConfig, index: int) -> Layer:
        prefix, width, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        gate_up = {"gate_proj": inner, "up_proj": inner}
        return Layer(
            input_norm=self._new(f"{prefix}.input_layernorm.weight", width),
            qkv=self._fused(attention, qkv, "weight", width),
            qkv_bias=self._fused(attention, qkv, "bias") if config.qkv_bias else None,
            output=self._new(f"{attention}.o_proj.weight", width, q),
            output_bias=self._new(f"{attention}.o_proj.bias", width) if config.output_bias else None,
            post_norm=self._new(f"{prefix}.post_attention_layernorm.weight", width),
            gate_up=self._fused(mlp, gate_up, "weight", width),
            gate_up_bias=self._fused(mlp, gate_up, "bias") if config.mlp_bias else None,
            down=self._new(f"{mlp}.down_proj.weight", width, inner),
            down_bias=self._new(f"{mlp}.down_proj.bias", width) if config.mlp_bias else None,
        )

    def copy_from(self, state: Mapping[str, Tensor]) -> None:
        """Copies every parameter by name. Raises ``ModelError`` naming what does not fit."""
        given = {name: tensor for name, tensor in state.items() if name in self.named or name != HEAD}
        missing, extra = sorted(self.named.keys() - given), sorted(given.keys() - self.named)
        if missing or extra:
            raise ModelError(f"weights do not fit the model: missing {missing[:5]}, extra {extra[:5]}")
        for name, tensor in given.items():
            if tensor.shape != self.named[name].shape:
                raise ModelError(
                    f"{name}: shape {tuple(tensor.shape)}, the model has {tuple(self.named[name].shape)}"
                )
            self.named[name].copy_(tensor)


class CausalLM:
    """The arithmetic of the model; weights come with each call, so that sets can be swapped.

    ``cos_sin`` tables cover ``max_positions`` positions.
    """

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        self.config = config
        angles = torch.outer(torch.arange(max_positions).float(), torch.tensor(config.inverse_frequencies))
        self._cos = torch.cat((angles.cos(), angles.cos()), -1)
        self._sin = torch.cat((-angles.sin(), angles.sin()), -1)

    def hidden_states(self, weights: Weights, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final normed hidden states [tokens, hidden] of a packed batch (``token_ids`` [tokens])."""
        config = self.config
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        rotated, half = config.num_heads + config.num_kv_heads, config.head_dim // 2
        shape, eps, inner = (config.hidden_size,), config.rms_norm_eps, config.intermediate_size
        x = F.embedding(token_ids, weights.embedding)
        for index, layer in enumerate(weights.layers):
            h = F.rms_norm(x, shape, layer.input_norm, eps)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(h.shape[0], -1, config.head_dim)
            qk = qkv[:, :rotated]
            swapped = torch.cat((qk[..., half:], qk[..., :half]), -1)
            qk = torch.addcmul(qk * cos, swapped, sin)
            h = attend(index, qk[:, : config.num_heads], qk[:, config.num_heads :], qkv[:, rotated:])
            x = x + F.linear(h, layer.output, layer.output_bias)
            h = F.rms_norm(x, shape, layer.post_norm, eps)
            gate_up = F.linear(h, layer.gate_up, layer.gate_up_bias)
            h = F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:])
            x = x + F.linear(h, layer.down, layer.down_bias)
        return F.rms_norm(x, shape, weights.norm, eps)

    def logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        return F.linear(hidden, weights.head)


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of every ``*.safetensors`` file. Raises ``ModelError`` when there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory}: no *.safetensors file; save the model with save_pretrained")
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield name, tensors.get_tensor(name).float()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
