"""Accuracy of a causal language model on rows of a task, greedy or sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab.errors import DataError
from grpo_lab.tasks.base import Row, Task

Pick = Callable[[torch.Tensor], torch.Tensor]
"""Next-token logits [batch, vocabulary] to token ids [batch]."""


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a plain prompt as it stands, or of chat messages through the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    text = tokenizer.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def sampler(seed: int, device: torch.device) -> Pick:
    """Picks by sampling at temperature 1, from its own generator: the global random state is left alone."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda logits: torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


@torch.no_grad()
def decode_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_id: int,
    pick: Pick = greedy,
) -> list[list[int]]:
    """Completions of prompts, decoded together with one KV cache; the end token is included.

    Prompts are padded on the left and the padding is masked, so a completion is that of its prompt alone.
    """
    device = next(model.parameters()).device
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[eos_token_id] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    # The argument's name changed within transformers 5; the old one warns, the new one is not everywhere.
    cache_argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    cache = None
    columns: list[torch.Tensor] = []
    for _ in range(max_new_tokens):
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument: cache},
        )
        cache = getattr(output, cache_argument)
        chosen = pick(output.logits[:, -1]).masked_fill(finished, eos_token_id)
        columns.append(chosen)
        finished |= chosen == eos_token_id
        if bool(finished.all()):
            break
        tokens = chosen[:, None]
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return [_up_to_end(row, eos_token_id) for row in torch.stack(columns, dim=1).tolist()]


def _up_to_end(tokens: list[int], eos_token_id: int) -> list[int]:
    return tokens[: tokens.index(eos_token_id) + 1] if eos_token_id in tokens else tokens


def evaluate_greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    task: Task,
    batch_size: int = 256,
) -> float:
    """The share of rows whose greedy completion gets reward 1 from the task's first reward function.

    The standard error is at most ``0.5 / sqrt(len(rows))``: 0.022 for 512 rows. The model's training
    mode is restored.

    Raises:
        DataError: there are no rows.
    """
    return _accuracy(model, tokenizer, rows, task, greedy, batch_size)


def evaluate_sampled(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    task: Task,
    seed: int,
    batch_size: int = 256,
) -> float:
    """As :func:`evaluate_greedy`, with one completion a row sampled at temperature 1: the pass rate."""
    pick = sampler(seed, next(model.parameters()).device)
    return _accuracy(model, tokenizer, rows, task, pick, batch_size)


def _accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    task: Task,
    pick: Pick,
    batch_size: int,
) -> float:
    if not rows:
        raise DataError("evaluation needs at least one row, got none")
    ordered = sorted(rows, key=lambda row: len(row["prompt"]))
    correct = 0
    with evaluation_mode(model):
        for start in range(0, len(ordered), batch_size):
            batch = ordered[start : start + batch_size]
            prompts = [encode_prompt(tokenizer, row["prompt"]) for row in batch]
            ids = decode_batch(model, prompts, task.max_completion_tokens, tokenizer.eos_token_id, pick)
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            columns = {name: [row[name] for row in batch] for name in batch[0] if name != "prompt"}
            rewards = task.reward_funcs[0]([row["prompt"] for row in batch], texts, ids, **columns)
            correct += sum(reward == 1.0 for reward in rewards)
    return correct / len(rows)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off inside; the mode that was set before is set again afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
