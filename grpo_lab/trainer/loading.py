"""Models and tokenizers from a path, and a model made ready for packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_lab.errors import ModelError
from grpo_lab.trainer.attention import ATTENTION_NAME
from grpo_lab.trainer.config import AsyncGRPOConfig

Source = str | Path | nn.Module


def load_model(source: Source, args: AsyncGRPOConfig) -> PreTrainedModel:
    """The model with the trainer's attention, without dropout. Raises ``ModelError``.

    From a path it is loaded in float32, unless ``model_init_kwargs`` says otherwise.
    """
    model = source if isinstance(source, nn.Module) else _from_path(source, args.model_init_kwargs or {})
    if not isinstance(model, PreTrainedModel):
        name = type(model).__name__
        raise ModelError(f"{name} is no transformers model: its attention cannot be told where sequences end")
    try:
        model.set_attn_implementation(ATTENTION_NAME)
    except ValueError as error:
        raise ModelError(
            f"{type(model).__name__} does not take another attention function: {error}"
        ) from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # engines sample without dropout, so logprobs must be computed without it
    return model


def load_tokenizer(source: Source) -> Any:
    """The tokenizer beside a model. Raises ``ModelError``."""
    path = getattr(source.config, "_name_or_path", "") if isinstance(source, PreTrainedModel) else source
    if not path or isinstance(path, nn.Module):
        raise ModelError("the model does not say where its tokenizer is; pass processing_class")
    _check_local(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())  # the library's own words have lists in them
        raise ModelError(
            f"no tokenizer could be loaded from {str(path)!r}: {reason} Put tokenizer.json beside the model"
        ) from error


def check_vocabulary(model: PreTrainedModel, tokenizer: Any) -> None:
    """Raises ``ModelError`` when the tokenizer knows ids that the model has no embedding for."""
    size = getattr(model.config, "vocab_size", None)
    if size is not None and hasattr(tokenizer, "__len__") and len(tokenizer) > size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {size} embeddings; "
            "pass the tokenizer that belongs to the model"
        )


def _from_path(path: str | Path, options: dict[str, Any]) -> Any:
    _check_local(path)
    try:
        return AutoModelForCausalLM.from_pretrained(path, **({"dtype": torch.float32} | options))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(f"no model could be loaded from {str(path)!r}: {error}") from error


def _check_local(path: str | Path) -> None:
    """Something that can only be a local path is not looked up on the network."""
    text = str(path)
    if not Path(text).exists() and (isinstance(path, Path) or text.startswith(("/", ".", "~"))):
        raise ModelError(f"there is no model at {text!r}")
