"""The rollout worker, unmodified, in virtual time, against engines, queues and rewards that misbehave."""

import asyncio
import itertools

import pytest
from rollout_world import (
    GENERATIONS,
    Once,
    Prompts,
    Rewards,
    RolloutWorld,
    TokenEngine,
    check_conservation,
    failing_reward,
    refuse,
)

from grpo_lab.errors import ConfigError, DataError, WorkerError
from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.protocol.rollout_worker import RolloutSettings
from grpo_lab.protocol.sample_request import RequestSettings
from grpo_lab.sim import explore, pct_tape, random_tape, run_simulation
from grpo_lab.sim.simulation import run_twice
from grpo_lab.types import DroppedGroup, SamplingParams

ADMISSION = StalenessBound("admission", groups_per_step=2, max_staleness=1)


def simulate(scenario, tape=None, **bounds):
    """Runs ``scenario(context)`` twice; its trace must show one end for every sample."""
    result = run_twice(scenario, tape, max_virtual_s=600, max_callbacks=200_000, **bounds)
    return result, check_conservation(result.records)


def failing(scenario, error, match):
    """The trace of a run that must fail, and its drops by reason."""
    records = []
    with pytest.raises(error, match=match) as caught:
        run_simulation(scenario, records=records, max_virtual_s=600, max_callbacks=200_000)
    return records, check_conservation(records), caught.value


def of(records, kind):
    return [record.event for record in records if record.event.kind == kind]


# -- what one bad request costs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "reason", "words", "requests"),
    [
        (refuse(400), "request_refused", "said the server", 1),
        (refuse(404), "request_refused", "said the server", 1),
        (refuse(500), "request_failed", "3 tries", 3),
        (refuse(429), "request_failed", "3 tries", 3),
    ],
)
def test_a_bad_request_costs_its_group_and_no_more(trouble, reason, words, requests):
    async def scenario(context):
        world = RolloutWorld(context)
        world.engines[0].trouble[3] = trouble
        items = await world.run_until(groups=10)
        assert context.now_s < 10
        sent = [request for request in world.engines[0].requests if request.prompt_token_ids[0] == 3]
        assert len(sent) <= requests * GENERATIONS
        assert max(list(map(str, sent)).count(str(one)) for one in sent) == requests
        (dropped,) = [item for item in items if isinstance(item, DroppedGroup)]
        assert (dropped.number, dropped.prompt_index, dropped.reason) == (3, 3, reason)
        assert words in dropped.detail

    _, reasons = simulate(scenario)
    assert reasons[reason] == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_trouble_that_passes_costs_nothing(status):
    async def scenario(context):
        world = RolloutWorld(context)
        world.engines[0].trouble[1] = Once(refuse(status), times=2)
        items = await world.run_until(groups=6)
        assert not any(isinstance(item, DroppedGroup) for item in items)

    simulate(scenario)


@pytest.mark.parametrize(
    ("answer", "words"), [(failing_reward("boom"), "boom"), (None, "returned None for every sample")]
)
def test_a_failing_reward_costs_its_group(answer, words):
    async def scenario(context):
        world = RolloutWorld(context, rewards=Rewards({2: answer}))
        items = await world.run_until(groups=6)
        (dropped,) = [item for item in items if isinstance(item, DroppedGroup)]
        assert (dropped.number, dropped.reason) == (2, "reward_failed")
        assert words in dropped.detail

    _, reasons = simulate(scenario)
    assert reasons["reward_failed"] == 1


def test_a_request_that_hangs_costs_its_group_in_bounded_time():
    async def scenario(context):
        world = RolloutWorld(context, request=RequestSettings(timeout_s=3, retries=1), group_timeout_s=60)
        hang = world.engines[0]
        decode = hang._decode

        async def hang_on_prompt_two(request):
            if request.prompt_token_ids[0] == 2:
                await asyncio.sleep(1e6)
            return await decode(request)

        hang._decode = hang_on_prompt_two
        running = asyncio.create_task(world.worker.run(), name="worker")
        await asyncio.sleep(7)
        world.worker.stop()
        await running

    result, reasons = simulate(scenario)
    assert reasons["request_failed"] == 1
    (dropped,) = [event for event in of(result.records, "group_dropped") if event.reason == "request_failed"]
    assert dropped.group == "t1.g2"


