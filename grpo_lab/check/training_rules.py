"""Training rules."""

from __future__ import annotations

from grpo_lab.check.rule import Rule

TRAINING_RULES: tuple[type[Rule], ...] = ()
