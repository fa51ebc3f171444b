"""Requests, pauses, aborts and failures of the engine, without a model."""

import asyncio

import pytest
from engine_kit import events_of, in_loop, kinds_of, running, sampling, steps, turns

from grpo_lab.engine.failures import BadRequest, EngineDead, StaleTerm
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.request import WeightIdentity
from grpo_lab.engine.runner import InlineRunner

PROMPT = [1, 2, 3]
V1 = WeightIdentity("t1.v1.a1", 1, 1)
V2 = WeightIdentity("t1.v2.a1", 1, 2)


def switch(core, identity):
    return core.switch_weights(identity, "hash", lambda: None)


@in_loop
async def test_a_request_runs_to_its_length():
    async with running() as core:
        request = await core.wait(core.submit(PROMPT, sampling(10), "a"))
        assert (request.finish_reason, request.num_output_tokens, len(request.logprobs)) == ("length", 10, 10)
        assert core.scheduler.pool.num_used == 0
    (event,) = events_of(core, "request_finished")
    assert event.spans == ((0, 0, 0, 10, 1, 10),)
    assert [e.first_step for e in events_of(core, "model_step")] == list(range(1, 11))


@in_loop
async def test_stop_tokens_and_end_of_sequence():
    async with running(SyntheticPolicy(mean_tokens=3)) as core:
        ended = await core.wait(core.submit(PROMPT, sampling(500, ignore_eos=False), "a"))
        assert (ended.finish_reason, ended.stop_reason, ended.token_ids[-1]) == ("stop", None, 255)
        free = await core.wait(core.submit(PROMPT, sampling(50), "a"))
        wanted = free.output_token_ids[7]
        first = free.output_token_ids.index(wanted)
        stopped = await core.wait(core.submit(PROMPT, sampling(50, stop_token_ids=(wanted,)), "a"))
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", wanted)
        assert stopped.output_token_ids == free.output_token_ids[: first + 1]


@in_loop
async def test_stop_strings_cut_the_text_and_not_the_tokens():
    def decode(ids):
        return "".join(chr(65 + token % 26) for token in ids)

    async with running(decode=decode) as core:
        free = await core.wait(core.submit(PROMPT, sampling(30), "a"))
        text = decode(free.output_token_ids)
        stop = text[9:12]
        request = await core.wait(core.submit(PROMPT, sampling(30), "a", stop_strings=(stop, "no match")))
        assert (request.finish_reason, request.stop_reason) == ("stop", stop)
        assert request.text == text[: text.find(stop)]
        assert decode(request.output_token_ids).endswith(stop)


@in_loop
async def test_output_is_clamped_to_the_context():
    async with running(SyntheticPolicy(max_model_len=16)) as core:
        request = await core.wait(core.submit(PROMPT, sampling(100), "a"))
        assert (request.finish_reason, len(request.token_ids)) == ("length", 16)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "cannot be empty"),
        ([1] * 4096, {}, r"prompt \(length 4096\) plus"),
        ([256], {}, "Token id 256 is out of vocabulary"),
        ([-1], {}, "Token id -1"),
        (PROMPT, {"max_tokens": 0}, "max_tokens must be at least 1"),
        (PROMPT, {"temperature": -1.0}, "temperature=-1"),
        (PROMPT, {"temperature": float("nan")}, "temperature=nan"),
        (PROMPT, {"top_p": 0.0}, "top_p must be in"),
        (PROMPT, {"top_k": -2}, "top_k must be 0"),
        (PROMPT, {"min_tokens": 9}, "min_tokens=9"),
        ([1] * 100, {"max_tokens": 3000}, "may need 194 KV blocks; the engine has 10"),
    ],
)
@in_loop
async def test_requests_that_can_never_be_served_are_refused(prompt, params, message):
    async with running(SyntheticPolicy(num_blocks=10)) as core:
        with pytest.raises(BadRequest, match=message):
            core.submit(prompt, sampling(**{"max_tokens": 8} | params), "a")
        assert events_of(core, "request_refused")[0].status == 400


@in_loop
async def test_keep_freezes_and_continues_where_it_was():
    async with running() as core:
        free = await core.wait(core.submit(PROMPT, sampling(40), "a"))
        request = core.submit(PROMPT, sampling(40), "a")
        await steps(core, 10)
        await core.pause("keep", clear_cache=False)
        done = core.counters.steps
        await turns()
        assert core.is_paused
        assert core.counters.steps == done
        assert not request.done.done()
        await core.resume()
        await core.wait(request)
        assert request.token_ids == free.token_ids
        assert request.recomputed_tokens == 0


