"""Sort 8 to 14 random digits: ``52814...>`` is answered by the same digits in ascending order."""

from __future__ import annotations

import random

from grpo_lab.tasks.base import Task, exact_match

MIN_DIGITS = 8
MAX_DIGITS = 14


def draw(rng: random.Random) -> tuple[str, str]:
    digits = rng.choices("0123456789", k=rng.randint(MIN_DIGITS, MAX_DIGITS))
    return "".join(digits) + ">", "".join(sorted(digits))


SORT_DIGITS = Task(
    name="sort_digits",
    description=f"sort {MIN_DIGITS} to {MAX_DIGITS} random digits; the reward is an exact match",
    draw=draw,
    alphabet="0123456789>",
    max_completion_tokens=MAX_DIGITS + 2,
    reward_funcs=(exact_match,),
)
