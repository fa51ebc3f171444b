"""The coordinator on several ranks: whatever happens on one, all take the same path in bounded time."""

import asyncio

import pytest
from coordinator_world import LIMITS, Fault, make_world

from grpo_lab.errors import GrpoLabError, PackingError
from grpo_lab.protocol.coordinator import Coordinator, SyncSettings
from grpo_lab.sim import RankGroup, pct_tape, random_tape
from grpo_lab.sim.simulation import run_simulation, run_twice
from grpo_lab.types import Bucket

RANKS = 3
GATHER_TIMEOUT_S = 10.0  # of the trainer's own process group: above what a transport waits for


class GatheringSource:
    """Every ``next`` is a collective of all ranks. ``trouble(rank, attempt, index, when)`` may raise or wait.

    Rank 0 also packs, with ``packed``, the source that it would use alone.
    """

    def __init__(self, ranks, packed, trouble):
        self._ranks, self._packed, self._trouble = ranks, packed, trouble
        self.plan, self.plan_digest = packed.plan, packed.plan_digest
        self.num_buckets, self.num_tensors = packed.num_buckets, packed.num_tensors
        self._attempt = 0
        self._next = 0

    async def begin(self, sync):
        self._attempt, self._next = sync.attempt, 0
        if self._ranks.rank == 0:
            await self._packed.begin(sync)

    async def next(self):
        if self._next >= self.num_buckets:
            return None
        index, self._next = self._next, self._next + 1
        await self._trouble(self._ranks.rank, self._attempt, index, "before")
        await self._ranks.barrier(GATHER_TIMEOUT_S)
        await self._trouble(self._ranks.rank, self._attempt, index, "after")
        if self._ranks.rank == 0:
            return await self._packed.next()
        return Bucket(index, 0, memoryview(b""), 0, 0)

    def phases_s(self):
        return self._packed.phases_s() if self._ranks.rank == 0 else {"gather": 0.0, "pack": 0.0}

    async def score(self, sequences):
        return await self._packed.score(sequences)


async def no_trouble(rank, attempt, index, when):
    await asyncio.sleep(0)


def sync_on_all_ranks(
    trouble=no_trouble, prepare=None, tape=None, once=run_twice, carry=None, syncs=1, **settings
):
    """Syncs on every rank. Returns (outcome of the last by rank, world, seconds, records)."""

    async def main(context):
        world = make_world(context, carry=carry, **settings)
        agreements = RankGroup(RANKS, "agreements")
        gathers = RankGroup(RANKS, "gathers")
        coordinators = []
        for rank in range(RANKS):
            source = GatheringSource(gathers.ranks[rank], world.coordinator._source, trouble)
            engines = world.engines if rank == 0 else []
            recorder = context.recorder(f"trainer-r{rank}")
            transport = world.transport
            coordinator = Coordinator(
                engines,
                transport,
                source,
                agreements.ranks[rank],
                recorder,
                SyncSettings(timeouts=LIMITS, **settings),
            )
            coordinators.append(coordinator)
        await asyncio.gather(*(one.connect(1, 0) for one in coordinators))
        if prepare is not None:
            prepare(world, agreements)
        began_s = context.now_s
        for _ in range(syncs):
            outcomes = await asyncio.gather(*(one.sync() for one in coordinators), return_exceptions=True)
        took_s = context.now_s - began_s
        in_service = coordinators[0].engines.names
        assert not any(engine.paused for engine in world.engines if engine.name in in_service)
        for one in coordinators:
            await one.close()
        return outcomes, [one.committed for one in coordinators], world, took_s

    result = once(main, tape, max_virtual_s=3600)
    assert not result.leftover_tasks
    return (*result.value, result.records)


def same_path(records):
    """The phases that each rank agreed on, with their outcomes, must be the same."""
    paths = {rank: [] for rank in range(RANKS)}
    for record in records:
        if record.event.kind == "phase_agreed":
            paths[record.event.rank].append((record.event.phase, record.event.ok))
    assert paths[1] == paths[0]
    assert paths[2] == paths[0]
    return paths[0]


def test_a_clean_sync_takes_the_same_path_on_all_ranks():
    outcomes, committed, world, _, records = sync_on_all_ranks()
    assert [outcome.version for outcome in outcomes] == [1, 1, 1]
    assert committed == [1, 1, 1]
    assert all(world.holds_current(engine) for engine in world.engines)
    assert same_path(records) == [
        (phase, True) for phase in ("connect", "begin", "pause", "join", "transfer", "probation", "resume")
    ]


