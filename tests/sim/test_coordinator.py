"""The coordinator, unmodified, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from coordinator_world import CANARY, LIMITS, Fault, World, make_world, of, run

from grpo_lab.errors import HandshakeError, SyncError
from grpo_lab.events import (
    EngineFenced,
    EngineProved,
    HandshakeCompared,
    StateChanged,
    SyncEnded,
    VersionCommitted,
    WeightsPublished,
)
from grpo_lab.sim.simulation import SimContext, run_simulation, run_twice
from grpo_lab.types import SyncState


async def flip_once(member, bucket, transport):
    """The second bucket of engine-1's first attempt arrives damaged."""
    if member == "engine-1" and bucket.index == 1 and not getattr(transport, "flipped", False):
        transport.flipped = True
        bucket.memory[0] ^= 1
    return [bucket]


def test_three_engines_one_damaged_bucket_one_retry():
    async def scenario(world: World):
        report = await world.coordinator.sync()
        assert report.committed
        assert report.version == 1
        assert all(world.holds_current(engine) for engine in world.engines)
        assert not any(engine.paused for engine in world.engines)

    result = run(scenario, carry=flip_once)
    (committed,) = of(result, VersionCommitted)
    assert (committed.version, committed.attempt) == (1, 2)
    assert committed.members == ("engine-0", "engine-1", "engine-2")
    assert [event.nbytes for event in of(result, SyncEnded)] == [
        sum(of(result, WeightsPublished)[0].bucket_nbytes)
    ]
    assert [event.accepted for event in _received(result, "engine-1", attempt=1)].count(False) == 1


