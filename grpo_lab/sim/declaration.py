"""What a simulated run declares before it begins: every bound that the checker needs, and its own end."""

from __future__ import annotations

import dataclasses

from grpo_lab.events import RunDeclared
from grpo_lab.sim.light_worker import HEARTBEAT_STALE_S
from grpo_lab.sim.network import STOCK
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import SHARED_FIELDS, Scenario

LIVENESS_BOUND_S = 240.0


def declaration(scenario: Scenario, parts: Parts) -> RunDeclared:
    """Every bound that the checker needs."""
    abilities = STOCK if scenario.stock else parts.abilities
    return RunDeclared(
        world="sim",
        engine="sim",
        seed=scenario.seed,
        parameters={
            **{name: getattr(scenario, name) for name in SHARED_FIELDS},
            "groups_per_step": scenario.prompts_per_step,
            "trainer_ranks": scenario.trainer_ranks,
            "num_generations": scenario.generations,
            "max_inflight_tasks": scenario.max_inflight,
            "scope": scenario.sync_scope,
            "ring_slots": scenario.ring_slots,
            "initial_version": 1,
            "logprob_tolerance": 1e-4,
            "batch_invariant": False,
            "prefix_policy": scenario.prefix_policy,
            "heartbeat_stale_after_s": HEARTBEAT_STALE_S,
            "liveness_bound_s": max(LIVENESS_BOUND_S, 4 * scenario.longest_sample_s),
        },
        capabilities={name: dataclasses.asdict(abilities) for name in scenario.engine_names},
    )


def horizon_s(scenario: Scenario) -> float:
    longest_s = max((fault.duration_s for fault in scenario.faults), default=0.0)
    return 2 * (scenario.faults_until_s + longest_s + converge_s(scenario))


def converge_s(scenario: Scenario) -> float:
    """From the last fault to the end of the run. Lengths and load make steps long, waiting syncs too."""
    samples = scenario.steps * scenario.prompts_per_step * scenario.generations
    serial_s = samples * scenario.max_tokens * scenario.token_s * 2
    return 1200.0 + scenario.steps * (scenario.step_s + 10.0) + serial_s
