"""A whole cluster in virtual time: engines, rollout worker, trainer, network, faults, and the checker.

>>> from grpo_lab.sim.scenario import Scenario
>>> result = simulate(Scenario(engines=2, steps=3))
>>> result.value.version, result.value.check.violations
(3, 0)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from grpo_lab.check import Checker, Violation, check_records
from grpo_lab.errors import InvariantViolation, SimulationBoundExceeded
from grpo_lab.events import Reached, Record
from grpo_lab.protocol.coordinator import Coordinator
from grpo_lab.sim.cluster import ENDLESS, Cluster, Outcome
from grpo_lab.sim.declaration import horizon_s
from grpo_lab.sim.light_trainer import CoordinatorType
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import Scenario
from grpo_lab.sim.simulation import SimContext, SimResult, run_simulation
from grpo_lab.sim.tape import Tape
from grpo_lab.sim.watch import Watch

MAX_CALLBACKS = 5_000_000


class RunBroken(Exception):
    """Ends a simulation at the record that broke a rule. Internal: ``simulate`` raises what it stands for."""


def simulate(
    scenario: Scenario,
    tape: Tape | None = None,
    *,
    coordinator: CoordinatorType = Coordinator,
    parts: Parts | None = None,
    only: frozenset[str] | None = None,
    passed_over: dict[str, int] | None = None,
    records: list[Record] | None = None,
    checked: bool = True,
) -> SimResult[Outcome]:
    """Runs the scenario to its last optimizer step, every record checked as it is written.

    ``parts`` gives other classes for any part of the cluster (and its own coordinator); ``only`` names the
    rules that stop the run, where others are to be ``passed_over``, which counts them. ``records`` may be
    given to see the trace of a run that raised; it ends with the violation. ``checked=False`` judges nothing
    and makes no digest, which is for measuring speed.

    Raises:
        InvariantViolation: the first one, with the record's place as its last event id; rule
            ``convergence`` when the run did not end in time although no fault struck any more.
        SimulationError: a deadlock, a livelock, an escape; a run without faults that does not end breaks the
            rule that it owes, and only if it owes none its bound is exceeded.
    """
    records = [] if records is None else records
    seen = {} if passed_over is None else passed_over
    watch = Watch(records, only=only, passed_over=seen, checker=Checker() if checked else Checker(()))
    parts = Parts(coordinator=coordinator) if parts is None else parts

    clocks: list[Callable[[], float]] = []

    async def main(context: SimContext) -> Outcome:
        clocks.append(context.loop.time)
        return await _watched(Cluster(context, scenario, watch, parts), watch)

    result: SimResult[Outcome] | None = None
    endless: SimulationBoundExceeded | None = None
    try:
        result = run_simulation(
            main,
            tape,
            scenario.seed,
            max_virtual_s=horizon_s(scenario),
            max_callbacks=MAX_CALLBACKS,
            records=records,
            with_digest=checked,
        )
    except RunBroken:
        result = None
    except SimulationBoundExceeded as error:
        endless = error
    if endless is not None:
        owed = _owed(records, clocks[0](), watch) if checked else None
        raise endless if owed is None else violation_error(owed)
    if result is None:
        assert watch.violation is not None
        raise violation_error(watch.violation)
    return result


def _owed(records: list[Record], now_s: float, watch: Watch) -> Violation | None:
    """What a run that would not end has left undone. Judged anew: cleaning up wrote records of its own."""
    at_last = Record(now_s, "run", len(records), (), Reached(mark=ENDLESS))
    found = [item for rule in check_records([*records, at_last]).rules for item in rule.violations]
    watch.violation = None
    for violation in sorted(found, key=lambda item: item.t):
        watch.judge(violation)
    return watch.violation


def violation_error(violation: Violation) -> InvariantViolation:
    message = f"{violation.rule}: {violation.message} (at virtual second {violation.t:.6g})"
    return InvariantViolation(message, violation.rule, violation.event_ids)


async def _watched(cluster: Cluster, watch: Watch) -> Outcome:
    run = asyncio.get_running_loop().create_task(cluster.run(), name="run")
    run.add_done_callback(lambda _: watch.stop.set())
    await watch.stop.wait()
    if watch.violation is None and run.done():
        outcome = run.result()
        if watch.violation is None:
            return outcome
    raise RunBroken
