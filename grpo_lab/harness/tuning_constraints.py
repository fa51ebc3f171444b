"""Objectives and constraints of ``grpo-lab tune`` as data: parsed, never evaluated."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from grpo_lab.errors import ConfigError
from grpo_lab.harness.validation_figures import QUANTITIES, Figures

HIGHER_IS_BETTER = frozenset({"tokens_per_s", "engine_busy_share"})
_PATTERN = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(<=|>=|<|>)\s*([^\s<>=]+)\s*")
_HOLDS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {
        "<=": lambda value, limit: value <= limit,
        ">=": lambda value, limit: value >= limit,
        "<": lambda value, limit: value < limit,
        ">": lambda value, limit: value > limit,
    }
)


@dataclass(frozen=True, slots=True)
class Objective:
    """A quantity to be made large or small.

    >>> Objective.parse("step_s")
    Objective(quantity='step_s', goal='min')
    >>> Objective.parse("max:ttft_s").goal
    'max'
    """

    quantity: str
    goal: Literal["min", "max"]

    @classmethod
    def parse(cls, text: str) -> Objective:
        """``QUANTITY``, ``min:QUANTITY`` or ``max:QUANTITY``. Raises ``ConfigError``."""
        goal, colon, name = text.strip().rpartition(":")
        name = _known(name, "objective", text)
        if not colon:
            return cls(name, "max" if name in HIGHER_IS_BETTER else "min")
        if goal == "min":
            return cls(name, "min")
        if goal == "max":
            return cls(name, "max")
        raise ConfigError("objective", text, "QUANTITY, min:QUANTITY or max:QUANTITY")

    def score(self, figures: Figures) -> float:
        """Higher is better; minus infinity where nothing was measured."""
        value = getattr(figures, self.quantity)
        if value is None:
            return -math.inf
        return float(value) if self.goal == "max" else -float(value)


@dataclass(frozen=True, slots=True)
class Constraint:
    """``quantity sign limit``.

    >>> Constraint.parse("staleness_p99<=2")
    Constraint(quantity='staleness_p99', sign='<=', limit=2.0)
    """

    quantity: str
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Raises ``ConfigError`` for anything but a known quantity, a comparison and a finite number."""
        match = _PATTERN.fullmatch(text)
        expected = "QUANTITY<=NUMBER (or >=, <, >), for example staleness_p99<=2"
        if match is None:
            raise ConfigError("constraint", text, expected)
        name, sign, number = match.groups()
        try:
            limit = float(number)
        except ValueError:
            raise ConfigError("constraint", text, expected) from None
        if not math.isfinite(limit):
            raise ConfigError("constraint", text, "a finite number at its end")
        return cls(_known(name, "constraint", text), sign, limit)

    def holds(self, figures: Figures) -> bool:
        """A quantity that was not measured breaks it."""
        value = getattr(figures, self.quantity)
        return value is not None and _HOLDS[self.sign](float(value), self.limit)

    def excess(self, figures: Figures) -> float:
        """How far the limit is missed, as a part of it; 0 where it holds."""
        value = getattr(figures, self.quantity)
        if self.holds(figures):
            return 0.0
        return math.inf if value is None else abs(float(value) - self.limit) / max(abs(self.limit), 1.0)

    def __str__(self) -> str:
        return f"{self.quantity}{self.sign}{self.limit:g}"


def _known(name: str, field: str, text: str) -> str:
    if name not in QUANTITIES:
        close = difflib.get_close_matches(name, QUANTITIES, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(field, text, f"one of {', '.join(QUANTITIES)}", hint)
    return name
