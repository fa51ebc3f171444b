"""Our own faults that a planted one brought to light: it survived, and should not have."""

import asyncio
import dataclasses

import pytest
import torch

from grpo_lab.check.checker import check_records
from grpo_lab.errors import InvariantViolation, SimulationBoundExceeded
from grpo_lab.events import Heartbeat, MemberStarted, MemberStopped, Record, RunDeclared
from grpo_lab.protocol.rollout_worker import RolloutWorker
from grpo_lab.sim.engine_host import model_score
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import WORKER, Fault, Scenario
from grpo_lab.sim.world import simulate
from grpo_lab.testing.mutants.campaign import hunt_mutant
from grpo_lab.testing.mutants.catalogue import find
from grpo_lab.testing.mutants.worker import STAYING, LostWithoutAWord


def stopped_after(silent_s):
    """A worker whose heart stops, and which is stopped in good order ``silent_s`` later."""
    parameters = {"liveness_bound_s": 240.0, "heartbeat_stale_after_s": 60.0}
    events = [
        (0.0, "run", RunDeclared(parameters=parameters)),
        (0.0, "run", MemberStarted(member="worker", role="worker")),
        (1.0, "worker", Heartbeat(member="worker", progress=1)),
        (1.0 + silent_s, "run", MemberStopped(member="worker")),
    ]
    return [Record(t, actor, place, (), event) for place, (t, actor, event) in enumerate(events)]


@pytest.mark.parametrize(("silent_s", "violations"), [(59.0, 0), (61.0, 1)])
def test_a_worker_that_stalled_until_it_was_stopped_is_seen(silent_s, violations):
    """M33: L4 looked at members that beat again or died, not at those that were stopped."""
    assert check_records(stopped_after(silent_s)).of("L4").violation_count == violations


def test_the_simulated_canary_sees_two_tensors_in_each_others_place():
    """M17, M47: the stand-in for a forward pass was a plain sum over all weights."""
    weights = {"gate": torch.arange(6.0).reshape(2, 3), "up": torch.arange(6.0, 12.0).reshape(2, 3)}
    swapped = {"gate": weights["up"], "up": weights["gate"]}
    turned = {**weights, "up": weights["up"].flip(0)}
    scores = model_score(weights, [[1, 2, 3]])
    assert scores != model_score(swapped, [[1, 2, 3]])
    assert scores != model_score(turned, [[1, 2, 3]])
    assert scores == model_score(dict(reversed(weights.items())), [[1, 2, 3]])


def test_a_run_that_does_not_end_names_the_rule_that_it_owes():
    """M67: the end of such a run said "convergence", although a liveness rule had long been waiting."""
    assert hunt_mutant(find("M67"), 60.0, shrink_s=0.0).rule == "L1"


def test_a_worker_that_loses_a_group_in_silence_and_lives_is_seen_at_the_end():
    """M29-b: after a clean end the supervisor accounted for every open group, also of the living."""
    fault = Fault(kind="reward_error", target=WORKER, call="score_reward", occurrence=1)
    scenario = Scenario(engines=1, steps=2, staleness_policy="freshest", faults=(fault,))
    parts = Parts(worker=LostWithoutAWord, **STAYING)
    with pytest.raises(InvariantViolation) as caught:
        simulate(scenario, parts=parts, only=frozenset({"S20"}))
    assert caught.value.rule == "S20"


@pytest.mark.parametrize("call", ["generate", "update"])
def test_what_a_worker_had_when_it_died_is_accounted_for(call):
    """The other side of it: what the dead had is the supervisor's to tell."""
    fault = Fault(kind="crash_before", target=WORKER, call="generate", occurrence=9, duration_s=1.0)
    target = dataclasses.replace(fault, target="trainer", call=call) if call == "update" else fault
    outcome = simulate(Scenario(engines=1, steps=3, checkpoint_every_steps=1, faults=(target,))).value
    assert outcome.check.violations == 0


class NeverBegins(RolloutWorker):
    """Says nothing and does nothing."""

    async def run(self):
        while True:
            await asyncio.sleep(60)


def test_a_run_without_faults_that_does_not_end_names_the_rule_that_it_owes():
    """Where nobody wrote a record any more, the end of such a run was a bound of the simulation."""
    scenario, parts = Scenario(engines=1, steps=2), Parts(worker=NeverBegins, **STAYING)
    with pytest.raises(InvariantViolation, match="later"):
        simulate(scenario, parts=parts)
    with pytest.raises(SimulationBoundExceeded):
        simulate(scenario, parts=parts, only=frozenset({"S1"}))
