"""Engine rules."""

from __future__ import annotations

from grpo_lab.check.rule import Rule

ENGINE_RULES: tuple[type[Rule], ...] = ()