def test_every_bucket_is_gathered_before_it_is_packed():
    async def scenario(world: World):
        await world.coordinator.sync()

    kinds = ("gather_began", "gather_ended", "bucket_pack_began", "bucket_packed")
    made = [
        (record.event.kind, record.event.bucket)
        for record in run(scenario).records
        if record.event.kind in kinds
    ]
    assert made == [(kind, bucket) for bucket in range(len(made) // 4) for kind in kinds]
    assert len(made) >= 8


def _received(result, engine, attempt):
    return [
        record.event
        for record in result.records
        if record.event.kind == "bucket_received"
        and record.event.engine == engine
        and record.event.attempt == attempt
    ]


def test_states_follow_the_order_of_a_clean_sync():
    async def scenario(world: World):
        await world.coordinator.sync()

    after = [event.after for event in of(run(scenario), StateChanged)]
    assert after == [
        "running",
        "pausing",
        "paused",
        "transferring",
        "loaded",
        "resuming",
        "running",
        "disconnected",
    ]


def test_phases_are_measured():
    async def scenario(world: World):
        await world.coordinator.sync()

    (ended,) = of(run(scenario), SyncEnded)
    assert {"pause", "gather", "pack", "wire", "verify", "load", "resume", "total"} <= set(ended.phases_s)
    assert ended.phases_s["total"] >= ended.phases_s["pause"] + ended.phases_s["resume"] > 0


def test_a_probation_is_no_time_without_a_name():
    def unnamed_s(canary):
        async def scenario(world: World):
            for engine in world.engines:
                engine.capabilities = replace(engine.capabilities, score_while_paused=False)
            await world.coordinator.sync()

        (ended,) = of(run(scenario, canary=canary), SyncEnded)
        return 2 * ended.phases_s["total"] - sum(ended.phases_s.values())

    assert unnamed_s(CANARY) == pytest.approx(unnamed_s(None), abs=1e-6)


@pytest.mark.parametrize("call", ["pause", "start_update", "update", "finish_update", "resume"])
def test_a_dead_engine_is_fenced_and_the_rest_commits(call):
    async def scenario(world: World):
        world.engines[1].faults.append(Fault(call, "die"))
        report = await world.coordinator.sync()
        assert report.committed
        assert world.coordinator.engines.names == ("engine-0", "engine-2")
        for index in (0, 2):
            assert world.holds_current(world.engines[index])
            assert not world.engines[index].paused
        world.step()
        assert (await world.coordinator.sync()).version == 2

    result = run(scenario)
    assert [event.engine for event in of(result, EngineFenced)] == ["engine-1"]


@pytest.mark.parametrize("call", ["start_update", "update", "finish_update"])
def test_an_engine_that_always_refuses_does_not_keep_the_others_from_the_version(call):
    async def scenario(world: World):
        world.engines[1].faults.append(Fault(call, "refuse", times=99))
        report = await world.coordinator.sync()
        assert report.committed
        assert world.coordinator.engines.names == ("engine-0", "engine-2")
        assert all(world.holds_current(world.engines[index]) for index in (0, 2))
        assert not any(world.engines[index].paused for index in (0, 2))

    run(scenario)


@pytest.mark.parametrize("call", ["pause", "start_update", "update"])
def test_when_everybody_refuses_all_run_on_with_the_previous_version(call):
    async def scenario(world: World):
        assert (await world.coordinator.sync()).committed
        world.step()
        for engine in world.engines:
            engine.faults.append(Fault(call, "refuse", times=99))
        report = await world.coordinator.sync()
        assert (report.committed, report.version) == (False, 1)
        assert not any(engine.paused for engine in world.engines)
        assert all(engine.identity.startswith("t1.v1") for engine in world.engines)
        for engine in world.engines:
            engine.faults.clear()
        report = await world.coordinator.sync()
        assert (report.committed, report.version) == (True, 2)
        assert all(world.holds_current(engine) for engine in world.engines)

    run(scenario)


def test_a_lost_reply_to_finish_is_settled_by_what_the_engine_holds():
    async def scenario(world: World):
        world.engines[2].faults.append(Fault("finish_update", "lose_reply"))
        report = await world.coordinator.sync()
        assert (report.committed, report.version) == (True, 1)
        assert world.engines[2].calls.count("finish_update") == 1

    result = run(scenario)
    assert [event.attempt for event in of(result, VersionCommitted)] == [1]


def test_a_hanging_engine_is_bounded():
    async def scenario(world: World):
        world.engines[0].faults.append(Fault("update", "hang", times=99))
        await world.coordinator.sync()

    result = run(scenario)
    assert result.virtual_s < 60


def test_too_few_engines_end_the_run_with_the_reason_of_each():
    async def scenario(world: World):
        for engine in world.engines:
            engine.faults.append(Fault("update", "die"))
        with pytest.raises(SyncError, match="engine-0: dead"):
            await world.coordinator.sync()
        assert world.coordinator.state is SyncState.FENCED

    result = run(scenario, min_engines=2)
    assert not of(result, VersionCommitted)


def test_cancellation_in_the_middle_leaves_nobody_paused():
    async def scenario(world: World):
        world.engines[0].faults.append(Fault("update", "hang"))
        task = asyncio.create_task(world.coordinator.sync(), name="sync")
        await asyncio.sleep(1.0)
        assert all(engine.paused for engine in world.engines)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(engine.paused for engine in world.engines)
        assert world.coordinator.committed == 0

    run(scenario)


def test_the_canary_holds_and_sees_an_engine_that_loaded_nothing():
    async def scenario(world: World):
        await world.coordinator.sync()
        world.step()
        await world.coordinator.sync()
        world.step()
        forgetful = world.engines[1]
        stale = {name: tensor.clone() for name, tensor in forgetful.weights.items()}
        finish = forgetful.finish_update

        async def finish_without_loading(sync):
            await finish(sync)
            forgetful.weights = stale

        forgetful.finish_update = finish_without_loading
        report = await world.coordinator.sync()
        assert report.committed
        assert "engine-1" not in world.coordinator.engines.names

    result = run(scenario, canary=CANARY)
    outcomes = [event.outcome for event in of(result, EngineProved) if event.proof == "canary"]
    assert outcomes[:6] == ["inconclusive"] * 3 + ["holds"] * 3
    assert "fails" in outcomes


def test_a_second_sync_at_once_is_refused():
    async def scenario(world: World):
        first = asyncio.create_task(world.coordinator.sync(), name="first")
        await asyncio.sleep(0.005)
        with pytest.raises(SyncError, match="one sync at a time"):
            await world.coordinator.sync()
        assert (await first).version == 1

    run(scenario)


def test_versions_continue_after_a_new_term():
    async def scenario(world: World):
        await world.coordinator.sync()
        await world.coordinator.close()
        await world.coordinator.connect(term=2, base_version=1)
        assert (await world.coordinator.sync()).version == 2
        assert world.engines[0].identity == "t2.v2.a1"

    run(scenario)


def test_engines_that_still_start_are_waited_for():
    async def main(context: SimContext):
        world = make_world(context, engines=1)
        world.engines[0].alive = False
        asyncio.get_running_loop().call_later(3.0, setattr, world.engines[0], "alive", True)
        await world.coordinator.connect(term=1, base_version=0)
        assert 3.0 <= context.now_s < 4.0

    run_simulation(main)


def test_an_engine_whose_finish_is_in_doubt_is_fenced_by_an_abort():
    """Applied, but neither the reply nor what it holds can be had: it must not serve the version."""

    async def scenario(world: World):
        await world.coordinator.sync()
        world.step()
        for engine in world.engines:
            engine.faults.append(Fault("start_update", "refuse", times=99))
        doubtful = world.engines[1]
        doubtful.faults[:] = [
            Fault("finish_update", "lose_reply", times=99),
            Fault("weight_info", "refuse", times=99),
        ]
        for engine in (world.engines[0], world.engines[2]):
            engine.faults[:] = [Fault("finish_update", "refuse", times=99)]
        report = await world.coordinator.sync()
        assert not report.committed
        assert "engine-1" in world.coordinator.engines.fenced
        assert doubtful.identity.startswith("t1.v2")
        assert doubtful.paused

    run(scenario, attempts=1)


def test_an_attempt_number_is_never_used_for_other_weights():
    async def scenario(world: World):
        for engine in world.engines:
            engine.faults.append(Fault("update", "refuse", times=99))
        assert not (await world.coordinator.sync()).committed
        world.step()
        for engine in world.engines:
            engine.faults.clear()
        assert (await world.coordinator.sync()).version == 1
        assert all(world.holds_current(engine) for engine in world.engines)

    (committed,) = of(run(scenario), VersionCommitted)
    assert committed.attempt > 3


def test_a_fenced_engine_that_lives_on_costs_the_next_sync_nothing():
    """The transport waits for each of its members: it must not wait for one that is asked for nothing."""

    async def scenario(world: World):
        await world.coordinator.sync()
        world.engines[1].faults.append(Fault("finish_update", "refuse", times=99))
        assert (await world.coordinator.sync()).committed
        assert list(world.coordinator.engines.fenced) == ["engine-1"]
        began_s = world.context.now_s
        assert (await world.coordinator.sync()).committed
        assert world.context.now_s - began_s < 1

    (*_, last) = of(run(scenario, attempts=1), VersionCommitted)
    assert (last.version, last.attempt) == (3, 1)


def test_an_engine_that_cannot_join_again_does_not_keep_the_others_from_the_version():
    async def scenario(world: World):
        await world.coordinator.sync()
        world.engines[2].faults += [
            Fault("update", "refuse", times=1),
            Fault("init_transfer", "refuse", times=99),
        ]
        report = await world.coordinator.sync()
        assert (report.version, report.committed) == (2, True)
        assert "could not join" in world.coordinator.engines.fenced["engine-2"]

    run(scenario)


@pytest.mark.parametrize("attempts", [1, 2])
def test_after_a_sync_that_failed_the_first_attempt_of_the_next_one_can_succeed(attempts):
    async def scenario(world: World):
        for engine in world.engines:
            engine.faults.append(Fault("update", "refuse", times=attempts))
        assert not (await world.coordinator.sync()).committed
        assert (await world.coordinator.sync()).committed

    (committed,) = of(run(scenario, attempts=attempts), VersionCommitted)
    assert committed.attempt == attempts + 1


def test_the_handshake_compares_with_what_the_engine_says_it_found():
    async def main(context: SimContext):
        world = make_world(context, engines=2)
        await world.coordinator.connect(term=1, base_version=0)
        world.engines[1].claims = "another plan"
        with pytest.raises(HandshakeError, match="engine-1 joined with plan another plan"):
            await world.coordinator.connect(term=2, base_version=0)
        await world.coordinator.close()

    compared = of(run_twice(main), HandshakeCompared)
    assert [event.difference == "" for event in compared] == [True, True, True, False]
    assert compared[0].theirs == compared[0].ours != compared[3].theirs == "another plan"


@pytest.mark.parametrize("call", ["pause", "update", "finish_update", "score", "init_transfer", "resume"])
def test_a_sync_ends_within_its_bound_whatever_hangs(call):
    async def scenario(world: World):
        await world.coordinator.sync()
        for engine in world.engines:
            engine.faults += [Fault(call, "hang", times=99), Fault("abandon_update", "hang", times=99)]
            engine.faults += [Fault("update", "refuse", times=1)] if call == "init_transfer" else []
        began_s = world.context.now_s
        with contextlib.suppress(SyncError):
            await world.coordinator.sync()
        assert world.context.now_s - began_s < LIMITS.sync_s(attempts=3)

    run(scenario, engines=4, canary=CANARY)
