"""Advantages, losses and corrections against a small reference written another way."""

import math

import pytest
import torch

from grpo_lab.algorithms import CORRECTIONS, CorrectionSettings, group_advantages, token_weights
from grpo_lab.errors import ConfigError

SETTINGS = CorrectionSettings(epsilon=0.2, epsilon_high=0.3, tis_cap=2.0)


def test_advantages_are_those_of_torch():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.5], [2.0, -1.0, 0.25, 0.0]])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    assert torch.allclose(torch.tensor(group_advantages(rewards.tolist())), expected)
    over_batch = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)
    assert torch.allclose(torch.tensor(group_advantages(rewards.tolist(), "batch")), over_batch)
    centred = rewards - rewards.mean(1, keepdim=True)
    assert torch.allclose(torch.tensor(group_advantages(rewards.tolist(), "none")), centred)


def test_samples_without_a_reward_do_not_count():
    assert group_advantages([[1.0, None, 0.0]])[0][1] is None
    with_none = group_advantages([[1.0, None, 0.0]])[0]
    without = group_advantages([[1.0, 0.0]])[0]
    assert [with_none[0], with_none[2]] == without


@pytest.mark.parametrize("rewards", [[0.3] * 4, [1.0], [None, None], [None, 7.0], [0.1 + 0.2, 0.1 + 0.2]])
def test_no_signal_is_exactly_zero(rewards):
    for scale in ("group", "batch", "none"):
        assert all(advantage in (0.0, None) for advantage in group_advantages([rewards], scale)[0])


def reference_loss(loss_type, per_token, lengths, longest):
    """Averages spelled out with loops, in the words of the papers."""
    rows, start = [], 0
    for length in lengths:
        rows.append(per_token[start : start + length])
        start += length
    if loss_type == "grpo":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if loss_type == "dapo":
        return sum(sum(row) for row in rows) / sum(lengths)
    return sum(sum(row) for row in rows) / (longest * len(rows))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_token_weights_are_the_papers_averages(loss_type):
    lengths = [3, 1, 5, 2]
    per_token = [math.sin(index) for index in range(sum(lengths))]
    weights = token_weights(loss_type, lengths, max_completion_length=9)
    spread = [weight for weight, length in zip(weights, lengths, strict=True) for _ in range(length)]
    total = sum(weight * value for weight, value in zip(spread, per_token, strict=True))
    assert total == pytest.approx(reference_loss(loss_type, per_token, lengths, 9), rel=1e-12)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_empty_completions_have_no_weight_to_divide_by_zero(loss_type):
    assert all(map(math.isfinite, token_weights(loss_type, [0, 0], 4)))
    assert token_weights(loss_type, [], 4) == []


def test_an_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match="loss_type='ppo'"):
        token_weights("ppo", [1], 1)


def gradient(name, logp, behaviour, advantage):
    logp = torch.tensor([logp], requires_grad=True)
    surrogate = CORRECTIONS[name](logp, torch.tensor([behaviour]), torch.tensor([advantage]), SETTINGS)
    surrogate.per_token.sum().backward()
    return surrogate.per_token.item(), logp.grad.item()


@pytest.mark.parametrize("behaviour", [-5.0, -1.0, -0.1])
def test_none_holds_the_ratio_at_one_whatever_the_behaviour_policy_was(behaviour):
    assert gradient("none", -1.0, behaviour, 0.7) == pytest.approx((0.7, 0.7))


@pytest.mark.parametrize(
    ("logp", "behaviour", "weight"),
    [(-1.0, -1.0, 1.0), (-1.0, -1.5, math.exp(0.5)), (-1.0, -9.0, 2.0), (-3.0, -1.0, math.exp(-2.0))],
)
def test_tis_weighs_by_the_truncated_ratio(logp, behaviour, weight):
    value, slope = gradient("tis", logp, behaviour, 0.5)
    assert value == pytest.approx(0.5 * weight, rel=1e-6)
    assert slope == pytest.approx(0.5 * weight, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 1.0, 1.1, 1.1),  # inside
        (1.5, 1.0, 1.3, 0.0),  # above, good: held at 1 + epsilon_high
        (1.5, -1.0, -1.5, -1.5),  # above, bad: pushed back
        (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0),  # below, bad: held at 1 - epsilon
    ],
)
def test_clip_is_ppos_pessimistic_bound(ratio, advantage, value, slope):
    got = gradient("clip", -1.0, -1.0 - math.log(ratio), advantage)
    assert got == pytest.approx((value, slope), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_no_advantage_no_gradient(name):
    """What lets the trainer leave such samples out of the forward pass."""
    assert gradient(name, -1.0, -2.0, 0.0) == (0.0, 0.0)
