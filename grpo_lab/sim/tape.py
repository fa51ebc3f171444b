"""The choice tape: every scheduling decision of a simulation, drawn before it begins.

A tape is a list of integers. The loop asks it which of ``n`` ready lanes runs next; the answer is the
next integer modulo ``n``, and zero (first in, first out) past the end. So every tape is a valid
schedule, a shorter tape with smaller numbers is a simpler one, and a failing schedule replays from a
short list in a file.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from grpo_lab.errors import TraceError

_LARGEST = 1 << 30
_SHOWN = 300  # choices of a repr


class Tape:
    """Pre-drawn choices, and a record of what was asked while they were read.

    Attributes:
        choices: the integers, each in [0, 2**30).
        asked: for each choice read so far, the number of lanes it chose from (2 or more; a single lane
            needs no choice). Nothing is recorded past the end.
        taken: the lane that was chosen, in [0, asked).
        exhausted: no choice is left; from now on first in, first out.

    >>> tape = Tape([5, 1])
    >>> [tape.choose("abc"), tape.choose("ab"), tape.choose("abcd")]
    [2, 1, 0]
    >>> list(tape.asked), list(tape.taken), tape.exhausted
    ([3, 2], [2, 1], True)
    """

    def __init__(self, choices: Iterable[int] = ()) -> None:
        self.choices = tuple(choices)
        for index, choice in enumerate(self.choices):
            if not 0 <= choice < _LARGEST:
                raise TraceError(f"choice {index} of the tape is {choice}: expected 0 <= choice < 2**30")
        self.rewind()

    def rewind(self) -> None:
        """Back to the start, with nothing recorded."""
        self.asked = array("L")
        self.taken = array("L")
        self.exhausted = not self.choices

    def hold(self) -> None:
        """First in, first out, without reading or recording, until ``go_on``.

        A search of all schedules to a depth is held until the part that it is about begins.
        """
        self.exhausted = True

    def go_on(self) -> None:
        """Ends ``hold``."""
        self.exhausted = len(self.asked) >= self.length

    @property
    def length(self) -> int:
        """Choices that the tape can make."""
        return len(self.choices)

    @property
    def unusual(self) -> int:
        """Choices that are not first in, first out.

        >>> Tape([0, 5, 0, 1]).unusual
        2
        """
        return sum(1 for choice in self.choices if choice)

    def choose(self, lanes: Sequence[Hashable]) -> int:
        """Index into ``lanes`` (a task, or a callback's handle, each) of the one that runs next."""
        position = len(self.asked)
        if position >= len(self.choices):
            return 0
        count = len(lanes)
        choice = self.choices[position] % count
        self.asked.append(count)
        self.taken.append(choice)
        self.exhausted = position + 1 >= len(self.choices)
        return choice

    def canonical(self) -> Tape:
        """What was in fact chosen, as a plain tape without trailing zeros: it gives the same schedule."""
        return Tape(_without_trailing_zeros(self.taken))

    def to_json(self) -> dict[str, Any]:
        return {"choices": list(_without_trailing_zeros(self.choices))}

    @classmethod
    def from_json(cls, data: dict[str, Any] | str) -> Tape:
        """Raises ``TraceError`` for anything that is no tape."""
        try:
            row = json.loads(data) if isinstance(data, str) else data
            choices = row["choices"]
            if not isinstance(choices, list) or not all(type(item) is int for item in choices):
                raise TypeError("'choices' is not a list of integers")
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"not a choice tape: {error!r}; expected {{'choices': [0, 2, 1]}}") from error
        return cls(choices)

    def __repr__(self) -> str:
        if len(self.choices) > _SHOWN:
            return f"<{type(self).__name__} of {len(self.choices)} choices>"
        return f"{type(self).__name__}({list(self.choices)!r})"


class PctTape(Tape):
    """Probabilistic concurrency testing, recorded so that it replays as a plain tape.

    Every lane gets a random priority when first seen, and the ready lane of the highest priority runs;
    at ``depth - 1`` random decisions among the first ``steps`` the running lane falls below all others.
    A bug that needs ``depth`` ordered decisions in a run of n lanes and k decisions is met with a
    probability of at least ``1 / (n * k ** (depth - 1))``. After ``steps`` decisions the order is first
    in, first out again: strict priorities would starve a lane for ever.

    Source: Burckhardt, Kothari, Musuvathi, Nagarakatte, "A randomized scheduler with probabilistic
    guarantees of finding bugs", ASPLOS 2010.
    """

    def __init__(self, seed: int, depth: int = 3, steps: int = 1000) -> None:
        self.seed, self.depth, self.steps = seed, depth, steps
        super().__init__()

    def rewind(self) -> None:
        super().rewind()
        self.exhausted = self.steps == 0
        self._random = random.Random(f"pct {self.seed}")
        changes = min(self.depth - 1, self.steps)
        self._change_points = frozenset(self._random.sample(range(self.steps), changes))
        self._priorities: dict[Hashable, float] = {}

    @property
    def length(self) -> int:
        return self.steps

    def choose(self, lanes: Sequence[Hashable]) -> int:
        position = len(self.asked)
        if position >= self.steps:
            return 0
        priorities = self._priorities
        for lane in lanes:
            if lane not in priorities:
                priorities[lane] = 1.0 + self._random.random()
        choice = max(range(len(lanes)), key=lambda index: priorities[lanes[index]])
        if position in self._change_points:
            priorities[lanes[choice]] = -float(position)
        self.asked.append(len(lanes))
        self.taken.append(choice)
        self.exhausted = position + 1 >= self.steps
        if self.exhausted:
            self._priorities = {}
        return choice

    def to_json(self) -> dict[str, Any]:
        """The schedule as it was taken; empty before a run."""
        return self.canonical().to_json()

    def __repr__(self) -> str:
        return f"PctTape(seed={self.seed}, depth={self.depth}, steps={self.steps})"


def fifo() -> Tape:
    """First in, first out: the order of stock asyncio."""
    return Tape()


def random_tape(seed: int, n: int) -> Tape:
    """``n`` uniform choices, then first in, first out."""
    source = random.Random(f"tape {seed}")
    return Tape(source.randrange(_LARGEST) for _ in range(n))


def pct_tape(seed: int, depth: int = 3, steps: int = 1000) -> PctTape:
    """A priority schedule with ``depth - 1`` changes among the first ``steps`` decisions."""
    return PctTape(seed, depth, steps)


def _without_trailing_zeros(choices: Sequence[int]) -> Sequence[int]:
    end = len(choices)
    while end and choices[end - 1] == 0:
        end -= 1
    return choices[:end]
