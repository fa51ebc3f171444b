"""What a mutant is: one planted fault, the fixture that runs it, and the rules that must see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from grpo_lab.errors import Deadlock, InvariantViolation
from grpo_lab.events import Record
from grpo_lab.sim.scenario import Failure

C = TypeVar("C")
Only = frozenset[str] | None
DEADLOCK = "deadlock"


@dataclass(slots=True)
class Finding:
    """A rule that a run broke. ``rule`` is its id, ``deadlock``, or the name of the exception that ended the
    run; ``records`` are the trace up to there.
    """

    rule: str
    message: str
    event_ids: tuple[str, ...] = ()
    records: list[Record] = field(default_factory=list)


class Fixture(Protocol[C]):
    """A world in which mutants live. ``plant`` is what a mutant changes in it, None for the correct protocol.

    ``run`` gives the first finding among the rules ``only`` (None: any), and reports every other one to
    ``passed_over``. Detection reads the trace, or the outcome, and knows nothing of the plant.
    """

    @property
    def name(self) -> str: ...

    @property
    def repeats(self) -> bool:
        """Whether a case gives the same again, and soon. Else a run must report every finding it has."""
        ...

    def cases(self) -> st.SearchStrategy[C]: ...

    def run(self, case: C, plant: Any, only: Only, passed_over: Callable[[str], None]) -> Finding | None: ...

    def size(self, case: C) -> tuple[int, ...]:
        """What counts as small."""
        ...

    def smaller(self, case: C, fails: Callable[[C], bool]) -> C:
        """Makes a case smaller in ways that Hypothesis does not know of."""
        ...

    def saved(self, case: C, finding: Finding, protocol: str) -> Failure | None:
        """The case as a file that ``grpo-lab replay`` runs again, where there is one."""
        ...


@dataclass(frozen=True, slots=True)
class Mutant:
    """``plant`` carries the docstring: what went wrong in the field, what is planted, what exposes it, and
    the rule. ``rules`` are those any of which kills it; ``parts`` says what is replaced in the fixture.
    """

    id: str
    rules: tuple[str, ...]
    fixture: Fixture[Any]
    plant: Any
    parts: Any = None

    @property
    def case(self) -> str:
        return self.id.partition("-")[0]

    @property
    def words(self) -> str:
        return " ".join((self.plant.__doc__ or "").split())

    @property
    def title(self) -> str:
        return (self.plant.__doc__ or "").strip().splitlines()[0]

    @property
    def planted(self) -> Any:
        return self.plant if self.parts is None else self.parts


def finding_of(error: Exception, records: list[Record]) -> Finding:
    """What an exception that ended a simulation stands for."""
    if isinstance(error, InvariantViolation):
        return Finding(error.rule, str(error), error.event_ids, records)
    rule = DEADLOCK if isinstance(error, Deadlock) else type(error).__name__
    return Finding(rule, str(error), (records[-1].id,) if records else (), records)
