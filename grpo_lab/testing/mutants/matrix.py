"""Which rules no other could stand in for: for each, a mutant that it alone, or its group alone, catches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_lab.testing.mutants.campaign import KNOWN, Kill, rule_order

GROUPS: Mapping[frozenset[str], str] = {}
"""Rules that fire together of necessity, and why."""


@dataclass(frozen=True, slots=True)
class Proof:
    """``alone``: mutants for whose case no other rule fires; ``grouped``: that only its group catches."""

    rule: str
    alone: tuple[str, ...]
    grouped: tuple[str, ...]
    group: tuple[str, ...]
    reason: str

    @property
    def holds(self) -> bool:
        return bool(self.alone or self.grouped)


def proofs(kills: Iterable[Kill], rules: Iterable[str] = KNOWN) -> list[Proof]:
    found = [kill for kill in kills if kill.killed]
    return [_proof(rule, found) for rule in sorted(rules, key=rule_order)]


def _proof(rule: str, kills: Sequence[Kill]) -> Proof:
    alone = tuple(kill.id for kill in kills if set(kill.fired) == {rule})
    for group, reason in GROUPS.items():
        if rule in group:
            grouped = tuple(
                kill.id
                for kill in kills
                if rule in kill.fired and len(kill.fired) > 1 and group >= set(kill.fired)
            )
            if grouped:
                return Proof(rule, alone, grouped, tuple(sorted(group, key=rule_order)), reason)
    return Proof(rule, alone, (), (), "")
