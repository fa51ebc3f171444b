"""Transfer rules."""

from __future__ import annotations

from grpo_lab.check.rule import Rule

TRANSFER_RULES: tuple[type[Rule], ...] = ()
