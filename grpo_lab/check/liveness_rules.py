"""Liveness rules."""

from __future__ import annotations

from grpo_lab.check.rule import Rule

LIVENESS_RULES: tuple[type[Rule], ...] = ()