@pytest.mark.parametrize("failing", [False, True])
def test_the_turns_of_a_rolling_sync_are_those_of_all_ranks(failing):
    def prepare(world, agreements):
        if failing:
            world.engines[1].faults.append(Fault("pause", "die"))

    outcomes, committed, world, _, records = sync_on_all_ranks(prepare=prepare, syncs=2, scope="rolling")
    lost = ("engine-1",) if failing else ()
    assert [outcome.version for outcome in outcomes] == [2, 2, 2]
    assert (outcomes[0].fenced, committed) == (lost, [2, 2, 2])
    assert [engine.name for engine in world.engines if not world.holds_current(engine)] == [*lost]
    turns = [ok for phase, ok in same_path(records) if phase == "next turn"]
    assert turns == ([False, True, False] if failing else [False, True, True, False])


@pytest.mark.parametrize("error", [PackingError("no room"), RuntimeError("CUDA out of memory")])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_gather_fails_for_good_ends_the_sync_on_all(rank, when, error):
    async def trouble(which, attempt, index, moment):
        if (which, index, moment) == (rank, 1, when):
            raise type(error)(*error.args)

    outcomes, committed, _, took_s, records = sync_on_all_ranks(trouble)
    same_path(records)
    assert committed == [0, 0, 0]
    # What no retry mends is raised on every rank. So is what leaves no engine: when rank 0 sent everything,
    # all have loaded a version over which rank 1 objects. Else all report the previous version.
    raised = isinstance(error, RuntimeError) or (rank, when) == (1, "after")
    assert all(isinstance(outcome, GrpoLabError) == raised for outcome in outcomes)
    if isinstance(error, RuntimeError):
        assert "CUDA out of memory" in str(outcomes[rank])
    assert took_s < 4 * GATHER_TIMEOUT_S


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_gather_that_fails_once_after_its_collective_is_retried_by_all(rank):
    async def trouble(which, attempt, index, when):
        if (which, attempt, index, when) == (rank, 1, 0, "after"):
            raise PackingError("once")

    outcomes, committed, world, took_s, records = sync_on_all_ranks(trouble)
    assert committed == [1, 1, 1]
    assert all(outcome.committed for outcome in outcomes)
    assert all(world.holds_current(engine) for engine in world.engines)
    assert same_path(records).count(("transfer", False)) == 1
    assert took_s < GATHER_TIMEOUT_S, "a rank waited in a gather that another one had left"


def test_a_slow_rank_is_waited_for():
    async def trouble(rank, attempt, index, when):
        await asyncio.sleep(0.5 if rank == 2 else 0)

    _, committed, _, took_s, records = sync_on_all_ranks(trouble)
    assert committed == [1, 1, 1]
    assert ("transfer", False) not in same_path(records)
    assert took_s > 1.0


def test_a_rank_that_hangs_is_bounded():
    async def trouble(rank, attempt, index, when):
        if rank == 2 and index == 1:
            await asyncio.sleep(600)

    outcomes, committed, _, took_s, _ = sync_on_all_ranks(trouble)
    assert all(isinstance(outcome, GrpoLabError) for outcome in outcomes[:2])
    assert committed == [0, 0, 0]
    assert took_s < 1300


@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_a_send_that_fails_in_the_middle_leaves_no_rank_in_a_gather(bucket):
    async def lose_once(member, moved, transport):
        if moved.index == bucket and not getattr(transport, "lost", False):
            transport.lost = True
            return []
        return [moved]

    outcomes, committed, world, _, records = sync_on_all_ranks(carry=lose_once)
    assert committed == [1, 1, 1]
    assert all(outcome.committed for outcome in outcomes)
    assert all(world.holds_current(engine) for engine in world.engines)
    assert same_path(records).count(("transfer", False)) == 1


def test_all_ranks_raise_when_too_few_engines_are_left():
    def prepare(world, _):
        for engine in world.engines:
            engine.faults.append(Fault("update", "die"))

    outcomes, committed, _, _, records = sync_on_all_ranks(prepare=prepare)
    assert all(isinstance(outcome, GrpoLabError) for outcome in outcomes)
    assert committed == [0, 0, 0]
    same_path(records)


@pytest.mark.parametrize(
    "make", [random_tape, lambda seed, n: pct_tape(seed, steps=n)], ids=["random", "pct"]
)
def test_any_schedule_and_any_one_fault_end_alike_on_all_ranks(make):
    calls = ["pause", "start_update", "update", "finish_update", "resume"]
    for seed in range(30):

        async def trouble(rank, attempt, index, when, seed=seed):
            if seed % 3 == 0 and (rank, attempt, index, when) == (seed % 2, 1, 1, "after"):
                raise PackingError("once")

        def prepare(world, _, seed=seed):
            kind = ["refuse", "die", "lose_reply"][seed % 3]
            world.engines[seed % 2].faults.append(Fault(calls[seed % 5], kind))

        outcomes, committed, _, took_s, records = sync_on_all_ranks(
            trouble, prepare, make(seed, 300), once=run_simulation
        )
        same_path(records)
        assert len(set(committed)) == 1
        assert len({type(outcome).__name__ for outcome in outcomes}) == 1
        assert took_s < 60