@in_loop
async def test_keep_with_clear_cache_recomputes_the_prefix():
    async with running() as core:
        request = core.submit(PROMPT, sampling(40), "a")
        await steps(core, 20)
        await core.pause("keep", clear_cache=True)
        have = request.num_output_tokens
        assert core.scheduler.pool.num_used == 0
        assert core.scheduler.pool.num_cached == 0
        await core.resume()
        await core.wait(request)
        assert request.num_output_tokens == 40
        assert request.recomputed_tokens == len(PROMPT) + have - 1
    assert [event.cache for event in events_of(core, "cache_cleared")] == ["kv", "prefix"]


@in_loop
async def test_abort_returns_each_request_once_with_its_tokens():
    async with running(max_num_seqs=2) as core:
        requests = [core.submit(PROMPT, sampling(400), name) for name in "abc"]
        await steps(core, 10)
        await core.pause("abort")
        for request in requests:
            await core.wait(request)
        assert [request.finish_reason for request in requests] == ["abort"] * 3
        assert requests[0].num_output_tokens >= 10
        assert requests[2].num_output_tokens == 0
        assert len(requests[0].logprobs) == requests[0].num_output_tokens
        await core.resume()
        assert not core.scheduler.has_work
    (paused,) = events_of(core, "engine_paused")
    assert paused.aborted == ("a", "b", "c")
    assert len(events_of(core, "request_finished")) == 3


@in_loop
async def test_wait_drains_and_holds_newcomers():
    async with running() as core:
        request = core.submit(PROMPT, sampling(30), "a")
        await steps(core, 5)
        pause = asyncio.create_task(core.pause("wait"))
        await turns(3)
        assert core.is_paused
        assert not pause.done()
        late = core.submit(PROMPT, sampling(5), "late")
        await pause
        assert request.finish_reason == "length"
        await turns()
        assert not late.done.done()
        await core.resume()
        assert (await core.wait(late)).finish_reason == "length"
    assert [event.paused for event in events_of(core, "request_admitted")] == [False, True]


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
@in_loop
async def test_a_request_that_arrives_while_paused_waits_for_resume(mode):
    async with running() as core:
        await core.pause(mode)
        request = core.submit(PROMPT, sampling(3), "a")
        await turns()
        assert core.counters.steps == 0
        await core.resume()
        assert (await core.wait(request)).num_output_tokens == 3


@in_loop
async def test_wait_ends_early_when_another_pause_freezes_the_engine():
    async with running() as core:
        request = core.submit(PROMPT, sampling(3000), "a")
        await steps(core, 3)
        waiting = asyncio.create_task(core.pause("wait"))
        await turns(3)
        await core.pause("keep")
        await waiting
        assert not request.done.done()
        await core.pause("wait")  # frozen already: returns at once, drains nothing
        assert not request.done.done()
        await core.pause("abort")
        assert request.finish_reason == "abort"


@in_loop
async def test_wait_then_resume_leaves_the_engine_running():
    async with running() as core:
        request = core.submit(PROMPT, sampling(200), "a")
        await steps(core, 3)
        waiting = asyncio.create_task(core.pause("wait"))
        await turns(3)
        await core.resume()
        await waiting
        assert request.finish_reason == "length"
        assert not core.is_paused
    assert kinds_of(core, "engine_paused") == []


@in_loop
async def test_a_held_request_is_returned_by_a_second_pause_abort():
    async with running() as core:
        await core.pause("keep")
        held = core.submit(PROMPT, sampling(3), "a")
        await core.pause("abort")
        assert (await core.wait(held)).finish_reason == "abort"
        assert held.output_token_ids == []


@in_loop
async def test_abort_by_id_running_waiting_and_held():
    async with running(max_num_seqs=1) as core:
        run, wait = (core.submit(PROMPT, sampling(4000), name) for name in ("run", "wait"))
        await steps(core, 3)
        assert await core.abort(["run", "wait", "unknown"]) == ["run", "wait"]
        assert (run.finish_reason, wait.finish_reason) == ("abort", "abort")
        await core.pause("keep")
        held = core.submit(PROMPT, sampling(4), "held")
        assert await core.abort(["held"]) == ["held"]
        assert held.done.done()
        await core.resume()
        await turns()
        assert core.scheduler.pool.num_used == 0


