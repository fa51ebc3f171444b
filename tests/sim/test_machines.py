"""The state machines: nothing to complain of in the protocol and the engine, and planted bugs are found."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.rl_state import RlState
from grpo_lab.sim.parts import Parts
from grpo_lab.testing.machines import CoordinatorMachine, EngineMachine

sys.path.insert(0, str(Path(__file__).parents[1] / "property"))
from planted_coordinators import CountsAttempts, ForgetsToResume

QUICK = settings(
    max_examples=20, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(QUICK, max_examples=1_500, stateful_step_count=40)
SEARCH = settings(QUICK, max_examples=200, phases=(Phase.generate,), report_multiple_bugs=False)


@pytest.mark.parametrize("machine", [CoordinatorMachine, EngineMachine])
def test_nothing_is_broken(machine):
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [CoordinatorMachine, EngineMachine])
def test_nothing_is_broken_in_a_long_search(machine):
    run_state_machine_as_test(machine, settings=LONG)


class TakesAnything(RlState):
    """Finishes an update whatever has come of it."""

    def _incomplete(self, session, sync):
        return ""


class ForgetsHeldRequests(EngineCore):
    """What arrived in a pause is dropped at the resume."""

    async def resume(self, term=0):
        self._held.clear()
        await super().resume(term)


class StaysPaused(EngineCore):
    """A resume that changes nothing."""

    async def resume(self, term=0):
        self.check_alive()


@pytest.mark.parametrize(
    ("machine", "planted"),
    [
        (CoordinatorMachine, Parts(coordinator=CountsAttempts)),
        (CoordinatorMachine, Parts(coordinator=ForgetsToResume)),
        (EngineMachine, Parts(rl=TakesAnything)),
        (EngineMachine, Parts(core=StaysPaused)),
        (EngineMachine, Parts(core=ForgetsHeldRequests)),
    ],
    ids=["counts-attempts", "forgets-to-resume", "takes-anything", "stays-paused", "forgets-held-requests"],
)
def test_planted_bugs_are_found(machine, planted):
    broken = type("Broken", (machine,), {"parts": planted})
    with pytest.raises(Exception) as caught:  # noqa: PT011 - a rule, an assertion, whatever shows it
        run_state_machine_as_test(broken, settings=SEARCH)
    assert not isinstance(caught.value, (AttributeError, NameError, TypeError)), "the machine itself failed"
