"""The supervised phase that gives reinforcement learning something to improve.

It stops by a fixed rule, at the first look at which greedy accuracy on the *development* split reaches
``stop_accuracy``; the held-out split is never looked at. The learning rate is constant after its ramp,
so the result is an un-annealed checkpoint: part of what reinforcement learning gains from there,
annealing alone would gain too. :func:`annealed_baseline` measures how much.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab.errors import ConfigError, ModelError
from grpo_lab.tasks.base import Row, Task
from grpo_lab.tasks.evaluation import encode_prompt, evaluate_greedy

Progress = Callable[[int, int, float | None], None]
"""Called after a step with (steps done, most steps, newest development accuracy or None)."""

_IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmupSpec:
    """AdamW on the answers' tokens of fresh training prompts.

    Attributes:
        stop_accuracy: greedy development accuracy at which the phase ends; 0 skips the phase.
            Below about 0.2 too few sampled groups have both right and wrong answers to learn from.
        look_every_steps: steps between two looks at the development split.
        max_steps: without the accuracy after this many steps the phase fails.
    """

    stop_accuracy: float = 0.25
    look_every_steps: int = 20
    max_steps: int = 400
    development_rows: int = 256
    batch_size: int = 128
    learning_rate: float = 2e-3
    ramp_steps: int = 30
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.stop_accuracy < 1:
            raise ConfigError("stop_accuracy", self.stop_accuracy, "at least 0 and below 1")
        for field in ("look_every_steps", "max_steps", "development_rows", "batch_size", "ramp_steps"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "at least 1")
        for field in ("learning_rate", "max_grad_norm"):
            if not getattr(self, field) > 0:
                raise ConfigError(field, getattr(self, field), "above 0")
        if not self.weight_decay >= 0:
            raise ConfigError("weight_decay", self.weight_decay, "at least 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("betas", self.betas, "two numbers from 0, below 1")


@dataclass(frozen=True, slots=True)
class WarmupResult:
    steps: int
    development_accuracy: float


class _Supervised:
    """The training loop's state: a model, its optimizer and an endless stream of training rows."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        spec: WarmupSpec,
        seed: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._task = task
        self._spec = spec
        self._rng = random.Random(seed)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=spec.learning_rate, betas=spec.betas, weight_decay=spec.weight_decay
        )
        model.train()

    def step(self, scale: float) -> None:
        """One update at ``scale`` times the learning rate."""
        rows = self._task.generate("train", self._spec.batch_size, self._rng.getrandbits(63))
        tokens, labels = answer_batch(self._tokenizer, rows)
        logits = self._model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._spec.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._spec.learning_rate * scale
        self._optimizer.step()


def answer_batch(tokenizer: PreTrainedTokenizerBase, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [rows, longest], of prompt + answer + end token.

    Padding is on the right, where causal attention needs no mask for it; only answers have labels.
    """
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    answers = [[*encode_prompt(tokenizer, row["answer"]), tokenizer.eos_token_id] for row in rows]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), _IGNORED)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    spec: WarmupSpec,
    seed: int,
    *,
    progress: Progress | None = None,
) -> WarmupResult:
    """Trains ``model`` in place until the stopping rule holds.

    Raises:
        ModelError: ``max_steps`` were not enough.
    """
    if spec.stop_accuracy == 0:
        return WarmupResult(0, 0.0)
    development = task.generate("development", spec.development_rows, seed)
    supervised = _Supervised(model, tokenizer, task, spec, seed)
    accuracy = None
    for step in range(1, spec.max_steps + 1):
        supervised.step(min(1.0, step / spec.ramp_steps))
        if step % spec.look_every_steps == 0:
            accuracy = evaluate_greedy(model, tokenizer, development, task)
        if progress is not None:
            progress(step, spec.max_steps, accuracy)
        if accuracy is not None and accuracy >= spec.stop_accuracy:
            return WarmupResult(step, accuracy)
    raise ModelError(
        f"the warm-up on task {task.name!r} reached a development accuracy of {accuracy or 0.0:.2f} in "
        f"{spec.max_steps} steps, the stopping rule asks for {spec.stop_accuracy}; "
        "raise max_steps or take a larger model"
    )


def anneal(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    spec: WarmupSpec,
    seed: int,
    *,
    steps: int,
    progress: Progress | None = None,
) -> None:
    """The same ``steps`` on the same rows as :func:`warm_up`, with a learning rate that falls to 0.

    The ramp is the same; from there the rate falls linearly.
    """
    supervised = _Supervised(model, tokenizer, task, spec, seed)
    ramp = min(spec.ramp_steps, steps // 2)
    for step in range(1, steps + 1):
        supervised.step(step / ramp if step <= ramp else (steps - step + 1) / (steps - ramp))
        if progress is not None:
            progress(step, steps, None)
