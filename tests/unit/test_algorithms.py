"""Advantages, losses and corrections against a small reference written another way."""

import dataclasses
import math

import pytest
import torch

from grpo_lab.algorithms import (
    CORRECTIONS,
    OBJECTIVES,
    CorrectionSettings,
    ScoredTokens,
    group_advantages,
    surrogate,
    token_weights,
)
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


def scored(rows, advantages):
    """Tokens of sequences given as rows of (logp, behaviour) pairs, an advantage a row."""
    flat = [pair for row in rows for pair in row]
    logp = torch.tensor([pair[0] for pair in flat], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([pair[1] for pair in flat], dtype=torch.float64)
    lengths = torch.tensor([len(row) for row in rows])
    advantage = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths)
    return ScoredTokens(logp, behaviour, advantage, lengths)


def run(name, tokens, settings=SETTINGS):
    """Value and gradient of every token, and the metrics."""
    loss, correction = (name, "none") if name in OBJECTIVES else ("dapo", name)
    result = surrogate(loss, correction, tokens, settings)
    result.per_token.sum().backward()
    return result.per_token.tolist(), tokens.logp.grad.tolist(), result.metrics


def gradient(name, logp, behaviour, advantage):
    values, slopes, _ = run(name, scored([[(logp, behaviour)]], [advantage]))
    return values[0], slopes[0]


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


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.5, -1.0, -1.5, -1.5),  # below delta: as before
        (9.0, -1.0, -3.0, 0.0),  # above, bad: held at delta
        (9.0, 1.0, 1.3, 0.0),  # above, good: held by the clip long before
    ],
)
def test_delta_bounds_the_other_side_too(ratio, advantage, value, slope):
    settings = dataclasses.replace(SETTINGS, delta=3.0)
    values, slopes, metrics = run("clip", scored([[(-1.0, -1.0 - math.log(ratio))]], [advantage]), settings)
    assert (values[0], slopes[0]) == pytest.approx((value, slope), rel=1e-5, abs=1e-6)
    assert metrics["clipped"] == (slope == 0.0)


ROWS = [
    [(-1.0, -1.2), (-0.5, -0.6), (-2.0, -2.1)],  # ratios a little above 1, their product 1.49
    [(-1.0, -1.6), (-1.0, -1.5)],  # the product is above 2
    [(-2.5, -0.5)],  # a ratio of 0.14
    [(-0.1, -2.5), (-1.0, -1.0)],  # one ratio of 11
]
ADVANTAGES = [1.0, -0.5, 0.8, -1.2]


def sequence_ratio(row):
    return math.prod(math.exp(logp - behaviour) for logp, behaviour in row)


def weights_of(name):
    """Importance weights in the words of the papers, token by token."""
    weights = []
    for row in ROWS:
        for logp, behaviour in row:
            ratio, whole = math.exp(logp - behaviour), sequence_ratio(row)
            weights.append(
                {
                    "mis": whole if whole <= 2.0 else 0.0,
                    "icepop": ratio if 0.5 <= ratio <= 5.0 else 0.0,
                    "decoupled": ratio,
                    "cispo": min(ratio, 1.3),
                }[name]
            )
    return weights


@pytest.mark.parametrize(
    ("name", "counted", "tokens"),
    [("mis", "masked", 4), ("icepop", "masked", 2), ("decoupled", None, 0), ("cispo", "clipped", 3)],
)
def test_weights_are_the_papers(name, counted, tokens):
    """The gradient of a surrogate that weighs is ``weight * A`` for every token."""
    _, slopes, metrics = run(name, scored(ROWS, ADVANTAGES))
    advantage = [value for row, value in zip(ROWS, ADVANTAGES, strict=True) for _ in row]
    expected = [weight * value for weight, value in zip(weights_of(name), advantage, strict=True)]
    assert slopes == pytest.approx(expected, rel=1e-9)
    assert counted is None or metrics[counted] == tokens


def test_gspo_clips_the_geometric_mean_of_a_sequence():
    values, slopes, metrics = run("gspo", scored(ROWS, ADVANTAGES))
    expected_values, expected_slopes, clipped = [], [], 0
    for row, advantage in zip(ROWS, ADVANTAGES, strict=True):
        mean = sequence_ratio(row) ** (1 / len(row))
        bounded = min(mean * advantage, min(max(mean, 0.8), 1.3) * advantage)
        free = bounded == mean * advantage
        clipped += 0 if free else len(row)
        expected_values += [bounded] * len(row)
        # d/dlogp_t of |y| equal values, each of them mean * A: (mean * A / |y|) * |y|
        expected_slopes += [mean * advantage if free else 0.0] * len(row)
    assert values == pytest.approx(expected_values, rel=1e-9)
    assert slopes == pytest.approx(expected_slopes, rel=1e-9)
    assert metrics["clipped"] == clipped


@pytest.mark.parametrize("name", sorted(CORRECTIONS | OBJECTIVES))
def test_no_advantage_no_gradient(name):
    """What lets the trainer leave such samples out of the forward pass."""
    value, slope = gradient(name, -1.0, -2.0, 0.0)
    assert (abs(value), abs(slope)) == (0.0, 0.0)


@pytest.mark.parametrize("name", sorted(CORRECTIONS | OBJECTIVES))
def test_on_policy_every_surrogate_has_the_policy_gradient(name):
    rows = [[(logp, logp) for logp, _ in row] for row in ROWS]
    _, slopes, metrics = run(name, scored(rows, ADVANTAGES))
    assert slopes == pytest.approx([a for row, a in zip(rows, ADVANTAGES, strict=True) for _ in row])
    assert metrics["importance_sum"] == metrics["importance_squares"] == pytest.approx(8.0)
