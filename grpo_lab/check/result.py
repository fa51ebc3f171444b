"""What a check found, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "violated", "vacuous", "not evaluable", "n.a."]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: understandable on its own, with the events that prove it."""

    rule: str
    message: str
    event_ids: tuple[str, ...]
    t: float


@dataclass(frozen=True, slots=True)
class RuleResult:
    """``evaluations`` counts how often the rule had something to say; with none it is vacuous, not passed.

    ``note`` says what was missing, or for which engines the rule is weaker.
    """

    id: str
    words: str
    status: Status
    evaluations: int
    violations: tuple[Violation, ...] = ()
    violation_count: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``records`` counts what was read. ``strengths`` maps rule -> engine -> what ``Rule.strength`` says."""

    rules: tuple[RuleResult, ...]
    records: int
    strengths: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def violations(self) -> int:
        return sum(rule.violation_count for rule in self.rules)

    @property
    def evaluated(self) -> Mapping[str, int]:
        """Rule -> count, of the rules that were evaluated at all."""
        return {rule.id: rule.evaluations for rule in self.rules if rule.evaluations}

    @property
    def violated(self) -> tuple[str, ...]:
        """Ids of the rules that were broken."""
        return tuple(rule.id for rule in self.rules if rule.violation_count)

    @property
    def not_applicable(self) -> tuple[str, ...]:
        """Ids of the rules about which this trace can say nothing, whatever happened."""
        return tuple(rule.id for rule in self.rules if rule.status in ("n.a.", "not evaluable"))

    def of(self, rule_id: str) -> RuleResult:
        """Raises ``KeyError`` for an unknown rule."""
        for rule in self.rules:
            if rule.id == rule_id:
                return rule
        raise KeyError(rule_id)

    def to_json(self) -> dict[str, Any]:
        """The form of ``check.json``."""
        return {
            "violations": self.violations,
            "violated": list(self.violated),
            "records": self.records,
            "rules_evaluated": dict(self.evaluated),
            "rules_not_applicable": list(self.not_applicable),
            "capabilities": {rule: dict(engines) for rule, engines in self.strengths.items()},
            "rules": [
                {
                    "id": rule.id,
                    "words": rule.words,
                    "status": rule.status,
                    "evaluations": rule.evaluations,
                    "violation_count": rule.violation_count,
                    "violations": [
                        {"message": item.message, "event_ids": list(item.event_ids), "t": item.t}
                        for item in rule.violations
                    ],
                    "note": rule.note,
                }
                for rule in self.rules
            ],
        }
