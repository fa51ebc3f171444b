"""Models and tokenizers from a path, and a model made ready for packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab.errors import ModelError
from grpo_lab.trainer.attention import ATTENTION_NAME
from grpo_lab.trainer.config import AsyncGRPOConfig


def load_model(model: str | Path | nn.Module, args: AsyncGRPOConfig) -> nn.Module:
    if isinstance(model, str | Path):
        options = {"dtype": torch.float32} | (args.model_init_kwargs or {})
        try:
            model = AutoModelForCausalLM.from_pretrained(model, **options)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise ModelError(f"no model could be loaded from {str(model)!r}: {error}") from error
    if not hasattr(model, "set_attn_implementation"):
        raise ModelError(
            f"{type(model).__name__} is no transformers model: its attention cannot be told where sequences "
            "end"
        )
    model.set_attn_implementation(ATTENTION_NAME)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # engines sample without dropout, so logprobs must be computed without it
    return model


def load_tokenizer(model: str | Path | nn.Module) -> Any:
    path = (
        getattr(getattr(model, "config", None), "_name_or_path", "")
        if isinstance(model, nn.Module)
        else model
    )
    if not path:
        raise ModelError("the model does not say where its tokenizer is; pass processing_class")
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"no tokenizer could be loaded from {str(path)!r}: {error}") from error
