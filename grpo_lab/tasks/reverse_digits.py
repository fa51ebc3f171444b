"""Reverse 6 to 10 random digits: ``52814-`` is answered by ``41825``."""

from __future__ import annotations

import random

from grpo_lab.tasks.base import Task, exact_match

MIN_DIGITS = 6
MAX_DIGITS = 10


def draw(rng: random.Random) -> tuple[str, str]:
    digits = "".join(rng.choices("0123456789", k=rng.randint(MIN_DIGITS, MAX_DIGITS)))
    return digits + "-", digits[::-1]


REVERSE_DIGITS = Task(
    name="reverse_digits",
    description=f"reverse {MIN_DIGITS} to {MAX_DIGITS} random digits; the reward is an exact match",
    draw=draw,
    alphabet="0123456789-",
    max_completion_tokens=MAX_DIGITS + 2,
    reward_funcs=(exact_match,),
)
