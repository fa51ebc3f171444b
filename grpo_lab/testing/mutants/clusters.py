"""Mutants in a whole cluster in virtual time: engines, worker, trainer, network and faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from grpo_lab.errors import ConfigError
from grpo_lab.events import Record
from grpo_lab.sim.explore import shrink
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import Failure, Scenario
from grpo_lab.sim.tape import Tape
from grpo_lab.sim.world import simulate
from grpo_lab.testing.mutants.mutant import Finding, Only, finding_of
from grpo_lab.testing.strategies import tapes

Case = tuple[Scenario, Tape]
SHRINK_RUNS = 200


@dataclass(frozen=True)
class Clusters:
    """``planted`` maps names of ``Parts`` to the classes that take their place, ``environment`` those of what
    the protocol has to cope with: they are there with and without a mutant.
    """

    name: str
    scenarios: st.SearchStrategy[Scenario]
    schedules: st.SearchStrategy[Tape] = dataclasses.field(default_factory=tapes)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    repeats: bool = True

    def cases(self) -> st.SearchStrategy[Case]:
        return st.tuples(self.scenarios, self.schedules)

    def run(self, case: Case, plant: Any, only: Only, passed_over: Callable[[str], None]) -> Finding | None:
        records: list[Record] = []
        seen: dict[str, int] = {}
        found: Finding | None = None
        parts = Parts(**{**self.environment, **(plant or {})})
        try:
            simulate(*case, parts=parts, only=only, passed_over=seen, records=records)
        except ConfigError:
            raise
        except Exception as error:  # whatever ends a simulation is a finding
            found = finding_of(error, records)
        if found is not None and only is not None and found.rule not in only:
            seen[found.rule] = 1
            found = None
        for rule in seen:
            passed_over(rule)
        return found

    def size(self, case: Case) -> tuple[int, ...]:
        scenario, tape = case
        samples = scenario.prompts_per_step * scenario.generations
        return (len(scenario.faults), scenario.engines, scenario.steps, tape.canonical().unusual, samples)

    def smaller(self, case: Case, fails: Callable[[Case], bool]) -> Case:
        scenario, tape = case
        tape = tape.canonical()
        if fails((scenario, Tape())):
            return scenario, Tape()
        if fails((scenario, tape)):
            tape = shrink(tape, lambda other: fails((scenario, other)), max_runs=SHRINK_RUNS)
            fails((scenario, tape))
        return scenario, tape

    def saved(self, case: Case, finding: Finding, protocol: str) -> Failure | None:
        scenario, tape = case
        place = len(finding.records) - 1
        return Failure(
            scenario, tape.canonical(), finding.rule, finding.message, place, finding.event_ids, protocol
        )


def varied(base: Scenario, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Scenario]:
    """``base`` with some of its fields drawn."""
    return st.fixed_dictionaries(fields).map(lambda drawn: dataclasses.replace(base, **drawn))
