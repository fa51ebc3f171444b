"""Version rules."""

from __future__ import annotations

from grpo_lab.check.rule import Rule

VERSION_RULES: tuple[type[Rule], ...] = ()
