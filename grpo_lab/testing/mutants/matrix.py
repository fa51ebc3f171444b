"""Which rules no other could stand in for: for each, a mutant that it alone, or its group alone, catches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_lab.testing.mutants.campaign import KNOWN, Kill, rule_order
from grpo_lab.testing.mutants.mutant import DEADLOCK

GROUPS: Mapping[frozenset[str], str] = {
    frozenset({"L1", "L2", "L3", "L4", "L5", "L6", "L8", "S19", "S32"}): (
        "a stop spreads: what waits for who stopped stops too, and admission counts what they held"
    ),
    frozenset({"D3", "S19", "S22"}): "what favours quick prompts lets them overtake, and in beyond the bound",
    frozenset({"S4", "S5"}): "tags in a wrong order are tags of wrong weights as well",
    frozenset({"S4", "S8"}): "a rank that switches later computes tokens with other weights than the others",
    frozenset({"S20", "S21"}): "a sample that is left out of its group never ends",
    frozenset({"S2", "S28"}): "a member that counts as dead and acts serves without having been activated",
    frozenset({"L10", "S29"}): "ranks that disagree about an outcome go different ways",
}
"""Rules that fire together of necessity, and why."""


REQUIRED = KNOWN - {DEADLOCK}


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


def proofs(kills: Iterable[Kill], rules: Iterable[str] = REQUIRED) -> list[Proof]:
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
