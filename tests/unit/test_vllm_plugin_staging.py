"""What the plugin does before weights are touched: the plan compared, the update staged and verified."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from engine_kit import FakeReceiver, init_info, make_model, pack, update_info

from grpo_lab.errors import BucketCorrupt, HandshakeError, PeerDied, TransportError
from grpo_lab.packing import BucketPlan
from grpo_lab.types import SyncId
from grpo_lab.vllm_plugin.model_plan import Expected, plan_of
from grpo_lab.vllm_plugin.staging import StagedUpdate

SYNC = SyncId(1, 2)
MORE = SyncId(1, 3)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.a.weight": (40, 30), "model.b.weight": (50,), "model.c.weight": (3, 5, 7)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def joined(tensors):
    plan, buckets = pack(tensors)
    receiver = FakeReceiver(buckets)
    staged = StagedUpdate({"fake": lambda: receiver})
    staged.join(init_info(plan), plan)
    yield SimpleNamespace(staged=staged, plan=plan, receiver=receiver, buckets=buckets)
    staged.close()


def test_an_update_is_handed_out_whole(joined, tensors):
    assert joined.plan.num_buckets > 1
    with pytest.raises(TransportError, match="no verified weights"):
        joined.staged.take()
    joined.staged.begin()
    assert joined.staged.receive(update_info(SYNC, joined.plan)) == SYNC
    taken = joined.staged.take()
    assert taken.keys() == tensors.keys()
    assert all(torch.equal(taken[name], tensors[name]) for name in tensors)
    joined.staged.begin()
    with pytest.raises(TransportError, match="no verified weights"):
        joined.staged.take()


def corrupt(buckets):
    memory = memoryview(bytearray(buckets[1].memory))
    memory[7] ^= 1
    return [buckets[0], dataclasses.replace(buckets[1], memory=memory), *buckets[2:]]


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (corrupt, BucketCorrupt, "bucket 1 is corrupt"),
        (lambda buckets: buckets[:-1], TransportError, "1 of 2 buckets never came"),
        (lambda buckets: [*buckets, buckets[0]], BucketCorrupt, "came twice"),
        (lambda buckets: [], TransportError, "2 of 2 buckets never came"),
    ],
)
def test_what_is_not_whole_is_not_handed_out(joined, spoil, error, words):
    joined.receiver.buckets = spoil(joined.buckets)
    with pytest.raises(error, match=words):
        joined.staged.receive(update_info(SYNC, joined.plan))
    with pytest.raises(TransportError, match="no verified weights"):
        joined.staged.take()


def test_a_good_update_follows_a_bad_one(joined, tensors):
    joined.receiver.error = PeerDied("the sender closed the connection")
    with pytest.raises(PeerDied):
        joined.staged.receive(update_info(SYNC, joined.plan))
    joined.receiver.error = None
    assert joined.staged.receive(update_info(MORE, joined.plan)) == MORE
    assert torch.equal(joined.staged.take()["model.b.weight"], tensors["model.b.weight"])


def test_a_new_join_leaves_the_old_transfer(joined):
    joined.staged.receive(update_info(SYNC, joined.plan))
    joined.staged.join(init_info(joined.plan), joined.plan)
    assert (joined.receiver.joined, joined.receiver.closed) == (2, 1)
    with pytest.raises(TransportError, match="no verified weights"):
        joined.staged.take()


def test_bad_requests_are_named(joined):
    with pytest.raises(HandshakeError, match="backend='nccl'; this engine has fake"):
        joined.staged.join({"backend": "nccl"}, joined.plan)
    with pytest.raises(HandshakeError, match="is not a sync identity"):
        joined.staged.receive({"sync": "latest"})
    joined.staged.leave()
    with pytest.raises(TransportError, match="not initialized"):
        joined.staged.receive(update_info(SYNC, joined.plan))


def test_it_works_where_another_loop_has_run(tensors):
    """vLLM's worker has no loop of its own running, but may have had one."""
    asyncio.run(asyncio.sleep(0))
    plan, buckets = pack(tensors)
    staged = StagedUpdate({"fake": lambda: FakeReceiver(buckets)})
    staged.join(init_info(plan), plan)
    assert staged.receive(update_info(SYNC, plan)) == SYNC
    staged.close()
    staged.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_models_own_plan_fits(architecture, tied):
    model = make_model(architecture, tie_word_embeddings=tied)
    expected = Expected.of_config(model.config)
    plan = BucketPlan.build(dict(model.named_parameters()))
    assert plan_of(init_info(plan), expected) == plan
    named_twice = BucketPlan.build(dict(model.named_parameters(remove_duplicate=False)))
    assert plan_of(init_info(named_twice), expected) == named_twice
    assert bool(expected.tied) == tied


def differing(change):
    model = make_model("llama", tie_word_embeddings=True)
    tensors = dict(model.named_parameters())
    change(tensors)
    return init_info(BucketPlan.build(tensors)), Expected.of_config(model.config)


def drop(tensors):
    del tensors["model.norm.weight"]


def add(tensors):
    tensors["model.extra.weight"] = torch.zeros(3)


def transpose(tensors):
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def to_integers(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


def untie(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def tie(tensors):
    tensors["model.layers.0.input_layernorm.weight"] = tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop, "missing model.norm.weight; extra nothing"),
        (add, "missing nothing; extra model.extra.weight"),
        (transpose, r"down_proj.weight: shape \(80, 48\) in the plan, \(48, 80\) in the model"),
        (to_integers, "dtype int32 in the plan, a float in the model"),
        (untie, "are tied in the model, not in the plan"),
        (tie, "are tied in the plan, not in the model"),
    ],
)
def test_a_plan_of_another_model_is_refused_by_name(change, words):
    info, expected = differing(change)
    with pytest.raises(HandshakeError, match=words):
        plan_of(info, expected)


def test_a_digest_of_another_plan_is_refused():
    info, expected = differing(lambda tensors: None)
    with pytest.raises(HandshakeError, match="but the plan itself has"):
        plan_of({**info, "plan_digest": "0" * 32}, expected)


def test_an_unknown_architecture_cannot_be_compared():
    config = SimpleNamespace(model_type="nobody-knows")
    assert Expected.of_config(config) is None
    info, _ = differing(add)
    assert plan_of(info, None).digest() == info["plan_digest"]
