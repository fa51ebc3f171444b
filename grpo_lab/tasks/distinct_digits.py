"""Which digits occur among 8 to 14 random ones, in ascending order: ``5281522*`` is answered by ``1258``."""

from __future__ import annotations

import random

from grpo_lab.tasks.base import Task, exact_match
from grpo_lab.tasks.warmup_spec import WarmupSpec

MIN_DIGITS = 8
MAX_DIGITS = 14


def draw(rng: random.Random) -> tuple[str, str]:
    digits = rng.choices("0123456789", k=rng.randint(MIN_DIGITS, MAX_DIGITS))
    return "".join(digits) + "*", "".join(sorted(set(digits)))


DISTINCT_DIGITS = Task(
    name="distinct_digits",
    description=f"the different digits of {MIN_DIGITS} to {MAX_DIGITS}, sorted; the reward is an exact match",
    draw=draw,
    alphabet="0123456789*",
    max_completion_tokens=12,
    reward_funcs=(exact_match,),
    # Learned within a few steps once it is learned at all, so it is looked at often.
    warmup=WarmupSpec(look_every_steps=4),
)
