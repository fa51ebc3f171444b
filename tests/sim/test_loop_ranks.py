"""In-process ranks: agreement, bounds, broken groups."""

import asyncio

import pytest

from grpo_lab.errors import PeerDied, PhaseTimeout, SimulationError
from grpo_lab.events import CollectiveEntered
from grpo_lab.sim import RankGroup, explore, random_tape, run_simulation


async def settle(*coroutines):
    return await asyncio.gather(*coroutines, return_exceptions=True)


def test_agree_is_the_conjunction_and_barrier_waits_for_all():
    async def main(context):
        group = RankGroup(3)
        times = []

        async def rank(ranks, delay_s):
            assert ranks.size == 3
            await asyncio.sleep(delay_s)
            await ranks.barrier(timeout_s=10)
            times.append(context.now_s)
            first = await ranks.agree(True, timeout_s=1)
            second = await ranks.agree(ranks.rank != 1, timeout_s=1)
            return first, second

        answers = await asyncio.gather(*(rank(ranks, ranks.rank) for ranks in group.ranks))
        return answers, times

    for seed in range(20):
        answers, times = run_simulation(main, random_tape(seed, 100)).value
        assert answers == [(True, False)] * 3
        assert times == [2, 2, 2]


def test_timeout_names_the_missing_ranks_and_breaks_the_group_for_all():
    async def main(context):
        group = RankGroup(4)
        outcomes = await settle(group.ranks[0].agree(True, 5), group.ranks[2].barrier(50))
        assert isinstance(outcomes[1], SimulationError)  # another operation: see below
        group = RankGroup(4)
        outcomes = await settle(group.ranks[0].agree(True, 5), group.ranks[2].agree(True, 50))
        assert context.now_s == 5
        late = await settle(group.ranks[1].agree(True, 5), group.ranks[0].barrier(5))
        assert context.now_s == 5
        return [*outcomes, *late]

    errors = run_simulation(main).value
    assert [type(error) for error in errors] == [PhaseTimeout] * 4
    text = "trainer rank 0 waited 5 s in agree (collective 0): rank(s) 1, 3 did not come"
    assert {str(error) for error in errors} == {text}


def test_different_operations_fail_on_every_rank():
    async def main(context):
        group = RankGroup(2)
        return await settle(group.ranks[0].barrier(5), group.ranks[1].agree(True, 5))

    errors = run_simulation(main).value
    assert {str(error) for error in errors} == {
        "collective 0 of trainer: rank 1 entered agree, rank(s) 0 entered barrier"
    }


def test_death_of_a_rank_wakes_the_others():
    async def main(context):
        group = RankGroup(3)
        context.loop.call_later(2, group.fail, 1, "killed")
        waiting = await settle(group.ranks[0].barrier(60), group.ranks[2].barrier(60))
        later = await settle(group.ranks[0].agree(True, 60))
        return waiting + later, context.now_s

    errors, now_s = run_simulation(main).value
    assert [type(error) for error in errors] == [PeerDied] * 3
    assert str(errors[0]) == "trainer rank 1 died: killed"
    assert now_s == 2


def test_events_and_causes():
    async def main(context):
        recorders = [context.recorder(f"rank-{rank}") for rank in range(2)]
        group = RankGroup(2, recorders=recorders, view=7)
        await asyncio.gather(*(ranks.agree(True, 1) for ranks in group.ranks))
        await asyncio.gather(*(ranks.barrier(1) for ranks in group.ranks))

    records = run_simulation(main).records
    assert [record.event for record in records[:2]] == [
        CollectiveEntered(group="trainer", rank=rank, index=0, operation="agree", view=7) for rank in (0, 1)
    ]
    causes = {record.id: record.cause for record in records}
    assert causes["rank-0:1"] == ("rank-1:0",)
    assert causes["rank-1:1"] == ("rank-0:0",)


def test_all_ranks_learn_the_same_under_every_schedule():
    def run(tape):
        async def main(context):
            group = RankGroup(3)
            return tuple(await asyncio.gather(*(ranks.agree(ranks.rank > 0, 1) for ranks in group.ranks)))

        return run_simulation(main, tape).value

    found = explore(run, depth=8)
    assert found.complete
    assert found.runs > 10
    assert set(found.outcomes) == {(False, False, False)}


def test_recorders_are_one_per_rank_or_none():
    with pytest.raises(SimulationError, match="2 ranks with 1 recorders"):
        RankGroup(2, recorders=[object()])