def test_a_group_that_takes_too_long_costs_itself_and_not_the_run():
    async def scenario(context):
        world = RolloutWorld(context, tokens=4, group_timeout_s=0.3)
        with pytest.raises(WorkerError, match=r"8 groups in a row were lost.*request_failed"):
            await world.run_until(groups=100)

    _, reasons = simulate(scenario)
    assert reasons["request_failed"] == 8


# -- what ends the run -------------------------------------------------------------------------------


def test_failures_in_a_row_end_the_run_with_the_last_words():
    async def scenario(context):
        answers = {index: failing_reward(index) for index in range(100)}
        await RolloutWorld(context, rewards=Rewards(answers)).run_until(groups=100)

    _, reasons, error = failing(scenario, WorkerError, "8 groups in a row")
    assert reasons["reward_failed"] >= 8
    assert "reward_failed: reward function score raised ValueError(" in str(error)


def test_a_success_between_failures_lets_the_run_go_on():
    async def scenario(context):
        answers = {index: failing_reward(index) for index in range(100) if index % 5}
        items = await RolloutWorld(context, rewards=Rewards(answers), max_inflight=2).run_until(groups=50)
        assert len(items) == 50

    simulate(scenario)


def test_an_engine_that_is_gone_for_good_ends_the_run_within_seconds():
    async def scenario(context):
        world = RolloutWorld(context)
        asyncio.get_running_loop().call_later(2, setattr, world.engines[0], "alive", False)
        try:
            await world.run_until(groups=10**6)
        finally:
            assert 7 <= context.now_s < 8

    _, reasons, _ = failing(scenario, WorkerError, "engine-0 has been gone for 5 s: .*connection refused")
    assert set(reasons) == {"shutdown"}


def test_an_engine_that_is_gone_for_a_while_costs_nothing():
    async def scenario(context):
        world = RolloutWorld(context)
        loop = asyncio.get_running_loop()
        loop.call_later(1, setattr, world.engines[0], "alive", False)
        loop.call_later(4, setattr, world.engines[0], "alive", True)
        items = await world.run_until(groups=40)
        assert not any(isinstance(item, DroppedGroup) for item in items)

    simulate(scenario)


def test_of_two_engines_the_living_one_serves_and_the_dead_one_is_left_alone():
    async def scenario(context):
        engines = [TokenEngine("engine-0"), TokenEngine("engine-1")]
        engines[0].alive = False
        world = RolloutWorld(context, engines)
        items = await world.run_until(groups=60)
        assert not any(isinstance(item, DroppedGroup) for item in items)
        assert {request.request_id for request in engines[1].requests} >= {
            sample.sample_id for item in items for sample in item.samples
        }

    result, _ = simulate(scenario)
    to_the_dead = [event for event in of(result.records, "sample_dispatched") if event.engine == "engine-0"]
    assert len(to_the_dead) <= 8, "requests went on being sent to an engine that is gone"


def test_an_engine_that_answers_again_is_used_again():
    async def scenario(context):
        engines = [TokenEngine("engine-0"), TokenEngine("engine-1")]
        engines[0].alive = False
        world = RolloutWorld(context, engines, capacity=10_000)
        asyncio.get_running_loop().call_later(5, setattr, engines[0], "alive", True)
        await world.run_until(seconds=60)
        assert len(engines[0].requests) > 50

    simulate(scenario)


def test_a_slow_engine_beside_a_dead_one_is_not_taken_for_gone():
    """The time in which another engine was silent does not count as absence."""

    async def scenario(context):
        engines = [TokenEngine("engine-0"), TokenEngine("engine-1")]
        engines[0].alive = False
        engines[1].pause_abort()
        request = RequestSettings(timeout_s=8, retries=5, engine_gone_after_s=5, avoid_s=1)
        world = RolloutWorld(context, engines, request=request)
        asyncio.get_running_loop().call_later(20, engines[1].resume)
        items = await world.run_until(groups=10)
        assert not any(isinstance(item, DroppedGroup) for item in items)

    simulate(scenario)


