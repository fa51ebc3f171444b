"""The coordinator under other orders of events than first in, first out: random, PCT, and exhaustive."""

import pytest
from coordinator_world import Fault, make_world

from grpo_lab.errors import SyncError
from grpo_lab.sim import explore, pct_tape, random_tape, shrink
from grpo_lab.sim.simulation import run_simulation
from grpo_lab.types import SyncId

CALLS = ["pause", "start_update", "update", "finish_update", "resume", "init_transfer", "health"]
KINDS = ["refuse", "die", "lose_reply", "hang"]
SYNCS = 3


def simulate(engines, faults, tape, planted=None):
    """Three syncs with ``faults`` [(engine, call, kind, times)] in the second; returns what it came to."""

    async def main(context):
        world = make_world(context, engines=engines)
        if planted is not None:
            planted(world)
        await world.coordinator.connect(term=1, base_version=0)
        versions = []
        for number in range(SYNCS):
            if number == 1:
                for index, call, kind, times in faults:
                    world.engines[index].faults.append(Fault(call, kind, times))
            world.step()
            try:
                report = await world.coordinator.sync()
            except SyncError:
                check_rest(world)
                return (*versions, "failed")
            finally:
                for engine in world.engines:
                    engine.faults.clear()
            check_rest(world)
            assert report.version == world.coordinator.committed
            versions.append(report.version)
        await world.coordinator.close()
        return tuple(versions)

    result = run_simulation(main, tape, max_virtual_s=3600)
    check_trace(result.records)
    return result.value


def check_rest(world):
    """Between two syncs: nobody is paused unless fenced, and all who serve hold the committed version."""
    coordinator = world.coordinator
    for engine in world.engines:
        if engine.name in coordinator.engines.fenced:
            continue
        assert not engine.paused, f"{engine.name} was left paused"
        held = SyncId.parse(engine.identity).version if engine.identity != "default" else 0
        assert held == coordinator.committed, (
            f"{engine.name} serves version {held}, committed is {coordinator.committed}"
        )
        if world.holds_current(engine):
            continue
        assert coordinator.committed < coordinator._sync.version, f"{engine.name} serves torn weights"


def check_trace(records):
    """The committed version rises by one, and only when every member of the view has proved that attempt."""
    committed, proofs, serving = 0, set(), {}
    for record in records:
        event = record.event
        if event.kind == "engine_proved" and event.outcome != "fails":
            proofs.add((event.engine, event.version, event.attempt))
        elif event.kind == "version_committed":
            assert event.version == committed + 1, f"{committed} -> {event.version}"
            committed = event.version
            for member in event.members:
                assert (member, event.version, event.attempt) in proofs, f"{member} never proved it"
        elif event.kind == "weights_activated":
            serving[event.engine] = event.version
        elif event.kind == "engine_resumed":
            assert serving.get(event.engine, 0) == committed, "resumed on another version than the committed"


def one_fault(engines):
    return [
        [(index, call, kind, times)]
        for index in range(engines)
        for call in CALLS
        for kind in KINDS
        for times in (1, 99)
        if not (kind == "die" and times == 99)
    ]


@pytest.mark.parametrize("engines", [1, 2])
def test_one_fault_at_each_call_first_in_first_out(engines):
    outcomes = {simulate(engines, faults, None) for faults in one_fault(engines)}
    assert (1, 2, 3) in outcomes, "most faults are survived"
    assert (1, 1, 2) in outcomes, "some syncs are given up, and the next one carries the next version"
    if engines == 1:
        assert (1, "failed") in outcomes, "without an engine the run ends"


@pytest.mark.parametrize(
    "make", [random_tape, lambda seed, n: pct_tape(seed, steps=n)], ids=["random", "pct"]
)
def test_two_faults_in_any_order(make):
    faults = one_fault(2)
    outcomes = set()
    for seed in range(120):
        pair = [*faults[(7 * seed) % len(faults)], *faults[(13 * seed + 5) % len(faults)]]
        outcomes.add(simulate(2, pair, make(seed, 300)))
    assert len(outcomes) >= 3


@pytest.mark.parametrize("call", ["pause", "update", "finish_update", "resume"])
@pytest.mark.parametrize("kind", ["die", "lose_reply"])
def test_every_schedule_of_a_small_scope(call, kind):
    """Two engines, one fault: all orders of the first decisions."""
    found = explore(lambda tape: simulate(2, [(1, call, kind, 1)], tape), depth=8, max_runs=100)
    assert not found.failures, f"{found.failures[0].tape}: {found.failures[0].error}"


# -- planted bugs --------------------------------------------------------------------------------------


def forgets_to_resume(world):
    actions = world.coordinator._actions
    resume = actions.resume

    async def all_but_the_last(sync):
        last = world.engines[-1]
        keep, last.resume = last.resume, _nothing
        await resume(sync)
        last.resume = keep

    actions.resume = all_but_the_last


async def _nothing(*_):
    return None


def commits_without_proof(world):
    delivery = world.coordinator._delivery

    async def finish(sync):
        await world.coordinator.engines.each("finish", lambda engine: engine.finish_update(sync), 5, sync)
        delivery.loaded = delivery.proved = set(world.coordinator.engines.names)
        return []

    async def prove(sync):
        return []

    delivery._finish, delivery._prove = finish, prove


def never_fences(world):
    world.coordinator.engines.fence = lambda *_: None


def counts_every_attempt(world):
    coordinator = world.coordinator
    transfer = coordinator._transfer

    async def transfer_or_not():
        await transfer()
        return True

    coordinator._transfer = transfer_or_not


@pytest.mark.parametrize(
    ("planted", "faults"),
    [
        (forgets_to_resume, []),
        (commits_without_proof, []),
        (never_fences, [(1, "finish_update", "refuse", 99)]),
        (counts_every_attempt, [(0, "update", "refuse", 99), (1, "update", "refuse", 99)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_bugs_are_found_and_shrink_to_a_short_tape(planted, faults):
    def fails(tape):
        try:
            simulate(2, faults, tape, planted)
        except AssertionError:
            return True
        return False

    failing = next(tape for tape in (random_tape(seed, 100) for seed in range(20)) if fails(tape))
    assert len(shrink(failing, fails, max_runs=60).choices) < 100
