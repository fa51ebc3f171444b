"""Metric rules."""

from __future__ import annotations

from grpo_lab.check.rule import Rule

METRIC_RULES: tuple[type[Rule], ...] = ()
