"""Running sum modulo 10 of 6 to 8 random digits: ``5281=`` is answered by ``5756``."""

from __future__ import annotations

import random
from itertools import accumulate

from grpo_lab.tasks.base import Task, exact_match
from grpo_lab.tasks.warmup_spec import WarmupSpec

MIN_DIGITS = 6
MAX_DIGITS = 8


def draw(rng: random.Random) -> tuple[str, str]:
    digits = [rng.randrange(10) for _ in range(rng.randint(MIN_DIGITS, MAX_DIGITS))]
    sums = accumulate(digits, lambda total, digit: (total + digit) % 10)
    return "".join(map(str, digits)) + "=", "".join(map(str, sums))


RUNNING_SUM = Task(
    name="running_sum",
    description=f"running sum modulo 10 of {MIN_DIGITS} to {MAX_DIGITS} digits; the reward is an exact match",
    draw=draw,
    alphabet="0123456789=",
    max_completion_tokens=MAX_DIGITS + 2,
    reward_funcs=(exact_match,),
    # Every length moves the digit to look at, which is learned all at once after a plateau: wider first
    # weights shorten the plateau, and close looks catch the moment.
    warmup=WarmupSpec(initializer_range=0.05, look_every_steps=10),
)
