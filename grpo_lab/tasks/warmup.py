"""The supervised phase that gives reinforcement learning something to improve.

It stops by the fixed rule of :class:`~grpo_lab.tasks.warmup_spec.WarmupSpec`: the held-out split is never
looked at. The learning rate is constant after its ramp, so the result is an un-annealed checkpoint: part
of what reinforcement learning gains from there, annealing alone would gain too.
:func:`~grpo_lab.tasks.tiny_model.annealed_baseline` measures how much.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab.errors import ModelError
from grpo_lab.tasks.base import Row, Task
from grpo_lab.tasks.evaluation import encode_prompt, evaluate_sampled
from grpo_lab.tasks.warmup_spec import WarmupSpec

Progress = Callable[[int, int, float | None], None]
"""Called after a step with (steps done, most steps, newest development pass rate or None)."""

_IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmupResult:
    steps: int
    development_pass_rate: float


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
    if spec.stop_pass_rate == 0:
        return WarmupResult(0, 0.0)
    development = task.generate("development", spec.development_rows, seed)
    supervised = _Supervised(model, tokenizer, task, spec, seed)
    pass_rate = None
    for step in range(1, spec.max_steps + 1):
        supervised.step(min(1.0, step / spec.ramp_steps))
        if step % spec.look_every_steps == 0:
            pass_rate = evaluate_sampled(model, tokenizer, development, task, seed)
        if progress is not None:
            progress(step, spec.max_steps, pass_rate)
        if pass_rate is not None and pass_rate >= spec.stop_pass_rate:
            return WarmupResult(step, pass_rate)
    raise ModelError(
        f"the warm-up on task {task.name!r} reached a development pass rate of {pass_rate or 0.0:.2f} in "
        f"{spec.max_steps} steps, the stopping rule asks for {spec.stop_pass_rate}; "
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
