"""Parameter shapes of known architectures, written from their published configurations (config.json on the
hub).

For benchmarks: real names and shapes without downloading anything. Tied embeddings appear once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecoderShapes:
    """A decoder-only transformer as transformers names its parameters."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0

    def __iter__(self) -> Iterator[tuple[str, Shape]]:
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            for name, shape in self._layer():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (self.hidden,)

    def _layer(self) -> Iterator[tuple[str, Shape]]:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, rows in (("q", query), ("k", key), ("v", key)):
            yield f"self_attn.{name}_proj.weight", (rows, self.hidden)
            if self.qkv_bias:
                yield f"self_attn.{name}_proj.bias", (rows,)
        yield "self_attn.o_proj.weight", (self.hidden, query)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        if self.experts:
            yield "mlp.gate.weight", (self.experts, self.hidden)
        for prefix in [f"mlp.experts.{e}" for e in range(self.experts)] or ["mlp"]:
            yield f"{prefix}.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.down_proj.weight", (self.hidden, self.intermediate)
        yield "input_layernorm.weight", (self.hidden,)
        yield "post_attention_layernorm.weight", (self.hidden,)


def _tiny() -> list[tuple[str, Shape]]:
    """20,000 vectors of 64 to 1,024 elements: norms, biases, adapters of small rank."""
    return [(f"adapter.{i}", ((64, 256, 512, 896, 1024)[i % 5],)) for i in range(20_000)]


MODELS: dict[str, list[tuple[str, Shape]]] = {
    "qwen2.5-0.5b": list(DecoderShapes(151_936, 896, 24, 14, 2, 64, 4_864, qkv_bias=True)),
    "qwen3-0.6b": list(DecoderShapes(151_936, 1_024, 28, 16, 8, 128, 3_072, qk_norm=True)),
    "llama-3.2-1b": list(DecoderShapes(128_256, 2_048, 16, 32, 8, 64, 8_192)),
    # No released model: a mixture of experts of about 5,000 tensors that fits in a laptop's memory.
    "moe-5000": list(DecoderShapes(32_000, 512, 25, 8, 2, 64, 192, qk_norm=True, experts=64)),
    "tiny-20000": _tiny(),
}