@in_loop
async def test_cancelling_a_wait_frees_the_request():
    async with running() as core:
        request = core.submit(PROMPT, sampling(4000), "a")
        task = asyncio.create_task(core.wait(request))
        await steps(core, 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await turns()
        assert request.finish_reason == "abort"
        assert core.scheduler.pool.num_used == 0
        assert not core.scheduler.has_work
    assert [event.finish_reason for event in events_of(core, "request_finished")] == ["abort"]


class GatedRunner(InlineRunner):
    """A step that is under way until the test lets it go on."""

    def __init__(self):
        self.gate, self.waiting = asyncio.Event(), asyncio.Event()

    async def run(self, function):
        self.waiting.set()
        await self.gate.wait()
        return function()


@in_loop
async def test_blocks_of_a_request_aborted_during_a_step_are_freed_after_it():
    async with running() as core:
        core.runner = runner = GatedRunner()
        request = core.submit(PROMPT, sampling(50), "a")
        await runner.waiting.wait()
        assert await core.abort(["a"]) == ["a"]
        assert request.done.done()
        assert request.block_table  # the step still writes there
        runner.gate.set()
        await turns()
        assert request.output_token_ids == []
        assert core.scheduler.pool.num_used == 0


@in_loop
async def test_a_pause_waits_for_the_step_in_progress():
    async with running() as core:
        core.runner = runner = GatedRunner()
        core.submit(PROMPT, sampling(50), "a")
        await runner.waiting.wait()
        pause = asyncio.create_task(core.pause("keep"))
        await turns()
        assert not pause.done()
        runner.gate.set()
        await pause
        assert core.counters.steps == 1


@in_loop
async def test_blocks_that_mix_versions_are_not_cached():
    async with running(prefix_policy="flush") as core:
        await switch(core, V1)
        request = core.submit(list(range(40)), sampling(20), "a")
        await steps(core, 2)
        await core.pause("keep", clear_cache=False)
        await switch(core, V2)
        await core.resume()
        await core.wait(request)
        assert core.scheduler.pool.num_cached == 0


@in_loop
async def test_tokens_of_two_versions_are_told_apart():
    async with running() as core:
        await switch(core, V1)
        request = core.submit(PROMPT, sampling(30), "a")
        await steps(core, 10)
        await core.pause("keep", clear_cache=True)
        have = request.num_output_tokens
        await switch(core, V2)
        await core.resume()
        await core.wait(request)
        first, second = request.spans
        assert (first.identity, first.start, first.end, first.kv) == (V1, 0, have, (1, 1))
        assert (second.identity, second.start, second.end, second.kv) == (V2, have, 30, (1, 2))


@in_loop
async def test_kept_kv_is_said_to_be_old():
    async with running() as core:
        await switch(core, V1)
        request = core.submit(PROMPT, sampling(30), "a")
        await steps(core, 10)
        await core.pause("keep", clear_cache=False)
        await switch(core, V2)
        await core.resume()
        await core.wait(request)
        assert [span.kv for span in request.spans] == [(1, 1), (1, 1)]
        assert [span.identity for span in request.spans] == [V1, V2]
        assert request.recomputed_tokens == 0
    assert events_of(core, "request_finished")[0].kv_version == 1


@in_loop
async def test_a_switch_without_a_pause_recomputes_too():
    async with running() as core:
        request = core.submit(PROMPT, sampling(60), "a")
        await steps(core, 10)
        await switch(core, V1)
        await core.wait(request)
        assert [span.kv for span in request.spans] == [(0, 0), (1, 1)]
        assert request.recomputed_tokens > 0


@pytest.mark.parametrize(("policy", "stale"), [("versioned", False), ("flush", False), ("shared", True)])
@in_loop
async def test_only_the_shared_prefix_cache_crosses_versions(policy, stale):
    async with running(prefix_policy=policy) as core:
        prompt = list(range(40))
        await switch(core, V1)
        await core.wait(core.submit(prompt, sampling(4), "a"))
        again = await core.wait(core.submit(prompt, sampling(4), "b"))
        assert again.spans[0].kv == (1, 1)
        await core.pause("keep", clear_cache=False)
        await switch(core, V2)
        await core.resume()
        last = await core.wait(core.submit(prompt, sampling(4), "c"))
        assert last.spans[0].kv == ((1, 1) if stale else (1, 2))
    found = events_of(core, "cache_hit")
    hits = [(e.request, e.content_version, e.version, e.tokens) for e in found]
    assert all((e.content_term, e.term) == V1.weights[:1] * 2 for e in found)
    assert hits == [("b", 1, 1, 32)] + ([("c", 1, 2, 32)] if stale else [])


@in_loop
async def test_steps_and_writes_do_not_overlap_in_the_trace():
    async with running() as core:
        requests = [core.submit(PROMPT, sampling(40), name) for name in "abc"]
        await steps(core, 5)
        await switch(core, V1)
        for request in requests:
            await core.wait(request)
    kinds = [(r.seq, r.event) for r in core.recorder.records]
    began = next(seq for seq, event in kinds if event.kind == "weight_write_began")
    ended = next(seq for seq, event in kinds if event.kind == "weight_write_ended")
    for seq, event in kinds:
        if event.kind == "model_step":
            assert seq < began or event.began_seq > ended
    active = next(event for _, event in kinds if event.kind == "weights_activated")
    versions = {event.first_step: event.version for _, event in kinds if event.kind == "model_step"}
    assert all(version == (step >= active.first_step) for step, version in versions.items())


@in_loop
async def test_a_switch_that_is_cut_off_leaves_the_engine_out_of_service():
    """Nobody knows what was written: to go on serving would be under the wrong name or half of it."""

    class Slow:
        async def run(self, function):
            function()
            await asyncio.sleep(60)

        def close(self): ...

    async with running() as core:
        core.runner = Slow()
        switching = asyncio.get_running_loop().create_task(switch(core, V1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        switching.cancel()
        await asyncio.gather(switching, return_exceptions=True)
        with pytest.raises(EngineDead):
            core.check_alive()
    assert [event.complete for event in events_of(core, "weight_write_ended")] == [False]
    assert not events_of(core, "weights_activated")


@in_loop
async def test_older_terms_are_refused():
    async with running() as core:
        await core.pause("keep", term=3)
        with pytest.raises(StaleTerm, match=r"has seen term 3\. A new trainer needs first_term=4"):
            await core.resume(term=2)
        with pytest.raises(StaleTerm):
            core.submit(PROMPT, sampling(3), "a", term=1)
        assert core.is_paused
        await core.resume(term=4)
    refused = events_of(core, "request_refused")
    assert [(event.status, event.term) for event in refused] == [(409, 2), (409, 1)]


class Failing(SyntheticPolicy):
    def step(self, scheduled):
        if len(scheduled) > 1:
            raise RuntimeError("out of memory")
        return super().step(scheduled)


@in_loop
async def test_a_failing_step_reaches_every_request_and_stays_visible():
    async with running(Failing()) as core:
        first = core.submit(PROMPT, sampling(400), "a")
        await steps(core, 2)
        second = core.submit(PROMPT, sampling(4), "b")
        waiting = asyncio.create_task(core.pause("wait"))
        for request in (first, second):
            with pytest.raises(EngineDead, match="out of memory"):
                await core.wait(request)
        with pytest.raises(EngineDead):
            await waiting
        for call in (core.check_alive, lambda: core.submit(PROMPT, sampling(4), "c")):
            with pytest.raises(EngineDead, match="out of memory"):
                call()


@in_loop
async def test_score_works_while_paused():
    async with running() as core:
        request = core.submit(PROMPT, sampling(400), "a")
        await steps(core, 2)
        await core.pause("keep")
        scores = await core.score([[1, 2, 3], [4]])
        assert [len(row) for row in scores] == [2, 0]
        assert not request.done.done()
        with pytest.raises(BadRequest, match="out of vocabulary"):
            await core.score([[999]])
        with pytest.raises(BadRequest, match="0 tokens"):
            await core.score([[]])


@in_loop
async def test_closing_fails_what_is_held():
    async with running() as core:
        await core.pause("keep")
        held = core.submit(PROMPT, sampling(3), "a")
        await core.close()
        with pytest.raises(EngineDead, match="was closed"):
            await core.wait(held)


@in_loop
async def test_latency_is_spent_on_the_loops_clock():
    async with running(latency=lambda plan: 0.01 * len(plan.scheduled)) as core:
        began = asyncio.get_running_loop().time()
        await core.wait(core.submit(PROMPT, sampling(5), "a"))
        assert asyncio.get_running_loop().time() - began >= 0.05
    assert all(event.duration_s >= 0.01 for event in events_of(core, "model_step"))
