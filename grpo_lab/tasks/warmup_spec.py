"""Settings of the supervised phase, apart from the phase so that a task can name its own without torch."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WarmupSpec:
    """AdamW on the answers' tokens of fresh training prompts, until a pass rate is reached.

    Attributes:
        stop_pass_rate: the phase ends at the first look at which this share of the *development* prompts
            is answered right by one completion each, sampled at temperature 1; 0 skips the phase.
            Reinforcement learning samples in the same way, and the pass rate p decides how many of its
            groups of n carry a signal: 1 - p^n - (1 - p)^n of equally hard ones. Greedy accuracy is no
            substitute: with a constant learning rate it jumps by 0.1 and more between looks.
        initializer_range: standard deviation of the weights that the phase starts from.
        look_every_steps: steps between two looks at the development split.
        max_steps: without the pass rate after this many steps the phase fails.
    """

    stop_pass_rate: float = 0.2
    initializer_range: float = 0.02
    look_every_steps: int = 20
    max_steps: int = 400
    development_rows: int = 512
    batch_size: int = 128
    learning_rate: float = 2e-3
    ramp_steps: int = 30
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.stop_pass_rate < 1:
            raise ConfigError("stop_pass_rate", self.stop_pass_rate, "at least 0 and below 1")
        for field in ("look_every_steps", "max_steps", "development_rows", "batch_size", "ramp_steps"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "at least 1")
        for field in ("initializer_range", "learning_rate", "max_grad_norm"):
            if not getattr(self, field) > 0:
                raise ConfigError(field, getattr(self, field), "above 0")
        if not self.weight_decay >= 0:
            raise ConfigError("weight_decay", self.weight_decay, "at least 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("betas", self.betas, "two numbers from 0, below 1")