def test_what_a_fenced_engine_holds_is_asked_for_elsewhere_at_once():
    async def scenario(context):
        engines = [TokenEngine("engine-0"), TokenEngine("engine-1")]
        engines[0].pause_abort()  # it lives, and holds what it is sent for ever
        world = RolloutWorld(context, engines, max_inflight=4)
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, world.worker.fence_engines, ["engine-0", "engine-7"])
        loop.call_later(1.5, world.worker.fence_engines, ["engine-0"])
        items = await world.run_until(groups=4)
        assert not any(isinstance(item, DroppedGroup) for item in items)
        assert context.now_s < 4, "a request waited for its time-out"
        assert engines[0].running == 0
        assert all(request.request_id.startswith(("t1.g0.", "t1.g1.")) for request in engines[0].requests)

    _, reasons = simulate(scenario)
    assert set(reasons) <= {"shutdown"}


def test_without_any_engine_in_service_the_worker_ends():
    async def scenario(context):
        world = RolloutWorld(context)
        asyncio.get_running_loop().call_later(0.2, world.worker.fence_engines, ["engine-0"])
        await world.run_until(groups=1000)

    failing(scenario, WorkerError, "all engines are out of service: engine-0")


def test_provisional_tokens_are_given_out_when_their_version_is_committed():
    async def scenario(context):
        world = RolloutWorld(context, [TokenEngine(version=2)], max_inflight=2)
        asyncio.get_running_loop().call_later(3.0, world.worker.update_model_version, 2)
        (group,) = await world.run_until(groups=1)
        assert group.version_first == 2
        assert 3.0 <= context.now_s < 3.2

    simulate(scenario)


def test_provisional_tokens_of_an_engine_that_is_fenced_are_lost_with_their_groups():
    """What it gave under weights that nobody proved must not be continued elsewhere either."""

    async def scenario(context):
        engines = [TokenEngine("engine-0", version=2, token_s=0.05), TokenEngine("engine-1", token_s=1.0)]
        world = RolloutWorld(context, engines, max_inflight=2, tokens=6)
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, engines[0].pause_abort)
        loop.call_later(0.5, world.worker.fence_engines, ["engine-0"])
        items = await world.run_until(groups=2)
        assert (items[0].number, items[0].reason) == (0, "canary_failed")
        assert [span.version for sample in items[1].samples for span in sample.spans] == [1, 1]

    simulate(scenario)


def test_provisional_tokens_do_not_wait_for_ever():
    async def scenario(context):
        world = RolloutWorld(context, [TokenEngine(version=2)], max_inflight=2)
        (lost,) = await world.run_until(groups=1)
        assert (lost.reason, "not committed within 20 s" in lost.detail) == ("canary_failed", True)
        assert context.now_s < 22

    simulate(scenario)


def test_an_engine_of_a_newer_term_ends_this_worker():
    async def scenario(context):
        world = RolloutWorld(context)
        world.engines[0].trouble[2] = refuse(409)
        await world.run_until(groups=100)

    failing(scenario, WorkerError, "engine-0 serves a newer term")


class BadPrompts(Prompts):
    def next(self):
        if self.index == 5:
            raise DataError("prompt 5 has no tokens")
        return super().next()


def test_a_prompt_that_cannot_be_read_ends_the_run_with_its_words():
    async def scenario(context):
        await RolloutWorld(context, prompts=BadPrompts()).run_until(groups=100)

    failing(scenario, DataError, "prompt 5 has no tokens")


def test_settings_under_which_no_group_could_run_are_refused():
    sampling = SamplingParams()
    with pytest.raises(ConfigError, match="max_inflight_tasks=3: expected at least num_generations = 4"):
        RolloutSettings(num_generations=4, sampling=sampling, bound=ADMISSION, max_inflight=3)
    with pytest.raises(ConfigError, match="max_consecutive_failures=0"):
        RolloutSettings(4, sampling, ADMISSION, max_inflight=4, max_consecutive_failures=0)


