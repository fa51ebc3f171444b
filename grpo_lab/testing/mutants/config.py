"""Mutants of the configuration: values that cannot work are accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from grpo_lab.errors import ConfigError
from grpo_lab.sim.scenario import Failure
from grpo_lab.testing.mutants.mutant import Finding, Mutant, Only
from grpo_lab.trainer.config import AsyncGRPOConfig

NONSENSE: dict[str, tuple[Any, ...]] = {
    "weight_sync_steps": (0, -1, 1.5),
    "max_staleness": (-1, 0.5),
    "queue_maxsize": (0, -5),
    "temperature": (0.0, -1.0, float("nan")),
    "top_p": (0.0, 1.5),
    "num_generations": (0, -2),
    "max_completion_length": (0,),
    "max_inflight_tasks": (0, -1),
    "token_budget": (0, -1),
    "learning_rate": (-1.0, float("inf")),
}
"""Each has a meaning for a type checker and none for a run."""

Case = tuple[str, Any]


@dataclass(frozen=True)
class Configurations:
    """Makes a configuration with one value out of its range: C1 wants it refused, by its name."""

    name: str = "configurations"
    repeats: bool = True

    def cases(self) -> st.SearchStrategy[Case]:
        return st.sampled_from([(field, value) for field, values in NONSENSE.items() for value in values])

    def run(self, case: Case, plant: Any, only: Only, passed_over: Callable[[str], None]) -> Finding | None:
        make: type[AsyncGRPOConfig] = AsyncGRPOConfig if plant is None else plant
        field, value = case
        try:
            make(output_dir="unused", report_to=[], use_cpu=True, **{field: value})
        except ConfigError as error:
            if field in str(error):
                return None
            message = f"{field}={value!r} was refused without its name: {error}"
        except Exception as error:  # refused by chance, later, in other words
            message = f"{field}={value!r} ended as {type(error).__name__}: {error}"
        else:
            message = f"{field}={value!r} was accepted"
        if only is None or "C1" in only:
            return Finding("C1", message)
        passed_over("C1")
        return None

    def size(self, case: Case) -> tuple[int, ...]:
        return (list(NONSENSE).index(case[0]),)

    def smaller(self, case: Case, fails: Callable[[Case], bool]) -> Case:
        return case

    def saved(self, case: Case, finding: Finding, protocol: str) -> Failure | None:
        return None


class AcceptsNonsense(AsyncGRPOConfig):
    """Nonsense is accepted, and ends much later in other words.

    Field: trl 1.16.0: ``weight_sync_steps=0``, ``max_staleness=-1``, ``queue_maxsize=-5``, ``temperature=0``.
    Planted: no field has a range.
    Exposed by: each field out of its range. C1.
    """

    def __post_init__(self) -> None:
        pass


MUTANTS = (Mutant("M39", ("C1",), Configurations(), AcceptsNonsense),)
