"""What a rule is: words, what it needs, and handlers of the events that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from grpo_lab.check.result import RuleResult, Status, Violation
from grpo_lab.events import Event, Record, RunDeclared

MAX_KEPT_VIOLATIONS = 50
Handler = Callable[[Any, Record], None]
H = TypeVar("H", bound=Handler)


def on(*kinds: type[Event]) -> Callable[[H], H]:
    """Marks a method of a rule as the handler of these event kinds."""

    def mark(function: H) -> H:
        function.handles = kinds  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(slots=True)
class Context:
    """What the run declared. Everything that a rule knows of bounds comes from here."""

    declared: RunDeclared = field(default_factory=RunDeclared)

    def parameter(self, name: str) -> Any:
        """Raises ``KeyError``; a rule that lists the name in ``parameters`` is not made without it."""
        return self.declared.parameters[name]

    def engine_can(self, engine: str, capability: str) -> bool:
        return bool(self.declared.capabilities.get(engine, {}).get(capability))

    def engines_without(self, capability: str) -> tuple[str, ...]:
        engines = self.declared.capabilities
        return tuple(sorted(name for name in engines if not self.engine_can(name, capability)))


class Rule:
    """Base of all rules. A subclass sets ``id`` and ``words`` and marks its handlers with ``on``.

    A rule reads events one at a time, drops what it knows of samples, requests and syncs when they end
    (traces have millions of events), calls ``count`` whenever it really compared something, and
    ``violate`` with the ids of the events that prove it.

    Attributes:
        id: S1 ... S32, L1 ... L10, H1, D1 ... D5.
        words: the rule in one sentence.
        parameters: names that ``RunDeclared.parameters`` must have, or the rule is not evaluable.
        capability: an engine without it gives less evidence, or none.
        weaker: what the rule still checks for such an engine; "" if nothing.
    """

    id: ClassVar[str]
    words: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]] = ()
    capability: ClassVar[str] = ""
    weaker: ClassVar[str] = ""
    _handlers: ClassVar[dict[type[Event], str]] = {}

    def __init_subclass__(cls) -> None:
        cls._handlers = {
            kind: name
            for base in reversed(cls.__mro__)
            for name, function in vars(base).items()
            for kind in getattr(function, "handles", ())
        }

    def __init__(self, context: Context) -> None:
        self.context = context
        self.evaluations = 0
        self.violation_count = 0
        self._violations: list[Violation] = []
        self._now_s = 0.0

    def handlers(self) -> Iterator[tuple[type[Event], Callable[[Record], None]]]:
        for kind, name in self._handlers.items():
            yield kind, getattr(self, name)

    def finish(self, last: Record | None) -> None:
        """The trace is over; ``last`` is its last record."""

    def count(self, times: int = 1) -> None:
        """The rule was really put to the test."""
        self.evaluations += times

    def violate(self, message: str, record: Record | None, *event_ids: str) -> None:
        """``record`` is where it became visible (None: at the end); ``event_ids`` are earlier proof."""
        self.violation_count += 1
        if len(self._violations) < MAX_KEPT_VIOLATIONS:
            ids = (*event_ids, *((record.id,) if record is not None else ()))
            t = record.t if record is not None else self._now_s
            self._violations.append(Violation(self.id, message, tuple(dict.fromkeys(ids)), t))

    def take_new(self, already: int) -> list[Violation]:
        """Kept violations beyond the first ``already``."""
        return self._violations[already:]

    @classmethod
    def strength(cls, abilities: Mapping[str, Any]) -> str:
        """How far the rule goes for an engine with these capabilities: full, "weaker: ..." or "n.a.: ..."."""
        if not cls.capability or abilities.get(cls.capability):
            return "full"
        return f"weaker: {cls.weaker}" if cls.weaker else f"n.a.: no {cls.capability}"

    def result(self) -> RuleResult:
        note = ""
        status: Status = "passed"
        lacking = self.context.engines_without(self.capability) if self.capability else ()
        if lacking:
            strength = self.strength({})
            note = f"{strength} (for {', '.join(lacking)})"
        if self.violation_count:
            status = "violated"
        elif self.evaluations == 0:
            nobody = len(lacking) == len(self.context.declared.capabilities)
            status = "n.a." if lacking and nobody and not self.weaker else "vacuous"
        return RuleResult(
            self.id,
            self.words,
            status,
            self.evaluations,
            tuple(self._violations),
            self.violation_count,
            note,
        )


def not_evaluable(rule: type[Rule], missing: list[str]) -> RuleResult:
    return RuleResult(rule.id, rule.words, "not evaluable", 0, note=f"not declared: {', '.join(missing)}")
