"""Reads the Hugging Face ``config.json`` of a Llama or Qwen2 model directory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lab.errors import ModelError

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of the model. ``inverse_frequencies`` [head_dim / 2] are those of its rotary embedding."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    inverse_frequencies: tuple[float, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Raises ``ModelError`` for a missing directory or a model that this engine cannot compute."""
        raw = _read_json(directory / "config.json", required=True)
        names = raw.get("architectures") or []
        known = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
        if not known:
            raise ModelError(f"{directory}: architectures={names}; the engine computes {list(ARCHITECTURES)}")
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelError(
                f"{directory}: hidden_act={raw['hidden_act']!r}; the engine computes 'silu' only"
            )
        if raw.get("use_sliding_window"):
            raise ModelError(f"{directory}: use_sliding_window is on; the engine attends to all tokens only")
        heads = raw["num_attention_heads"]
        qwen2 = known[0] == "qwen2"
        head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
        generation = _read_json(directory / "generation_config.json", required=False)
        return cls(
            architecture=known[0],
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_positions=raw.get("max_position_embeddings", 2048),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=qwen2 or bool(raw.get("attention_bias", False)),
            output_bias=not qwen2 and bool(raw.get("attention_bias", False)),
            mlp_bias=not qwen2 and bool(raw.get("mlp_bias", False)),
            inverse_frequencies=tuple(_inverse_frequencies(raw, head_dim, directory).tolist()),
            eos_token_ids=_as_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        )


def _inverse_frequencies(raw: dict[str, Any], head_dim: int, directory: Path) -> Tensor:
    """Rotary frequencies of types default, linear and llama3.

    Sources: Su et al., arXiv:2104.09864; "llama3" as in Llama 3.1's reference ``apply_scaling``.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{directory}: partial_rotary_factor must be 1 for this engine")
    base: Tensor = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "default":
        return base
    if kind == "linear":
        return base / float(rope["factor"])
    if kind == "llama3":
        return _llama3_frequencies(base, rope)
    raise ModelError(f"{directory}: rope type {kind!r}; the engine computes default, linear and llama3")


def _llama3_frequencies(base: Tensor, rope: dict[str, Any]) -> Tensor:
    low, high, old = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    wavelength = 2 * math.pi / base
    slow = torch.where(wavelength > old / low, base / rope["factor"], base)
    smooth = (old / wavelength - low) / (high - low)
    mixed = (1 - smooth) * slow / rope["factor"] + smooth * slow
    between = (wavelength >= old / high) & (wavelength <= old / low)
    return torch.where(between, mixed, slow)


def _read_json(path: Path, required: bool) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ModelError(f"{path}: no such file; give a model directory in Hugging Face format") from None
        return {}
    except (json.JSONDecodeError, OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return data


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
