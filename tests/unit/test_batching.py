"""Packing without padding, splits under a budget, and a gradient that does not depend on the split."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_stub import VOCABULARY, sample, tiny_model

from grpo_lab.algorithms import group_advantages
from grpo_lab.errors import ConfigError, InvariantViolation
from grpo_lab.trainer.attention import ATTENTION_NAME
from grpo_lab.trainer.batching import (
    StepPlan,
    pack,
    packed_logprobs,
    same_weights_mask,
    score_sequences,
    split_by_tokens,
    train_samples,
)
from grpo_lab.types import RolloutGroup, VersionSpan


def pairs(count, seed=0, longest=9):
    rng = random.Random(seed)

    def tokens():
        return tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, longest)))

    return [(tokens(), tokens()) for _ in range(count)]


def padded_reference(model, sequences):
    """transformers' own forward pass: right-padded, with a padding mask, eager attention."""
    model.set_attn_implementation("eager")
    longest = max(len(prompt) + len(completion) for prompt, completion in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(sequences):
        whole = torch.tensor(prompt + completion)
        ids[row, : len(whole)] = whole
        mask[row, : len(whole)] = 1
    logp = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    picked = [
        logp[row, len(prompt) - 1 + place, token]
        for row, (prompt, completion) in enumerate(sequences)
        for place, token in enumerate(completion)
    ]
    model.set_attn_implementation(ATTENTION_NAME)
    return torch.stack(picked)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


KINDS = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
]


@pytest.mark.parametrize("longest", [9, 30], ids=["padded inside", "one by one"])
@pytest.mark.parametrize(("kind", "extra"), KINDS, ids=["grouped", "full", "qwen2", "sliding"])
def test_packed_rows_give_the_logprobs_and_gradients_of_padded_batches(kind, extra, longest):
    model = tiny_model(kind, **extra)
    model.set_attn_implementation(ATTENTION_NAME)
    sequences = pairs(7)
    if longest == 30:  # one long sequence among short ones: padding would more than double the tokens
        sequences.append((tuple(range(3, 20)), tuple(range(3, 20))))
    packed = packed_logprobs(model, pack(sequences, "cpu"))
    weights = torch.linspace(-1, 1, packed.numel())
    (packed * weights).sum().backward()
    ours = gradients(model)
    model.zero_grad()
    expected = padded_reference(model, sequences)
    (expected * weights).sum().backward()
    assert torch.allclose(packed, expected, atol=1e-5)
    for name, gradient in gradients(model).items():
        assert torch.allclose(ours[name], gradient, atol=1e-5), name


def test_sequences_in_a_row_do_not_see_each_other():
    model = tiny_model()
    model.set_attn_implementation(ATTENTION_NAME)
    first, other, third = pairs(3)
    one = packed_logprobs(model, pack([first, third], "cpu"))[-len(third[1]) :]
    two = packed_logprobs(model, pack([other, third], "cpu"))[-len(third[1]) :]
    assert torch.allclose(one, two, atol=1e-6)


def test_a_switched_model_still_runs_plain_batches_and_generates():
    model = tiny_model().eval()
    ids = torch.randint(3, VOCABULARY, (2, 6))
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        model.set_attn_implementation(ATTENTION_NAME)
        got = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        written = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.allclose(got, expected, atol=1e-5)
    assert written.shape[0] == 2


def test_scores_are_of_every_token_but_the_first():
    model = tiny_model().eval()
    model.set_attn_implementation(ATTENTION_NAME)
    rows = score_sequences(model, [[5, 6, 7], [8], [], [9, 10]], "cpu")
    assert [len(row) for row in rows] == [2, 0, 0, 1]
    expected = model(input_ids=torch.tensor([[5, 6, 7]])).logits.log_softmax(-1)[0]
    assert rows[0] == pytest.approx([expected[0, 6].item(), expected[1, 7].item()], abs=1e-5)


def test_temperature_scales_the_logits():
    model = tiny_model()
    model.set_attn_implementation(ATTENTION_NAME)
    batch = pack(pairs(2), "cpu")
    logits = model(input_ids=batch.input_ids[:, : len(pairs(2)[0][0])], use_cache=False).logits[0, -1]
    expected = (logits / 0.5).log_softmax(-1)[batch.targets[0]]
    assert packed_logprobs(model, batch, 0.5)[0].item() == pytest.approx(expected.item(), abs=1e-5)


@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.integers(1, 5),
    st.integers(40, 200),
)
def test_splits_lose_nothing_and_keep_the_budget(lengths, ranks, budget):
    shares = split_by_tokens(lengths, ranks, budget)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    assert sorted(index for share in shares for one in share for index in one) == list(range(len(lengths)))
    loads = [[sum(lengths[index] for index in one) for one in share] for share in shares]
    assert max(map(max, loads)) <= budget
    spread = [sum(share) for share in loads]
    passes = len(shares[0])
    assert max(spread) - min(spread) <= max(lengths, default=0) * passes  # Graham: a bin's excess is one item


def test_a_sample_larger_than_the_budget_is_named():
    with pytest.raises(ConfigError, match="token_budget=10: expected at least 12"):
        split_by_tokens([3, 12], 1, 10)


def group(number, rewards, lengths, version=1, **extra):
    samples = [
        sample(f"{number}/{place}", (3, 4), range(5, 5 + length), reward, version, **extra)
        for place, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return RolloutGroup(str(number), number, number, 1, tuple(samples), version)


SETTINGS = {"scale_rewards": "group", "advantage_epsilon": 1e-4, "max_completion_length": 8}


def test_samples_without_signal_are_left_out_but_counted_in_the_normaliser():
    rewards = [[1.0, 0.0, None], [0.5, 0.5, 0.5]]
    plan = StepPlan(1, 0, 1, (group(0, rewards[0], [2, 3, 4]), group(1, rewards[1], [1, 1, 2])))
    kept = train_samples(plan, loss_type="dapo", **SETTINGS)
    assert [item.sample.sample_id for item in kept] == ["0/0", "0/1"]
    assert [item.advantage for item in kept] == group_advantages(rewards)[0][:2]
    tokens_with_reward = 2 + 3 + 1 + 1 + 2
    assert kept[0].token_weight == 1 / tokens_with_reward


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, float("nan")], [-1.0, float("-inf")]])
def test_bad_behaviour_logprobs_break_rule_s24(logprobs):
    plan = StepPlan(1, 0, 1, (group(0, [1.0, 0.0], [2, 2], logprobs=logprobs),))
    with pytest.raises(InvariantViolation) as caught:
        train_samples(plan, loss_type="dapo", **SETTINGS)
    assert caught.value.rule == "S24"


def test_only_tokens_of_the_trainers_own_weights_are_compared():
    one = sample("a", (3,), (4, 5, 6, 7, 8), 1.0, 2)
    spans = (
        VersionSpan(1, 1, 0, 1),
        VersionSpan(1, 2, 1, 2, kv_version=1),
        VersionSpan(1, 2, 2, 4, kv_version=2),
        VersionSpan(2, 2, 4, 5),
    )
    object.__setattr__(one, "spans", spans)
    assert same_weights_mask(one, term=1, version=2) == [False, False, True, True, False]
    object.__setattr__(one, "spans", ())
    assert same_weights_mask(one, term=1, version=2) == [True] * 5
    assert same_weights_mask(one, term=1, version=3) == [False] * 5
