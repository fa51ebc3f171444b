import asyncio

import pytest

from grpo_lab.engine.block_pool import BLOCK_TOKENS, BlockPool
from grpo_lab.engine.request import Request
from grpo_lab.engine.scheduler import Scheduler
from grpo_lab.types import SamplingParams

VERSION = (1, 1)


def request(name, tokens, start=0):
    done = asyncio.Future(loop=asyncio.new_event_loop())
    return Request(name, tuple(range(start, start + tokens)), SamplingParams(), done)


def scheduler(blocks=64, seqs=8, budget=64):
    return Scheduler(BlockPool(blocks), seqs, budget)


def run(one, draw=True):
    """One step without a model: every sequence that reached its end gets a token."""
    plan = one.schedule(VERSION)
    for item in plan.scheduled:
        samples = item.samples
        one.commit(item.request, item.count, VERSION, reusable=True)
        if samples and draw:
            item.request.token_ids.append(0)
    return plan


def shape(plan):
    return [(item.request.request_id, item.start, item.count) for item in plan.scheduled]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes():
    one = scheduler(budget=32)
    one.add(request("a", 4))
    run(one)
    one.add(request("b", 70, start=100))
    assert shape(run(one)) == [("a", 4, 1), ("b", 0, 31)]
    assert shape(run(one)) == [("a", 5, 1), ("b", 31, 31)]
    plan = run(one)
    assert shape(plan) == [("a", 6, 1), ("b", 62, 8)]
    assert [item.samples for item in one.schedule(VERSION).scheduled] == [True, True]
    assert (plan.prefill_tokens, plan.decode_tokens) == (8, 1)


def test_places_in_the_batch_are_limited():
    one = scheduler(seqs=2)
    for name in "abc":
        one.add(request(name, 3))
    assert [row[0] for row in shape(run(one))] == ["a", "b"]
    one.remove([one.running[0]])
    assert [row[0] for row in shape(run(one))] == ["b", "c"]


def test_the_youngest_is_preempted_and_loses_no_token():
    one = scheduler(blocks=4)
    old, young = request("old", 31), request("young", 31, start=100)
    one.add(old)
    one.add(young)
    run(one)  # two blocks each
    plan = run(one)  # the 32nd token still fits
    assert plan.preempted == []
    plan = run(one)  # both need a third block
    assert plan.preempted == [young]
    assert shape(plan) == [("old", 32, 1)]
    assert list(one.waiting) == [young]
    assert young.recomputed_tokens == 32
    assert (young.num_computed_tokens, young.block_table) == (0, [])
    assert len(young.token_ids) == 33
    one.remove([old])
    plan = one.schedule(VERSION)
    assert plan.scheduled[-1].request is young
    assert plan.scheduled[-1].start + plan.scheduled[-1].count == 33


def test_a_preempted_request_finds_its_own_full_blocks_again():
    one = scheduler(blocks=8)
    lone = request("a", 2 * BLOCK_TOKENS + 3)
    one.add(lone)
    run(one)
    one.preempt(lone)
    plan = one.schedule(VERSION)
    assert plan.hits == [(lone, 2 * BLOCK_TOKENS, VERSION)]
    assert shape(plan) == [("a", 2 * BLOCK_TOKENS, 4)]


def test_blocks_of_a_shared_prefix_are_counted_once():
    one = scheduler(blocks=8)
    for name in ("a", "b", "c"):
        one.add(request(name, 2 * BLOCK_TOKENS + 1))
        run(one)
    assert one.pool.num_used == 2 + 3
    one.remove(list(one.running))
    assert one.pool.num_used == 0


def test_blocks_that_mix_versions_are_nobody_elses():
    one = scheduler()
    mixed = request("a", 2 * BLOCK_TOKENS + 1)
    one.add(mixed)
    plan = one.schedule(VERSION)
    one.commit(mixed, plan.scheduled[0].count, VERSION, reusable=False)
    assert one.pool.num_cached == 0


def test_preempt_all_keeps_the_order_of_arrival():
    one = scheduler()
    for name in "abc":
        one.add(request(name, 3))
    run(one)
    assert one.preempt_all() == 9
    assert [r.request_id for r in one.waiting] == ["a", "b", "c"]
    assert one.pool.num_used == 0


def test_a_waiting_request_that_does_not_fit_waits():
    one = scheduler(blocks=3)
    one.add(request("a", 2 * BLOCK_TOKENS))
    run(one)
    one.add(request("b", BLOCK_TOKENS + 1, start=100))
    assert [row[0] for row in shape(run(one))] == ["a"]


def test_removing_a_waiting_request():
    one = scheduler(seqs=1)
    for name in "ab":
        one.add(request(name, 3))
    run(one)
    one.remove(list(one.waiting))
    assert not one.waiting


def test_limits_are_checked():
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        Scheduler(BlockPool(1), 0, 1)
