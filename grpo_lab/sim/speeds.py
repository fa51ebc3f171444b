"""How long work takes in virtual time, where a real model does it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from grpo_lab.engine.scheduler import StepPlan
from grpo_lab.errors import ConfigError

_ABOVE_ZERO = ("engine_step_s", "trainer_step_s", "link_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Speeds:
    """Virtual seconds of an engine's step, an optimizer step and a bucket on its way.

    Every engine and the trainer have a device of their own: nobody slows anybody else down. The defaults
    are round figures of a small accelerator, chosen, not measured; they make the demo's optimizer step and
    the generation of its samples take about equally long. Packing and HTTP take no time, evaluation
    neither.

    Attributes:
        engine_step_s: of every engine step, and on top
        engine_sequence_s: for each sequence in it,
        engine_prefill_token_s: for each prompt token that it computes.
        trainer_step_s: of every optimizer step, and on top
        trainer_token_s: for each token, prompts included, of its samples.
        link_s: until a bucket arrives, and on top
        link_bytes_per_s: of every engine's own link.
    """

    engine_step_s: float = 0.02
    engine_sequence_s: float = 1e-4
    engine_prefill_token_s: float = 2e-5
    trainer_step_s: float = 0.2
    trainer_token_s: float = 1e-4
    link_s: float = 0.001
    link_bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            least = "above" if item.name in _ABOVE_ZERO else "of at least"
            if not math.isfinite(value) or value < 0 or (value == 0 and least == "above"):
                raise ConfigError(item.name, value, f"a finite number {least} 0")

    def engine_step(self, plan: StepPlan) -> float:
        return (
            self.engine_step_s
            + self.engine_sequence_s * len(plan.scheduled)
            + self.engine_prefill_token_s * plan.prefill_tokens
        )

    def trainer_step(self, tokens: int) -> float:
        return self.trainer_step_s + self.trainer_token_s * tokens

    def transfer(self, nbytes: int) -> float:
        return self.link_s + nbytes / self.link_bytes_per_s