# -- pauses and versions -----------------------------------------------------------------------------


def test_a_sample_that_pauses_cut_off_is_continued_with_its_tokens_and_a_seed_of_its_own():
    async def scenario(context):
        world = RolloutWorld(context, tokens=30, max_inflight=2)
        engine = world.engines[0]

        async def sync(at_s, version):
            await asyncio.sleep(at_s)
            engine.pause_abort()
            await asyncio.sleep(0.3)
            engine.version = version
            engine.resume()
            world.worker.update_model_version(version)

        syncs = [asyncio.create_task(sync(at_s, version)) for at_s, version in ((1.0, 2), (2.5, 3))]
        (group,) = await world.run_until(groups=1)
        await asyncio.gather(*syncs)
        for sample in group.samples:
            # The engine's tokens name their position, so a gap or a repetition would show.
            assert sample.completion_token_ids == tuple(range(102, 132))
            assert sample.behaviour_logprobs == tuple(-0.001 * token for token in range(102, 132))
            assert [span.version for span in sample.spans] == [1, 2, 3]
            assert [span.start for span in sample.spans][1:] == [span.end for span in sample.spans][:-1]
            assert (sample.spans[0].start, sample.spans[-1].end) == (0, 30)
            assert (sample.version_first, sample.version_last) == (1, 3)
            assert sample.finish_reason == "length"
        first_group = [request for request in engine.requests if request.request_id.startswith("t1.g0.")]
        assert len(first_group) == 3 * GENERATIONS
        assert len({request.request_id for request in first_group}) == len(first_group)
        for request in first_group:
            assert len(request.prompt_token_ids) - 2 + request.sampling.max_tokens == 30

    result, _ = simulate(scenario)
    assert len(of(result.records, "sample_dispatched")) == len(
        {event.sample for event in of(result.records, "sample_dispatched")}
    )


def test_no_two_requests_of_a_run_share_a_seed_but_repetitions():
    async def scenario(context):
        world = RolloutWorld(context, tokens=10)
        engine = world.engines[0]
        running = asyncio.create_task(world.worker.run(), name="worker")
        for _ in range(10):
            await asyncio.sleep(0.75)
            engine.pause_abort()
            await asyncio.sleep(0.1)
            engine.resume()
        world.worker.stop()
        await running
        seeds = [request.sampling.seed for request in engine.requests]
        assert len(set(seeds)) == len(seeds) > 50

    simulate(scenario)


def test_version_of_a_token_is_that_of_its_own_time_not_of_the_end():
    async def scenario(context):
        world = RolloutWorld(context, tokens=10, max_inflight=2)
        asyncio.get_running_loop().call_later(0.55, setattr, world.engines[0], "version", 2)
        asyncio.get_running_loop().call_later(0.55, world.worker.update_model_version, 2)
        (group,) = await world.run_until(groups=1)
        for sample in group.samples:
            assert [(span.version, span.start, span.end) for span in sample.spans] == [(1, 0, 5), (2, 5, 10)]
            assert (sample.version_first, sample.version_last) == (1, 2)
        assert group.version_first == 1

    simulate(scenario)


def test_endless_aborts_cost_one_group_and_are_bounded():
    async def scenario(context):
        world = RolloutWorld(context, request=RequestSettings(max_continuations=3), max_inflight=2)

        async def always_abort(request):
            answer = await TokenEngine._decode(world.engines[0], request)
            if request.prompt_token_ids[0] == 0:
                return type(answer)(request.request_id, (), (), "abort", (), "engine-0")
            return answer

        world.engines[0]._decode = always_abort
        items = await world.run_until(groups=2)
        assert (items[0].reason, items[0].number) == ("aborted", 0)

    simulate(scenario)


def test_a_paused_engine_holds_requests_and_nothing_is_lost():
    async def scenario(context):
        world = RolloutWorld(context)
        engine = world.engines[0]
        asyncio.get_running_loop().call_later(1, engine.pause_abort)
        asyncio.get_running_loop().call_later(15, engine.resume)
        items = await world.run_until(groups=30)
        assert not any(isinstance(item, DroppedGroup) for item in items)

    simulate(scenario)


