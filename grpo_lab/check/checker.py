"""Feeds records to all rules; works on a finished trace and while a system runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.check.declaration import check_declaration
from grpo_lab.check.history import read_parts
from grpo_lab.check.result import CheckResult, RuleResult, Violation
from grpo_lab.check.rule import Context, Rule, not_evaluable
from grpo_lab.check.rules import ALL_RULES
from grpo_lab.events import Event, Record, RunDeclared


class Checker:
    """Give it every record in an order that respects causes; it returns the new violations.

    The first record should be ``RunDeclared``; without it, rules that need a bound are not evaluable.
    """

    def __init__(self, rules: Sequence[type[Rule]] = ALL_RULES) -> None:
        self._rule_types = tuple(rules)
        self._rules: list[Rule] | None = None
        self._unable: list[RuleResult] = []
        self._handlers: dict[type[Event], list[tuple[Rule, Callable[[Record], None]]]] = defaultdict(list)
        self._records = 0
        self._last: Record | None = None
        self._capabilities: dict[str, dict[str, Any]] = {}

    def feed(self, record: Record) -> list[Violation]:
        """Reads one record. Returns the violations that it made visible.

        Raises ``TraceError`` for a declaration that no rule could work with.
        """
        if self._rules is None:
            self._start(record)
        self._records += 1
        self._last = record
        found: list[Violation] = []
        for rule, handler in self._handlers.get(type(record.event), ()):
            before = rule.violation_count
            handler(record)
            if rule.violation_count > before:
                found += rule.take_new(before)
        return found

    def finish(self) -> CheckResult:
        """The trace is over."""
        if self._rules is None:
            self._start(None)
        results = list(self._unable)
        for rule in self._rules or ():
            rule.finish(self._last)
            results.append(rule.result())
        order = {rule.id: place for place, rule in enumerate(self._rule_types)}
        ordered = tuple(sorted(results, key=lambda item: order[item.id]))
        strengths = {
            rule.id: {engine: rule.strength(can) for engine, can in sorted(self._capabilities.items())}
            for rule in self._rule_types
        }
        return CheckResult(ordered, self._records, strengths)

    def _start(self, first: Record | None) -> None:
        declared = (
            first.event if first is not None and isinstance(first.event, RunDeclared) else RunDeclared()
        )
        check_declaration(declared)
        self._capabilities = declared.capabilities
        context = Context(declared)
        self._rules = []
        for rule_type in self._rule_types:
            missing = [name for name in rule_type.parameters if declared.parameters.get(name) is None]
            if missing:
                self._unable.append(not_evaluable(rule_type, missing))
                continue
            rule = rule_type(context)
            self._rules.append(rule)
            for kind, handler in rule.handlers():
                self._handlers[kind].append((rule, handler))


def check_records(records: Iterable[Record], rules: Sequence[type[Rule]] = ALL_RULES) -> CheckResult:
    """Checks records that are in an order that respects causes."""
    checker = Checker(rules)
    for record in records:
        checker.feed(record)
    return checker.finish()


def check_trace(path: Path, rules: Sequence[type[Rule]] = ALL_RULES) -> CheckResult:
    """Checks a run directory, a directory of parts, or a single trace file. Raises ``TraceError``."""
    return check_records(read_parts(path), rules)
