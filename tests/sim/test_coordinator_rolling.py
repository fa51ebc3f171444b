"""Scope ``rolling``: one engine after another is paused and gets the weights, while the others generate."""

from __future__ import annotations

import asyncio

import pytest
from coordinator_world import Fault, World, make_world, of, run

from grpo_lab.errors import ConfigError, SyncError
from grpo_lab.events import (
    EngineFenced,
    EnginePaused,
    EngineResumed,
    StateChanged,
    SyncAborted,
    SyncBegan,
    SyncEnded,
    VersionCommitted,
    WeightsActivated,
    WeightsPublished,
)
from grpo_lab.protocol.coordinator import SyncSettings
from grpo_lab.sim.simulation import SimContext, run_simulation
from grpo_lab.types import SyncState

ALL = ("engine-0", "engine-1", "engine-2")


def rolled(scenario, **options):
    """The first sync, which nobody can take in turns, comes before ``scenario``."""

    async def whole(world: World) -> None:
        assert (await world.coordinator.sync()).version == 1
        world.step()
        await scenario(world)

    return run(whole, scope="rolling", **options)


def in_version(result, kind, version):
    """The names of the engines of the events of one kind, from the beginning of that version's last sync."""
    records = result.records
    begin = max(
        index
        for index, record in enumerate(records)
        if isinstance(record.event, SyncBegan) and record.event.version == version
    )
    return [record.event.engine for record in records[begin:] if isinstance(record.event, kind)]


def test_engines_take_turns_and_the_version_moves_when_all_have_had_theirs():
    async def scenario(world: World):
        report = await world.coordinator.sync()
        assert (report.version, report.committed, report.fenced) == (2, True, ())
        assert all(world.holds_current(engine) for engine in world.engines)
        assert not any(engine.paused for engine in world.engines)

    result = rolled(scenario)
    turns = [
        (type(record.event).__name__, record.event.engine)
        for record in result.records
        if isinstance(record.event, (EnginePaused, WeightsActivated, EngineResumed))
    ][9:]
    steps = ("EnginePaused", "WeightsActivated", "EngineResumed")
    assert turns[:8] == [(step, engine) for engine in ALL for step in steps][:8]
    assert sorted(turns[8:]) == [("EngineResumed", engine) for engine in ALL]  # the last, and all again
    first, second = of(result, VersionCommitted)
    assert (first.members, second.members) == (ALL, ALL)
    assert [event.attempt for event in of(result, WeightsPublished)] == [1, 1, 2, 3]
    kinds = [record.event.kind for record in result.records]
    last_switch = max(index for index, kind in enumerate(kinds) if kind == "weights_activated")
    assert last_switch < max(index for index, kind in enumerate(kinds) if kind == "version_committed")


def test_the_first_sync_of_a_term_pauses_all_at_once():
    """Nobody holds anything yet that could be served while the others have their turn."""

    async def scenario(world: World):
        await world.coordinator.sync()

    result = run(scenario, scope="rolling")
    assert len(of(result, WeightsPublished)) == 1
    states = [event.after for event in of(result, StateChanged)]
    assert states.count("pausing") == 1


def test_who_has_restarted_gets_the_weights_in_the_first_turn():
    async def scenario(world: World):
        world.engines[2].restart()
        await world.coordinator.sync()
        assert all(world.holds_current(engine) for engine in world.engines)

    assert in_version(rolled(scenario), WeightsActivated, 2) == ["engine-2", "engine-0", "engine-1"]


def test_phases_are_those_of_all_turns():
    async def scenario(world: World):
        await world.coordinator.sync()

    first, second = (event.phases_s for event in of(rolled(scenario), SyncEnded))
    assert second["pause"] == pytest.approx(3 * first["pause"])
    assert second["resume"] == pytest.approx(3 * first["resume"])


@pytest.mark.parametrize("call", ["pause", "init_transfer", "start_update", "update", "finish_update"])
@pytest.mark.parametrize("kind", ["die", "refuse"])
@pytest.mark.parametrize("index", [1, 2])
def test_who_fails_when_others_hold_the_version_is_fenced_and_the_rest_goes_on(call, kind, index):
    async def scenario(world: World):
        world.engines[index].faults.append(Fault(call, kind, times=99))
        report = await world.coordinator.sync()
        assert (report.version, report.committed) == (2, True)
        assert report.fenced == (f"engine-{index}",)
        others = [engine for engine in world.engines if engine is not world.engines[index]]
        assert all(world.holds_current(engine) and not engine.paused for engine in others)

    result = rolled(scenario)
    *_, committed = of(result, VersionCommitted)
    assert committed.members == tuple(name for name in ALL if name != f"engine-{index}")