# -- admission ---------------------------------------------------------------------------------------


def test_admission_counts_are_right_and_the_bound_is_kept():
    async def scenario(context):
        rewards = Rewards({1: failing_reward(1)})
        world = RolloutWorld(context, bound=ADMISSION, rewards=rewards, max_inflight=6)
        running = asyncio.create_task(world.worker.run(), name="worker")
        for version in (2, 3, 4):
            await asyncio.sleep(5)
            assert world.worker.blocked_by == "bound"
            world.worker.update_model_version(version)
        await asyncio.sleep(5)
        world.worker.stop()
        await running

    result, _ = simulate(scenario)
    admitted = lost = ended = 0
    for record in result.records:
        event = record.event
        if event.kind == "group_dropped" and event.reason != "shutdown":
            lost += 1
            ended += 1
        elif event.kind == "group_queued":
            ended += 1
        elif event.kind == "group_admitted":
            admitted += 1
            assert event.number == admitted - 1
            assert event.admitted == admitted - lost <= ADMISSION.admission_limit(event.version - 1)
            assert event.running == admitted - ended
            assert event.running * GENERATIONS <= 6
    assert (admitted, lost) == (ADMISSION.admission_limit(3) + 1, 1)
    assert {event.by for event in of(result.records, "admission_blocked")} == {"bound", "inflight"}


def test_bound_zero_still_admits_and_heartbeats_stay_fresh():
    async def scenario(context):
        world = RolloutWorld(context, bound=StalenessBound("admission", groups_per_step=2, max_staleness=0))
        running = asyncio.create_task(world.worker.run(), name="worker")
        for version in (2, 3, 4):
            first, second = await world.queue.take(), await world.queue.take()
            assert {group.version_first for group in (first, second)} == {version - 1}
            await asyncio.sleep(7)
            assert not world.queue.items
            world.engines[0].version = version
            world.worker.update_model_version(version)
        world.worker.stop()
        await running
        times = [time_s for time_s, _, _ in world.beats]
        assert max(after - before for before, after in itertools.pairwise(times)) <= 1.0 + 1e-9
        assert world.beats[-1][2] == "bound"

    simulate(scenario)


def test_heartbeats_tell_progress_from_life():
    async def scenario(context):
        world = RolloutWorld(context)
        engine = world.engines[0]
        asyncio.get_running_loop().call_later(5.5, engine.pause_abort)
        await world.run_until(seconds=15)
        before = [progress for time_s, progress, _ in world.beats if time_s <= 5]
        after = [progress for time_s, progress, _ in world.beats if time_s >= 7]
        assert before == sorted(set(before)), "progress rises while tokens come"
        assert len(after) >= 8
        assert len(set(after)) == 1, "it stands still while the engine is paused"

    result, _ = simulate(scenario)
    assert len(of(result.records, "heartbeat")) >= 15


def test_a_full_queue_holds_the_worker_back_and_loses_nothing():
    async def scenario(context):
        world = RolloutWorld(context, capacity=3)
        running = asyncio.create_task(world.worker.run(), name="worker")
        await asyncio.sleep(30)
        assert world.queue.depth == 3
        assert world.engines[0].running == 0
        taken = [await world.queue.take() for _ in range(20)]
        assert len({group.number for group in taken}) == 20
        world.worker.stop()
        await running

    result, reasons = simulate(scenario)
    assert max(event.depth for event in of(result.records, "group_queued")) == 3
    assert set(reasons) == {"shutdown"}


# -- stop --------------------------------------------------------------------------------------------


def test_stop_with_a_full_queue_is_immediate():
    async def scenario(context):
        world = RolloutWorld(context, capacity=1)
        running = asyncio.create_task(world.worker.run(), name="worker")
        await asyncio.sleep(30)
        world.worker.stop()
        asked_s = context.now_s
        await running
        assert context.now_s == asked_s
        assert world.engines[0].running == 0

    _, reasons = simulate(scenario)
    assert reasons == {"shutdown": 4}


