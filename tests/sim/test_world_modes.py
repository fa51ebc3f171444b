"""A whole cluster with its engines in event mode does what it does in step mode."""

from __future__ import annotations

import dataclasses

import pytest

from grpo_lab.engine.core import EngineCore
from grpo_lab.errors import InvariantViolation
from grpo_lab.events import ModelStep, RunDeclared
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import Fault, Scenario
from grpo_lab.sim.world import simulate

BASE = Scenario(
    engines=2,
    slots=3,
    generations=3,
    max_inflight=12,
    token_s=0.0213,
    step_s=0.31,
    step_jitter=0.2,
    context_token_s=1e-5,
    mean_tokens=24,
    max_tokens=60,
    steps=4,
)


def told(scenario: Scenario) -> tuple[list[tuple[object, ...]], float, int, int]:
    """Everything but the steps, how long the run took, and what the engines generated in how many records."""
    result = simulate(scenario)
    assert result.value.check.violations == 0
    rows = [
        (record.actor, record.event.kind, getattr(record.event, "request", ""), round(record.t, 9))
        for record in result.records
        if not isinstance(record.event, ModelStep | RunDeclared)
    ]
    steps = sum(isinstance(record.event, ModelStep) for record in result.records)
    return rows, result.virtual_s, result.value.measures.tokens, steps


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pause_mode": "abort", "lengths": "fixed"},
        {"pause_mode": "wait", "lengths": "heavy"},
        {"clear_cache": False, "lengths": "lognormal"},
        {"kv_blocks": 8, "batch_tokens": 16},
        {"cache_outputs": False, "prefix_policy": "flush", "engine_ranks": 2, "lengths": "lognormal"},
        {"faults": (Fault("stall", "engine-0", "generate", 9, 2.0),)},
        {"faults": (Fault("crash_after", "engine-1", "generate", 7, 3.0),), "cache_outputs": False},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_the_same_run_in_both_modes(changes: dict[str, object]) -> None:
    step = told(dataclasses.replace(BASE, **changes))
    event = told(dataclasses.replace(BASE, **changes, engine_mode="event"))
    assert event[0] == step[0]
    assert event[1:3] == (pytest.approx(step[1]), step[2])
    assert event[3] < step[3]


class SharedPrefixes(EngineCore):
    """The wrong choice: a prefix cache that no weight version and no flush ever separates."""

    def __init__(self, policy, recorder, config, **named) -> None:
        super().__init__(policy, recorder, dataclasses.replace(config, prefix_policy="shared"), **named)

    def flush_prefix_cache(self) -> None:
        pass


def test_a_prefix_cache_that_crosses_versions_is_seen() -> None:
    scenario = dataclasses.replace(BASE, prompts_per_step=3, prompt_tokens=40, steps=8, clear_cache=False)
    with pytest.raises(InvariantViolation) as found:
        simulate(scenario, parts=Parts(core=SharedPrefixes))
    assert found.value.rule == "S17"


class LateRank(EngineCore):
    """Rank 1 says that it switches a step after rank 0."""

    def _announce_switch(self, rank: int, weights_hash: str) -> None:
        self._next_step += rank
        super()._announce_switch(rank, weights_hash)
        self._next_step -= rank


def test_a_rank_that_switches_late_is_seen() -> None:
    scenario = dataclasses.replace(BASE, engine_ranks=2)
    with pytest.raises(InvariantViolation) as found:
        simulate(scenario, parts=Parts(core=LateRank))
    assert found.value.rule == "S8"
