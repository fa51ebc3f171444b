"""Rollout rules."""

from __future__ import annotations

from grpo_lab.check.rule import Rule

ROLLOUT_RULES: tuple[type[Rule], ...] = ()
