"""How long an engine's model steps take in virtual time.

    step_s = (base_s + prefill_token_s * prefill tokens + sequence_s * sequences
              + context_token_s * context tokens) * (1 + jitter * (2 u - 1))

``u`` in [0, 1) depends on (seed, step number) alone, so that a step has the same jitter whether it is run by
itself or as one of many. Context tokens are those with a KV entry before the step: attention reads them all.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np

from grpo_lab.engine.sampling import uniforms
from grpo_lab.engine.scheduler import StepPlan
from grpo_lab.errors import ConfigError

_TABLE_STEPS = 4096


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Seconds of a step, by its batch. Raises ``ConfigError`` for a negative part or jitter of 1 or more.

    >>> model = LatencyModel(base_s=0.02, sequence_s=0.001)
    >>> model.durations_s(StepPlan([], 0, 8, sequences=8, context_tokens=0), first_step=1, count=3).tolist()
    [0.028, 0.028, 0.028]
    """

    base_s: float
    prefill_token_s: float = 0.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    _tables: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self)[:5]:
            value = getattr(self, item.name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(item.name, value, "a finite number of at least 0")
        if self.base_s <= 0:
            raise ConfigError("base_s", self.base_s, "above 0")
        if self.jitter >= 1:
            raise ConfigError("jitter", self.jitter, "0 to less than 1")

    def durations_s(self, plan: StepPlan, first_step: int, count: int) -> np.ndarray:
        """Float64 [count]: seconds of steps ``first_step``, ``first_step + 1``, ... of the same batch.

        Each step leaves every sequence with one KV entry more.
        """
        same_s = self.base_s + self.prefill_token_s * plan.prefill_tokens + self.sequence_s * plan.sequences
        context_tokens = plan.context_tokens + plan.sequences * np.arange(count)
        total_s: np.ndarray = (same_s + self.context_token_s * context_tokens) * self._factors(
            first_step, count
        )
        return total_s

    def step_s(self, plan: StepPlan, step: int) -> float:
        """Seconds of step number ``step``."""
        return float(self.durations_s(plan, step, 1)[0])

    def _factors(self, first_step: int, count: int) -> np.ndarray:
        """Of steps from ``first_step`` on, out of a table: one draw costs as much as thousands."""
        if self.jitter == 0:
            return np.ones(count)
        table, start = divmod(first_step, _TABLE_STEPS)
        parts = [self._table(table)[start : start + count]]
        while (have := sum(len(part) for part in parts)) < count:
            table += 1
            parts.append(self._table(table)[: count - have])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _table(self, number: int) -> np.ndarray:
        found = self._tables.get(number)
        if found is None:
            steps = range(number * _TABLE_STEPS, (number + 1) * _TABLE_STEPS)
            u = uniforms([self.seed & (1 << 64) - 1] * _TABLE_STEPS, steps)
            self._tables.clear()  # steps only go on
            found = self._tables[number] = 1.0 + self.jitter * (2.0 * u - 1.0)
        return found
