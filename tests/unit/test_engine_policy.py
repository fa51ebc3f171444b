"""The torch policy against Hugging Face's own forward pass."""

import json
import math

import pytest
import torch
from engine_kit import LLAMA3_ROPE, in_loop, make_model, reference_logprobs, running, sampling
from safetensors.torch import save_file

from grpo_lab.engine.policy import SyntheticPolicy, load
from grpo_lab.engine.torch_policy import TorchPolicy
from grpo_lab.errors import ModelError

MODELS = {
    "llama-tied": ("llama", {}),
    "llama-gqa-untied-biased": (
        "llama",
        {
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
        },
    ),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2-gqa": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen2-tied": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ),
}
PROMPTS = [[2, 3, 4], list(range(2, 25)), [7] * 40, [5]]


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request, tmp_path_factory):
    """(HF model, its directory)."""
    architecture, changes = MODELS[request.param]
    model = make_model(architecture, **changes)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


async def complete(policy, prompts, tokens=12, settings=None, **params):
    async with running(policy, **(settings or {})) as core:
        requests = [
            core.submit(prompt, sampling(tokens, **params), f"r{index}")
            for index, prompt in enumerate(prompts)
        ]
        for request in requests:
            await core.wait(request)
        return requests, core


@in_loop
async def test_scores_equal_hf(pair):
    model, directory = pair
    for prompt, scores in zip(PROMPTS, TorchPolicy(directory).score(PROMPTS), strict=True):
        expected = reference_logprobs(model, prompt) if len(prompt) > 1 else []
        assert scores == pytest.approx(expected, abs=1e-5)


@in_loop
async def test_greedy_tokens_equal_hf(pair):
    model, directory = pair
    requests, _ = await complete(TorchPolicy(directory), PROMPTS, temperature=0.0)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=12,
                min_new_tokens=12,
                eos_token_id=None,
                pad_token_id=0,
            )[0].tolist()
        assert request.token_ids == expected


@in_loop
async def test_sampled_logprobs_equal_hf(pair):
    model, directory = pair
    requests, _ = await complete(TorchPolicy(directory), PROMPTS, tokens=20)
    for request in requests:
        expected = reference_logprobs(model, request.token_ids)[request.num_prompt_tokens - 1 :]
        assert request.logprobs == pytest.approx(expected, abs=1e-5)


@in_loop
async def test_chunks_preemption_and_cached_prefixes_change_nothing(directory):
    prompts = [[*range(2, 20), index] for index in range(2, 14)]
    reference, _ = await complete(TorchPolicy(directory), prompts, tokens=30)
    squeezed, core = await complete(
        TorchPolicy(directory, num_blocks=14), prompts, tokens=30, settings={"max_batched_tokens": 24}
    )
    assert core.scheduler.num_preemptions > 0
    assert core.counters.prefix_hits > 0
    for one, other in zip(reference, squeezed, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@in_loop
async def test_batch_invariant_numbers_are_bitwise_the_same(directory):
    prompts = [[*range(2, 20), index] for index in range(2, 10)]
    together, _ = await complete(TorchPolicy(directory, batch_invariant=True), prompts, tokens=20)
    alone = [
        (await complete(TorchPolicy(directory, batch_invariant=True), [prompt], tokens=20))[0][0]
        for prompt in prompts
    ]
    squeezed, core = await complete(
        TorchPolicy(directory, num_blocks=6, batch_invariant=True),
        prompts,
        tokens=20,
        settings={"max_batched_tokens": 7},
    )
    assert core.scheduler.num_preemptions > 0
    for one, other in zip(together, squeezed, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert (together[0].token_ids, together[0].logprobs) == (alone[0].token_ids, alone[0].logprobs)


@in_loop
async def test_new_weights_are_used_at_once_and_whole(directory):
    policy = TorchPolicy(directory)
    other = make_model("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    before = policy.score([PROMPTS[1]])
    load(policy, dict(other.named_parameters()))
    assert policy.score([PROMPTS[1]])[0] == pytest.approx(reference_logprobs(other, PROMPTS[1]), abs=1e-5)
    assert policy.score([PROMPTS[1]]) != before


def test_loading_another_models_weights_names_what_differs(directory):
    policy = TorchPolicy(directory)
    served = policy.score([PROMPTS[1]])
    weights = dict(make_model("llama").named_parameters())
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], extra \['bogus'\]"):
        load(
            policy, {**{k: v for k, v in weights.items() if k != "model.norm.weight"}, "bogus": torch.ones(1)}
        )
    with pytest.raises(ValueError, match=r"model.norm.weight: shape \(3,\)"):
        load(policy, {**weights, "model.norm.weight": torch.ones(3)})
    assert policy.score([PROMPTS[1]]) == served


@in_loop
async def test_nan_weights_leave_nothing_behind(directory):
    policy = TorchPolicy(directory, num_blocks=4)
    good = {name: tensor.clone() for name, tensor in policy.parameters().items()}
    load(policy, {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()})
    (poisoned,), _ = await complete(policy, [[3, 4, 5]])
    assert not all(map(math.isfinite, poisoned.logprobs))
    load(policy, good)
    (clean,), _ = await complete(policy, [[3, 4, 5]])
    assert all(map(math.isfinite, clean.logprobs))


def test_parameter_names_and_shapes_are_hf_names(pair):
    model, directory = pair
    ours = {name: tuple(tensor.shape) for name, tensor in TorchPolicy(directory).parameters().items()}
    assert ours == {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures="),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type 'yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_models_that_cannot_be_computed_are_refused(tmp_path, change, message):
    make_model("qwen2").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        TorchPolicy(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        TorchPolicy(tmp_path)
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        TorchPolicy(tmp_path)
    save_file({"bogus": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="missing"):
        TorchPolicy(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match="cannot be read"):
        TorchPolicy(tmp_path)


@in_loop
async def test_synthetic_lengths_have_their_mean_and_do_not_depend_on_the_batch():
    policy = SyntheticPolicy(mean_tokens=20, num_blocks=20000)
    prompts = [[1, 2, 3]] * 600
    requests, _ = await complete(policy, prompts, tokens=400, ignore_eos=False)
    lengths = [request.num_output_tokens for request in requests]
    assert sum(lengths) / len(lengths) == pytest.approx(20, abs=3)
    few, _ = await complete(
        SyntheticPolicy(mean_tokens=20),
        prompts[:5],
        tokens=400,
        ignore_eos=False,
        settings={"max_num_seqs": 1},
    )
    assert [r.token_ids for r in few] == [r.token_ids for r in requests[:5]]
