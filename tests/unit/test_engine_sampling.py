import math
from collections import Counter

import numpy as np
import pytest
import torch

from grpo_lab.engine.request import Request, sample_key
from grpo_lab.engine.sampling import sample, uniforms
from grpo_lab.types import SamplingParams


def request(seed=0, stops=(), prompt=(5,), **params):
    wanted = SamplingParams(**params)
    return Request(
        "r", prompt, wanted, None, sample_key=sample_key(0, "r", seed), stop_token_ids=frozenset(stops)
    )


def draws(logits, count=4000, **params):
    requests = [request(seed, **params) for seed in range(count)]
    output = sample(logits[None].repeat(count, 1), requests)
    return Counter(output.token_ids), output


def test_frequencies_are_those_of_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -30.0])
    counts, output = draws(logits, 20000)
    expected = logits.softmax(-1)
    for token in range(4):
        sigma = math.sqrt(20000 * expected[token] * (1 - expected[token]))
        assert abs(counts[token] - 20000 * expected[token]) < 4 * sigma
    assert counts[4] == 0
    assert output.logprobs == pytest.approx([logits.log_softmax(-1)[t].item() for t in output.token_ids])


def test_temperature_shapes_both_tokens_and_logprobs():
    logits = torch.tensor([0.0, 1.0, 2.0])
    counts, output = draws(logits, temperature=0.5)
    expected = (logits / 0.5).softmax(-1)
    assert counts[2] / 4000 == pytest.approx(expected[2].item(), abs=0.04)
    assert output.logprobs[0] == pytest.approx(expected[output.token_ids[0]].log().item(), abs=1e-6)


def test_greedy_takes_the_best_and_reports_temperature_one():
    logits = torch.tensor([0.0, 3.0, 2.0])
    counts, output = draws(logits, 50, temperature=0.0, top_k=1)
    assert counts == {1: 50}
    assert output.logprobs[0] == pytest.approx(logits.log_softmax(-1)[1].item())


def test_top_k_and_top_p_renormalise():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    counts, output = draws(logits, top_k=2)
    assert set(counts) == {0, 1}
    assert output.logprobs[0] == pytest.approx(math.log([2 / 3, 1 / 3][output.token_ids[0]]), abs=1e-6)
    assert set(draws(logits, top_p=0.75)[0]) == {0, 1}
    assert set(draws(logits, top_p=0.76)[0]) == {0, 1, 2}
    assert set(draws(logits, top_p=0.01)[0]) == {0}


def test_rows_with_other_parameters_do_not_disturb_each_other():
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    rows = [request(1, top_k=3), request(2, temperature=0.0), request(3)]
    together = sample(logits, rows)
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1], [row])
        assert alone.token_ids[0] == together.token_ids[index]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[index], abs=1e-6)


def test_min_tokens_forbids_stopping():
    logits = torch.tensor([0.0, 20.0, 0.0])
    assert set(draws(logits, 200, stops=(1,), min_tokens=1)[0]) == {0, 2}
    assert set(draws(logits, 200, stops=(1,))[0]) == {1}


def test_top_logprobs_are_sorted():
    logits = torch.tensor([0.0, 3.0, 2.0])
    row = replace_top(request(), 2)
    assert [token for token, _ in sample(logits[None], [row]).top[0]] == [1, 2]


def replace_top(row, count):
    row.top_logprobs = count
    return row


def test_random_numbers_depend_on_key_and_position_alone():
    assert uniforms([3, 9], [4, 5])[1] == uniforms([9], [5])[0]
    assert uniforms([3], [4])[0] != uniforms([3], [5])[0]


def test_random_numbers_are_uniform_along_keys_and_along_positions():
    keys = uniforms([sample_key(0, "", seed) for seed in range(20000)], [7] * 20000)
    positions = uniforms([sample_key(0, "", 1)] * 20000, range(20000))
    for values in (keys, positions):
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square with 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_sample_keys():
    assert sample_key(0, "a", 5) == sample_key(0, "b", 5)
    assert sample_key(0, "a", None) != sample_key(0, "b", None)
    assert sample_key(0, "a", 5) != sample_key(1, "a", 5)


def test_the_very_end_of_the_distribution_is_a_token(monkeypatch):
    monkeypatch.setattr("grpo_lab.engine.sampling.uniforms", lambda *_: np.array([1.0]))
    output = sample(torch.tensor([[0.0, 1.0, -math.inf]]), [request()])
    assert output.token_ids == [1]