def test_a_dead_engine_misses_its_turn():
    async def scenario(world: World):
        world.engines[0].alive = False
        report = await world.coordinator.sync()
        assert (report.committed, report.fenced) == (True, ("engine-0",))

    assert in_version(rolled(scenario), WeightsActivated, 2) == ["engine-1", "engine-2"]


def test_a_sync_whose_first_turn_cannot_be_paused_leaves_everybody_on_the_previous_version():
    async def scenario(world: World):
        world.engines[0].faults.append(Fault("pause", "refuse"))
        report = await world.coordinator.sync()
        assert (report.version, report.committed, report.fenced) == (1, False, ())
        assert not any(engine.paused for engine in world.engines)
        assert (await world.coordinator.sync()).version == 2
        assert all(world.holds_current(engine) for engine in world.engines)

    rolled(scenario)


def test_when_too_few_are_left_who_is_ahead_is_fenced_and_stopped():
    """Nobody but the trainer can tell that what they generate was never committed."""

    async def scenario(world: World):
        world.engines[2].faults.append(Fault("update", "refuse", times=99))
        with pytest.raises(SyncError, match="engines are left, min_engines is 3"):
            await world.coordinator.sync()
        assert [engine.paused for engine in world.engines] == [True, True, False]
        assert world.coordinator.committed == 1
        assert set(world.coordinator.engines.fenced) == {"engine-0", "engine-1"}
        assert not world.holds_current(world.engines[2])

    result = rolled(scenario, min_engines=3)
    assert len(of(result, VersionCommitted)) == 1
    assert in_version(result, EngineFenced, 2) == ["engine-0", "engine-1"]
    assert in_version(result, EnginePaused, 2) == [*ALL, "engine-0", "engine-1"]
    *_, given_up = of(result, SyncAborted)
    assert given_up.final


def test_an_engine_of_the_first_turn_that_cannot_join_is_fenced_and_the_rest_goes_on():
    async def scenario(world: World):
        world.engines[0].faults.append(Fault("init_transfer", "refuse", times=99))
        report = await world.coordinator.sync()
        assert (report.version, report.committed, report.fenced) == (2, True, ("engine-0",))

    rolled(scenario)


def test_who_has_restarted_and_is_ahead_is_stopped_too():
    async def scenario(world: World):
        world.engines[2].restart()
        world.engines[0].faults.append(Fault("update", "refuse", times=99))
        with pytest.raises(SyncError, match="engines are left, min_engines is 3"):
            await world.coordinator.sync()
        assert [engine.paused for engine in world.engines] == [False, False, True]
        assert set(world.coordinator.engines.fenced) == {"engine-2"}

    assert in_version(rolled(scenario, min_engines=3), WeightsActivated, 2) == ["engine-2"]


@pytest.mark.parametrize("kind", ["lose_reply", "hang"])
def test_who_was_asked_to_go_on_and_did_not_answer_is_stopped_when_there_is_no_commit(kind):
    async def scenario(world: World):
        world.engines[0].faults.append(Fault("resume", kind))
        with pytest.raises(SyncError, match="engines are left, min_engines is 3"):
            await world.coordinator.sync()
        assert [engine.paused for engine in world.engines] == [True, False, False]

    assert in_version(rolled(scenario, min_engines=3), EnginePaused, 2) == ["engine-0", "engine-0"]


def test_a_sync_that_is_interrupted_in_a_later_turn_leaves_nobody_ahead_in_service():
    async def main(context: SimContext):
        world = make_world(context, scope="rolling")
        await world.coordinator.connect(term=1, base_version=0)
        await world.coordinator.sync()
        world.step()
        world.engines[1].faults.append(Fault("update", "hang"))
        under_way = asyncio.ensure_future(world.coordinator.sync())
        while not world.engines[1].paused:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way
        assert set(world.coordinator.engines.fenced) == {"engine-0"}
        assert [engine.paused for engine in world.engines] == [True, False, False]
        assert world.coordinator.state is SyncState.RUNNING
        await world.coordinator.close()

    run_simulation(main)


def test_another_scope_is_refused():
    with pytest.raises(ConfigError, match="expected global or rolling"):
        SyncSettings(scope="some")  # type: ignore[arg-type]


def test_who_was_paused_too_late_is_resumed_at_the_end():
    """S32: a pause that was given up in an earlier sync came after the turn of its engine."""

    async def scenario(world: World):
        async def pauses_late() -> None:
            while not world.engines[1].paused:
                await asyncio.sleep(0.005)
            world.engines[0].paused = True

        late = asyncio.ensure_future(pauses_late())
        await world.coordinator.sync()
        await late
        assert not any(engine.paused for engine in world.engines)

    rolled(scenario)
