"""Mutants of the trainer's ranks."""

from __future__ import annotations

from grpo_lab.testing.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
