"""Parts of event mode: latency, drawn lengths, what it refuses."""

import asyncio

import numpy as np
import pytest
from engine_kit import in_loop

from grpo_lab.engine.drawn import RepeatPolicy, lognormal_quantile, uniform
from grpo_lab.engine.event_mode import EventCore, Jump
from grpo_lab.engine.failures import BadRequest
from grpo_lab.engine.latency import LatencyModel
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.request import Request, Scheduled
from grpo_lab.engine.sampling import uniforms
from grpo_lab.engine.scheduler import StepPlan
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.errors import ConfigError
from grpo_lab.recorders import ListRecorder
from grpo_lab.sim.loop import VirtualLoop
from grpo_lab.types import SamplingParams

MODEL = LatencyModel(0.02, prefill_token_s=1e-4, sequence_s=1e-3, context_token_s=1e-5, jitter=0.4, seed=5)


def plan(sequences, prefill=0, context=0):
    return StepPlan([], prefill, sequences, sequences, context)


def test_a_step_costs_its_parts():
    model = LatencyModel(0.02, prefill_token_s=1e-4, sequence_s=1e-3, context_token_s=1e-5)
    assert model.step_s(plan(3, prefill=10, context=100), 7) == pytest.approx(0.02 + 0.001 + 0.003 + 0.001)


def test_many_steps_cost_what_they_cost_one_by_one():
    """Across the end of a table of drawn jitter too."""
    first, count = 4090, 4100
    many = MODEL.durations_s(plan(3, context=50), first, count)
    single = [MODEL.step_s(plan(3, context=50 + 3 * i), first + i) for i in range(count)]
    assert many.tolist() == single


def test_jitter_is_spread_about_one_and_depends_on_seed_and_step():
    factors = LatencyModel(1.0, jitter=0.4, seed=1).durations_s(plan(1), 1, 5000)
    assert 0.6 <= factors.min() < 0.61
    assert 1.39 < factors.max() <= 1.4
    assert abs(factors.mean() - 1) < 0.01
    other = LatencyModel(1.0, jitter=0.4, seed=2).durations_s(plan(1), 1, 5000)
    assert not np.array_equal(factors, other)


@pytest.mark.parametrize(
    ("field", "value"), [("base_s", 0.0), ("sequence_s", -1.0), ("jitter", 1.0), ("context_token_s", np.nan)]
)
def test_limits_of_a_latency_model(field, value):
    with pytest.raises(ConfigError, match=field):
        LatencyModel(**{"base_s": 0.1, field: value})


def test_one_uniform_is_the_same_as_many():
    keys, places = [0, 1, 2**63 + 7, 2**64 - 1], [0, 5, 1000, 3]
    drawn = [uniform(key, place) for key, place in zip(keys, places, strict=True)]
    assert drawn == uniforms(keys, places).tolist()


def request(key, loop, **params):
    sampling = SamplingParams(**{"max_tokens": 500} | params)
    one = Request("a", (1, 2, 3), sampling, loop.create_future(), sample_key=key)
    one.stop_token_ids = frozenset({255})
    return one


@pytest.mark.parametrize(
    "policy", [SyntheticPolicy(mean_tokens=40), RepeatPolicy(lognormal_quantile(40, 0.8))]
)
def test_what_is_drawn_at_once_is_what_single_steps_draw(policy):
    loop = asyncio.new_event_loop()
    for key in range(1, 40):
        one, other = request(key, loop, min_tokens=key % 7), request(key, loop, min_tokens=key % 7)
        tokens, logprobs = policy.draw(one, policy.final_tokens(one))
        for token, logprob in zip(tokens, logprobs, strict=True):
            output = policy.step([Scheduled(other, len(other.token_ids) - 1, 1)])
            assert output.token_ids == [token]
            assert output.logprobs == pytest.approx([logprob])
            other.token_ids += output.token_ids
        assert 255 not in tokens[:-1] or key % 7 > tokens.index(255)
        assert tokens[-1] == 255 or len(tokens) == 500
    loop.close()


def test_lengths_have_the_mean_that_was_asked_for():
    quantile = lognormal_quantile(100 * np.exp(-0.32), 0.8)
    drawn = [quantile((i + 0.5) / 20_000) for i in range(20_000)]
    assert np.mean(drawn) == pytest.approx(100, rel=0.01)


def test_a_jump_is_cut_at_the_end_of_the_step_under_way():
    loop = VirtualLoop()

    async def main():
        jump = Jump(np.array([1.0, 2.0, 3.0, 4.0]))
        await asyncio.sleep(1.5)
        jump.cut()
        assert (jump.ended_steps, jump.steps) == (1, 2)
        await jump.over
        assert loop.time() == 2.0
        jump.cut()
        assert jump.steps == 2

    loop.run_until_complete(main())
    loop.close()


@in_loop
async def test_what_looks_at_single_tokens_is_refused():
    recorder = ListRecorder("engine-0", lambda: 0.0)
    core = EventCore(SyntheticPolicy(), recorder, EngineConfig(), timing=MODEL)
    for extra in ({"stop_strings": ("a",)}, {"top_logprobs": 2}):
        with pytest.raises(BadRequest, match="step mode"):
            core.submit([1], SamplingParams(), "a", **extra)


def test_a_policy_must_know_its_lengths():
    class Blind:
        num_blocks = 1

    with pytest.raises(ConfigError, match="Blind"):
        EventCore(Blind(), ListRecorder("engine-0", lambda: 0.0), timing=MODEL)


def test_an_engine_has_a_rank():
    with pytest.raises(ConfigError, match="ranks"):
        EngineConfig(ranks=0)
