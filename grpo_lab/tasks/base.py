"""What a verifiable task is: prompts drawn from a seed, and a reward that needs no model.

The splits are disjoint by construction: a hash of the prompt decides the only split it can appear in,
so no seed and no count can leak a held-out prompt into training.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from grpo_lab.errors import ConfigError, DataError
from grpo_lab.tasks.warmup_spec import WarmupSpec

Split = Literal["train", "development", "heldout"]
Row = dict[str, Any]
RewardFunction = Callable[..., list[float | None]]
"""``reward(prompts, completions, completion_ids=None, **columns)``: one number, or None, a completion."""

_NUM_BUCKETS = 8  # of which one is held out and one is for development
_DRAWS_PER_ROW = 1000  # a split holds an eighth of all prompts, so this many failures mean it is empty


@dataclass(frozen=True, slots=True)
class Task:
    """A named distribution of prompts with known answers.

    Attributes:
        draw: one (prompt, answer) from a random generator; a module-level function, so it pickles.
        alphabet: every character that prompts and answers are made of.
        max_completion_tokens: enough for the longest answer and its end token, one character a token.
        reward_funcs: TRL's calling style; the first one decides what counts as correct (reward 1).
        warmup: the supervised phase that brings a tiny model to a useful start on this task.
    """

    name: str
    description: str
    draw: Callable[[random.Random], tuple[str, str]]
    alphabet: str
    max_completion_tokens: int
    reward_funcs: tuple[RewardFunction, ...]
    warmup: WarmupSpec = field(default_factory=WarmupSpec)

    def generate(self, split: Split, count: int, seed: int) -> list[Row]:
        """``count`` different rows ``{"prompt", "answer"}`` of a split; equal arguments give equal rows.

        Raises:
            ConfigError: an unknown split, or a count below 1.
            DataError: the split has fewer than ``count`` different prompts.
        """
        if split not in get_args(Split):
            raise ConfigError("split", split, f"one of {', '.join(get_args(Split))}")
        if count < 1:
            raise ConfigError("count", count, "at least 1 row")
        rng = random.Random(f"{self.name}/{split}/{seed}")
        rows: dict[str, Row] = {}
        for _ in range(count * _DRAWS_PER_ROW):
            prompt, answer = self.draw(rng)
            if split_of(prompt) == split:
                rows.setdefault(prompt, {"prompt": prompt, "answer": answer})
                if len(rows) == count:
                    return list(rows.values())
        raise DataError(
            f"task {self.name!r} has only {len(rows)} different prompts in split {split!r}, "
            f"{count} were asked for; ask for fewer"
        )


def split_of(prompt: str) -> Split:
    """The only split that a prompt can appear in: 1/8 held out, 1/8 development, 6/8 train."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "little") % _NUM_BUCKETS
    if bucket == 0:
        return "heldout"
    return "development" if bucket == 1 else "train"


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion: itself, or the contents of its chat messages joined."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def exact_match(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    answer: Sequence[str | None],
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion is the answer to the letter, else 0.0; None where there is no answer."""
    return [
        None if expected is None else float(completion_text(completion) == expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]
