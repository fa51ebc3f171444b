"""Engines that restart, at any point of a sync or between two, are taken in again with a full sync."""

from __future__ import annotations

import coordinator_world
import pytest
from coordinator_world import CANARY, Fault, World, make_world, of

from grpo_lab.errors import SyncError
from grpo_lab.events import EngineAdmitted, EngineFenced, VersionCommitted
from grpo_lab.sim.simulation import SimContext, run_twice

CALLS = ("start_id", "pause", "init_transfer", "start_update", "update", "finish_update", "score", "resume")


def run(scenario, **options):
    return coordinator_world.run(scenario, canary=CANARY, **options)


def check_serving(world: World, *names: str) -> None:
    """These serve what is committed; nobody else runs on."""
    fenced = world.coordinator.engines.fenced
    assert [engine.name for engine in world.engines if engine.name not in fenced] == list(names)
    for engine in world.engines:
        if engine.name in names:
            assert not engine.paused
            assert world.holds_current(engine)
            assert engine.identity.startswith(f"t1.v{world.coordinator.committed}.")


async def step_and_sync(world: World):
    world.step()
    return await world.coordinator.sync()


def test_an_engine_that_restarted_between_two_syncs_costs_no_attempt():
    async def scenario(world: World):
        await step_and_sync(world)
        world.engines[1].restart()
        report = await step_and_sync(world)
        assert (report.committed, report.fenced) == (True, ())
        check_serving(world, "engine-0", "engine-1")

    result = run(scenario, engines=2)
    assert [event.attempt for event in of(result, VersionCommitted)] == [1, 1]
    assert of(result, EngineAdmitted)[-1] == EngineAdmitted(
        engine="engine-1", start="start-2", term=1, version=2
    )


def test_a_fenced_engine_comes_back_after_its_restart_and_not_before():
    async def scenario(world: World):
        await step_and_sync(world)
        world.engines[0].faults.append(Fault("finish_update", "refuse", 99))
        report = await step_and_sync(world)
        assert report.fenced == ("engine-0",)
        world.engines[0].faults.clear()  # healthy again, but nobody knows what it holds
        report = await step_and_sync(world)
        assert report.fenced == ("engine-0",)
        check_serving(world, "engine-1")
        world.engines[0].restart()
        report = await step_and_sync(world)
        assert report.fenced == ()
        check_serving(world, "engine-0", "engine-1")

    result = run(scenario, engines=2)
    assert [event.members for event in of(result, VersionCommitted)] == [
        ("engine-0", "engine-1"),
        ("engine-1",),
        ("engine-1",),
        ("engine-0", "engine-1"),
    ]


def test_an_engine_that_was_not_there_at_first_is_taken_in_when_it_comes():
    async def scenario(world: World):
        check_serving(world, "engine-1")
        await step_and_sync(world)
        world.engines[0].faults.clear()
        await step_and_sync(world)
        check_serving(world, "engine-0", "engine-1")

    async def main(context: SimContext):
        world = make_world(context, engines=2)
        world.engines[0].faults.append(Fault("health", "die"))
        await world.coordinator.connect(term=1, base_version=0)
        await step_and_sync(world)
        world.engines[0].restart()
        await scenario_of_the_rest(world)

    async def scenario_of_the_rest(world: World):
        await step_and_sync(world)
        check_serving(world, "engine-0", "engine-1")

    result = run_twice(main)
    assert [event.engine for event in of(result, EngineFenced)] == ["engine-0"]


@pytest.mark.parametrize("kind", ["restart", "restart_after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_restart_at_any_point_of_a_sync_ends_in_service(call, kind):
    async def scenario(world: World):
        await step_and_sync(world)
        world.engines[1].faults.append(Fault(call, kind))
        await step_and_sync(world)
        world.engines[1].faults.clear()
        await step_and_sync(world)
        check_serving(world, "engine-0", "engine-1")
        assert world.coordinator.committed == 3

    result = run(scenario, engines=2)
    assert not _served_uncommitted(result.records)


def _served_uncommitted(records) -> list[str]:
    """Engines that held a version, unpaused, before its commit."""
    wrong, paused, holds, committed = [], set(), {}, 0
    for record in records:
        event = record.event
        if event.kind == "engine_paused":
            paused.add(event.engine)
        elif event.kind == "engine_resumed":
            paused.discard(event.engine)
        elif event.kind == "weights_activated":
            holds[event.engine] = event.version
            if event.engine not in paused and event.version > committed:
                wrong.append(event.engine)
        elif event.kind == "version_committed":
            committed = event.version
    return wrong


def test_who_restarts_in_mid_sync_is_paused_again_before_it_loads():
    async def scenario(world: World):
        await step_and_sync(world)
        world.engines[1].calls.clear()
        world.engines[1].faults.append(Fault("start_update", "restart"))
        report = await step_and_sync(world)
        assert report.fenced == ()
        calls = [
            call for call in world.engines[1].calls if call in ("pause", "init_transfer", "finish_update")
        ]
        assert calls == ["pause", "init_transfer", "pause", "finish_update"]
        check_serving(world, "engine-0", "engine-1")

    run(scenario, engines=2)


def test_a_newcomer_of_a_sync_that_is_given_up_waits_for_the_next_one():
    """It holds nothing, so it must not be resumed; and it needs no second restart."""

    async def scenario(world: World):
        await step_and_sync(world)
        world.engines[1].restart()
        world.engines[0].faults.append(Fault("update", "refuse", 99))
        world.engines[1].faults.append(Fault("update", "refuse", 99))
        report = await step_and_sync(world)
        assert (report.committed, report.fenced) == (False, ("engine-1",))
        assert world.engines[1].paused
        for engine in world.engines:
            engine.faults.clear()
        report = await step_and_sync(world)
        assert (report.committed, report.fenced) == (True, ())
        check_serving(world, "engine-0", "engine-1")

    run(scenario, engines=2, attempts=1)


def test_the_only_engine_may_restart_and_fail_a_sync():
    async def scenario(world: World):
        await step_and_sync(world)
        world.engines[0].restart()
        world.engines[0].faults.append(Fault("update", "refuse"))
        report = await step_and_sync(world)
        assert (report.committed, report.fenced) == (False, ("engine-0",))
        report = await step_and_sync(world)
        assert report.committed
        check_serving(world, "engine-0")

    run(scenario, engines=1, attempts=1)


def test_the_only_engine_that_is_gone_for_good_ends_the_run():
    async def scenario(world: World):
        await step_and_sync(world)
        world.engines[0].alive = False
        with pytest.raises(SyncError, match="0 engines are left"):
            await step_and_sync(world)

    run(scenario, engines=1)


def test_an_engine_that_cannot_say_its_start_stays_fenced():
    """A stock server: who cannot tell a restart from a pause in its answers is not trusted again."""

    async def scenario(world: World):
        async def start_id():
            return ""

        world.engines[0].start_id = start_id
        await step_and_sync(world)
        await step_and_sync(world)
        world.engines[0].faults.append(Fault("finish_update", "refuse", 99))
        await step_and_sync(world)
        world.engines[0].restart()
        report = await step_and_sync(world)
        assert report.fenced == ("engine-0",)

    async def main(context: SimContext):
        world = make_world(context, engines=2)

        async def start_id():
            return ""

        world.engines[0].start_id = start_id
        await world.coordinator.connect(term=1, base_version=0)
        await scenario(world)

    run_twice(main)
