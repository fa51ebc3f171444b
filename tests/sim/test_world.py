"""Whole clusters in virtual time: they reach their end, are the same every time, and are really checked."""

import asyncio
import dataclasses
import subprocess
import sys

import pytest

from grpo_lab.errors import InvariantViolation
from grpo_lab.protocol.coordinator import Coordinator
from grpo_lab.sim.scenario import Fault, Scenario
from grpo_lab.sim.tape import Tape, pct_tape, random_tape
from grpo_lab.sim.world import simulate

BUSY = Scenario(engines=2, slots=4, steps=5, max_staleness=2, mean_tokens=12, step_s=0.3, canary=True)


@pytest.mark.parametrize("pause_mode", ["keep", "abort", "wait"])
@pytest.mark.parametrize("policy", ["admission", "drop", "freshest", "window"])
def test_a_quiet_cluster_trains_to_its_end(pause_mode, policy):
    result = simulate(dataclasses.replace(BUSY, pause_mode=pause_mode, staleness_policy=policy))
    outcome = result.value
    assert (outcome.optimizer_steps, outcome.version, outcome.terms) == (5, 5, 1)
    assert outcome.check.violations == 0
    assert 0 < outcome.measures.staleness <= 2
    assert result.leftover_tasks == ()
    assert outcome.marks["sync-under-traffic"] > 0


def test_the_rules_of_a_quiet_run_are_evaluated():
    evaluated = simulate(BUSY).value.check.evaluated
    wanted = (
        "S1 S2 S3 S4 S5 S6 S7 S9 S10 S11 S16 S17 S18 S19 S20 S21 S22 S23 S24 S26 S31 S32 L1 L2 L3 L6 L8 L9"
    )
    assert set(wanted.split()) <= evaluated.keys()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_versions_follow_the_sync_interval(k):
    outcome = simulate(dataclasses.replace(BUSY, steps=6, weight_sync_steps=k)).value
    assert outcome.version == 1 + (6 - 1) // k


def test_a_bound_of_zero_trains_on_nothing_stale():
    outcome = simulate(dataclasses.replace(BUSY, max_staleness=0)).value
    assert outcome.measures.staleness == 0
    assert outcome.optimizer_steps == 5


@pytest.mark.parametrize("tape", [Tape(), random_tape(1, 2000), pct_tape(2)], ids=["fifo", "random", "pct"])
def test_two_runs_are_the_same(tape):
    first, second = simulate(BUSY, tape), simulate(BUSY, tape)
    assert first.digest == second.digest
    replayed = simulate(BUSY, first.tape)  # as it was taken: a plain list of choices
    assert replayed.digest == first.digest


def test_schedules_differ():
    assert simulate(BUSY).digest != simulate(BUSY, random_tape(1, 2000)).digest


def test_the_order_of_hashes_does_not_show():
    program = (
        "from grpo_lab.sim.scenario import *; from grpo_lab.sim.world import simulate;"
        "print(simulate(Scenario(engines=3, steps=3, faults=("
        "Fault('crash_before', 'engine-1', 'update', 2), Fault('crash_after', 'trainer', 'score', 4)),"
        "canary=True)).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


class CommitsWhatFailed(Coordinator):
    """Takes the end of the attempts for their success."""

    async def _transfer(self):
        await super()._transfer()
        return True


def test_a_violation_is_one_plain_exception_and_ends_the_trace():
    faults = tuple(Fault("flip", "engine-0", "bucket", occurrence) for occurrence in range(4, 13))
    records = []
    with pytest.raises(InvariantViolation) as raised:
        simulate(
            dataclasses.replace(BUSY, engines=1, faults=faults, sync_attempts=1),
            coordinator=CommitsWhatFailed,
            records=records,
        )
    error = raised.value
    assert error.rule.startswith("S")
    assert error.__context__ is None
    assert error.__cause__ is None
    assert error.event_ids[-1] == records[-1].id


class GivesUpAfterARestart(Coordinator):
    async def _transfer(self):
        return self._sync.term == 1 and await super()._transfer()


class WaitsAfterARestart(Coordinator):
    async def resume(self):
        if self._sync.term > 1:
            await asyncio.sleep(5_000)
        return await super().resume()


@pytest.mark.parametrize(
    ("coordinator", "rules"),
    [
        (GivesUpAfterARestart, {"convergence"}),
        (WaitsAfterARestart, {"convergence", "L1", "L2", "L3", "L5"}),  # whichever runs out first
    ],
)
def test_who_does_not_converge_when_faults_have_stopped_is_found(coordinator, rules):
    fault = Fault("crash_before", "trainer", "pause", 3)
    with pytest.raises(InvariantViolation) as raised:
        simulate(dataclasses.replace(BUSY, faults=(fault,)), coordinator=coordinator)
    assert raised.value.rule in rules
    assert simulate(dataclasses.replace(BUSY, faults=(fault,))).value.optimizer_steps == BUSY.steps