@pytest.mark.parametrize(
    "tape", [random_tape, lambda seed, n: pct_tape(seed, steps=n)], ids=["random", "pct"]
)
def test_every_sample_ends_once_whenever_the_worker_is_stopped_or_fails(tape):
    """Stops, refusals, reward failures, pauses and a dead engine, at drawn times and in drawn orders."""

    for seed in range(60):

        async def scenario(context):
            draw = context.random("scenario")
            answers = {index: failing_reward(index) for index in range(400) if draw.random() < 0.2}
            world = RolloutWorld(
                context, rewards=Rewards(answers, delay_s=draw.choice([0, 0.05])), capacity=4
            )
            engine, loop = world.engines[0], asyncio.get_running_loop()
            for index in range(400):
                if draw.random() < 0.2:
                    engine.trouble[index] = refuse(draw.choice([400, 500, 409] if index > 20 else [400, 500]))
            pause_s = draw.uniform(0, 3)
            loop.call_later(pause_s, engine.pause_abort)
            loop.call_later(pause_s + 0.2, engine.resume)
            if draw.random() < 0.3:
                loop.call_later(draw.uniform(0, 3), setattr, engine, "alive", False)
            try:
                await world.run_until(seconds=draw.uniform(0, 5))
            except WorkerError:
                return "failed"
            return "stopped"

        result = run_simulation(scenario, tape(seed, 400), seed=seed, max_virtual_s=600)
        check_conservation(result.records)
        assert not result.leftover_tasks


def test_every_order_of_a_failure_beside_an_admission():
    """Exhaustive: the group that is admitted in the moment in which another one ends the run ends, too."""

    def run(tape):
        async def scenario(context):
            world = RolloutWorld(context, max_inflight=4, max_consecutive_failures=1, tokens=1)
            world.engines[0].trouble[0] = refuse(400)
            with pytest.raises(WorkerError):
                await world.run_until(groups=10)

        result = run_simulation(scenario, tape)
        check_conservation(result.records)
        sent = {event.group for event in of(result.records, "sample_dispatched")}
        return all(event.group in sent for event in of(result.records, "group_admitted"))

    found = explore(run, depth=10, max_runs=1000)
    assert not found.failures, found.failures[0].error
    assert found.outcomes[False] > 0, "no schedule cancelled a group before its task ran: change the case"


def test_an_engine_that_came_back_gets_requests_again_at_once():
    async def scenario(context):
        engines = [TokenEngine("engine-0"), TokenEngine("engine-1")]
        world = RolloutWorld(context, engines, max_inflight=4)
        world.worker.fence_engines(["engine-0"])
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, world.worker.fence_engines, [])
        await world.run_until(seconds=2.0)
        assert engines[0].requests
        assert min(int(request.request_id[4]) for request in engines[0].requests) > 0

    simulate(scenario)


def test_tokens_of_weights_that_no_sync_brought_are_asked_for_elsewhere():
    """A stock server that restarted serves what was on its disk, and does not refuse."""

    async def scenario(context):
        engines = [TokenEngine("engine-0", version=0), TokenEngine("engine-1")]
        world = RolloutWorld(context, engines, max_inflight=4)
        items = await world.run_until(groups=4)
        assert {span.version for group in items for sample in group.samples for span in sample.spans} == {1}

    _, reasons = simulate(scenario)
    assert set(reasons) <= {"shutdown"}


def test_a_fence_and_the_commit_without_the_engine_may_be_heard_of_together():
    """Provisional tokens of the fenced engine were given out when both messages came in one piece."""

    async def scenario(context):
        engines = [TokenEngine("engine-0", version=2, token_s=0.05), TokenEngine("engine-1", token_s=1.0)]
        world = RolloutWorld(context, engines, max_inflight=2, tokens=6)

        def both():
            world.worker.fence_engines(["engine-0"])
            world.worker.update_model_version(2)
            world.worker.fence_engines([])

        asyncio.get_running_loop().call_later(0.5, both)
        items = await world.run_until(groups=2)
        assert (items[0].number, items[0].reason) == (0, "canary_failed")

    simulate(scenario)
