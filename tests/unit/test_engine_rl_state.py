"""Weight updates: staged, verified, idempotent, fenced."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
from engine_kit import (
    FakeReceiver,
    events_of,
    in_loop,
    init_info,
    kinds_of,
    make_model,
    pack,
    running,
    sampling,
    turns,
    update_info,
)

from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.rl_state import RlState, UpdateError
from grpo_lab.engine.torch_policy import TorchPolicy
from grpo_lab.errors import HandshakeError, PeerDied
from grpo_lab.types import SyncId

SHAPES = {"a.weight": (50, 30), "b.weight": (7,), "c.weight": (40, 40)}
V1, V2 = SyncId(1, 1), SyncId(1, 2)


def weights(fill):
    return {name: torch.full(shape, float(fill)) for name, shape in SHAPES.items()}


@asynccontextmanager
async def engine(policy=None):
    """(engine, RL state, receiver, plan, buckets of weights filled with 1)."""
    policy = policy or SyntheticPolicy(shapes=SHAPES)
    receiver = FakeReceiver()
    async with running(policy) as core:
        rl = RlState(core, {"fake": lambda: receiver})
        plan, buckets = pack(weights(1))
        assert plan.num_buckets == 4
        receiver.buckets = buckets
        await rl.init(init_info(plan))
        yield core, rl, receiver, plan, buckets
        await rl.close()


async def sync(rl, plan, identity=V1):
    await rl.start(identity)
    await rl.update(update_info(identity, plan), identity)
    await rl.finish(str(identity), identity)


def served(core):
    return {name: sorted(set(tensor.flatten().tolist())) for name, tensor in core.policy.parameters().items()}


ALL = {name: [1.0] for name in SHAPES}
NONE = {name: [0.0] for name in SHAPES}


@in_loop
async def test_a_whole_update_is_served():
    async with engine() as (core, rl, receiver, plan, _):
        await rl.start(V1)
        await rl.update(update_info(V1, plan), V1)
        assert served(core) == NONE  # staged, not served
        assert rl.weight_version == "default"
        await rl.finish("t1.v1.a1", V1)
        assert served(core) == ALL
        assert rl.weight_version == "t1.v1.a1"
        received = events_of(core, "bucket_received")
        assert [event.bucket for event in received] == list(range(plan.num_buckets))
        assert all(event.accepted and event.hash64 == event.expected_hash64 for event in received)
    assert kinds_of(
        core,
        "update_started",
        "weight_write_began",
        "weight_write_ended",
        "weights_loaded",
        "weights_activated",
        "update_failed",
    ) == ["update_started", "weight_write_began", "weight_write_ended", "weights_loaded", "weights_activated"]
    assert receiver.closed == 1


@in_loop
async def test_equal_weights_have_equal_hashes_on_every_engine_and_attempt():
    hashes = []
    for identity in (V1, SyncId(1, 1, 2)):
        async with engine() as (core, rl, _, plan, _buckets):
            await sync(rl, plan, identity)
            hashes.append(events_of(core, "weights_loaded")[0].weights_hash)
    assert hashes[0] == hashes[1] != ""


def corrupt(bucket):
    memory = memoryview(bytearray(bucket.memory))
    memory[5] ^= 1
    return replace(bucket, memory=memory)


BROKEN = {
    "corrupt": (lambda b: [b[0], corrupt(b[1]), *b[2:]], "bucket 1 is corrupt"),
    "truncated": (lambda b: [replace(b[0], memory=b[0].memory[:-4]), *b[1:]], "bucket 0 is corrupt"),
    "missing": (lambda b: b[:-1], "1 of 4 buckets never came"),
    "none": (lambda b: [], "4 of 4 buckets never came"),
    "twice": (lambda b: [b[0], b[0], *b[1:]], "bucket 0 came twice"),
    "another's": (lambda b: [replace(b[0], index=9), *b[1:]], "no bucket 9"),
    "swapped": (lambda b: [replace(b[1], index=0), *b[1:]], "bucket 0 is corrupt"),
}


@pytest.mark.parametrize("case", list(BROKEN))
@in_loop
async def test_a_broken_update_leaves_the_previous_weights_and_can_be_retried(case):
    spoil, message = BROKEN[case]
    async with engine() as (core, rl, receiver, plan, _):
        await sync(rl, plan, V1)
        _, newer = pack(weights(2))
        receiver.buckets = spoil(newer)
        await rl.start(V2)
        with pytest.raises(UpdateError, match=message):
            await rl.update(update_info(V2, plan), V2)
        with pytest.raises(UpdateError, match="without a matching start"):
            await rl.finish(str(V2), V2)
        assert served(core) == ALL
        assert rl.weight_version == str(V1)
        (failed,) = events_of(core, "update_failed")
        assert (failed.version, failed.weights) == (2, "previous")
        request = await core.wait(core.submit([1, 2], sampling(3), "a"))
        assert request.spans[0].identity.label == str(V1)
        receiver.buckets = newer
        await sync(rl, plan, SyncId(1, 2, 2))
        assert served(core) == {name: [2.0] for name in SHAPES}


@in_loop
async def test_a_dead_sender_closes_the_session():
    async with engine() as (core, rl, receiver, plan, buckets):
        receiver.buckets, receiver.error = buckets[:1], PeerDied("engine-0: the sender closed the connection")
        await rl.start(V1)
        with pytest.raises(UpdateError, match="closed the connection"):
            await rl.update(update_info(V1, plan), V1)
        assert served(core) == NONE
        assert "PeerDied" in events_of(core, "update_failed")[0].reason


@in_loop
async def test_finish_before_all_buckets_came_is_refused():
    async with engine() as (core, rl, receiver, plan, _):
        receiver.gate = asyncio.Event()
        await rl.start(V1)
        update = asyncio.create_task(rl.update(update_info(V1, plan), V1))
        await turns()
        with pytest.raises(UpdateError, match="still coming"):
            await rl.finish(str(V1), V1)
        with pytest.raises(UpdateError, match="given up"):
            await update
        await rl.start(SyncId(1, 1, 2))
        with pytest.raises(UpdateError, match="update_weights was never called"):
            await rl.finish("t1.v1.a2", SyncId(1, 1, 2))
        assert served(core) == NONE


@in_loop
async def test_retries_apply_once():
    async with engine() as (core, rl, _, plan, _buckets):
        for _ in range(2):
            await rl.start(V1)
        for _ in range(2):
            await rl.update(update_info(V1, plan), V1)
        await asyncio.gather(*(rl.finish(str(V1), V1) for _ in range(3)))
        await rl.finish(str(V1), V1)
    assert len(events_of(core, "update_started")) == 1
    assert len(events_of(core, "bucket_received")) == plan.num_buckets
    assert len(events_of(core, "weights_loaded")) == 1
    assert len(events_of(core, "weight_write_began")) == 1


@in_loop
async def test_a_client_that_goes_away_and_returns_finds_its_update():
    async with engine() as (core, rl, receiver, plan, _):
        receiver.gate = asyncio.Event()
        await rl.start(V1)
        lost = asyncio.create_task(rl.update(update_info(V1, plan), V1))
        await turns()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        again = asyncio.create_task(rl.update(update_info(V1, plan), V1))
        await turns()
        receiver.gate.set()
        await again
        await rl.finish(str(V1), V1)
        assert served(core) == ALL


@in_loop
async def test_order_of_calls():
    async with engine() as (_, rl, _receiver, plan, _buckets):
        with pytest.raises(UpdateError, match="start_weight_update must be called before"):
            await rl.update(update_info(V1, plan), V1)
        with pytest.raises(UpdateError, match="without a matching start_weight_update"):
            await rl.finish("x")
        await rl.start(V1)
        with pytest.raises(UpdateError, match="already active"):
            await rl.start(None)
        with pytest.raises(UpdateError, match=r"update_weights of t1\.v2\.a1, but the open .* t1\.v1\.a1"):
            await rl.update(update_info(V2, plan), V2)
        with pytest.raises(UpdateError, match="Cannot release"):
            await rl.shutdown()
        await rl.abandon(V1)
        await rl.abandon(V1)
        await rl.shutdown()
        await rl.start(V1)
        with pytest.raises(UpdateError, match="not initialized"):
            await rl.update(update_info(V1, plan), V1)


@in_loop
async def test_a_newer_sync_supersedes_one_that_was_given_up():
    async with engine() as (_, rl, receiver, plan, _buckets):
        receiver.gate = asyncio.Event()
        await rl.start(V1)
        stuck = asyncio.create_task(rl.update(update_info(V1, plan), V1))
        await turns()
        newer = SyncId(2, 1)
        await rl.start(newer)
        with pytest.raises(UpdateError, match=r"superseded by t2\.v1\.a1"):
            await stuck
        receiver.gate.set()
        await rl.update(update_info(newer, plan), newer)
        await rl.finish(str(newer), newer)
        assert rl.weight_version == "t2.v1.a1"


@in_loop
async def test_an_abandon_that_comes_after_the_finish_is_no_success():
    async with engine() as (_, rl, _receiver, plan, _buckets):
        await rl.start(V1)
        await rl.update(update_info(V1, plan), V1)
        _, late = await asyncio.gather(rl.finish(str(V1), V1), rl.abandon(V1), return_exceptions=True)
        assert isinstance(late, UpdateError)
        for attempt in (1, 2):
            with pytest.raises(UpdateError, match=r"t1\.v1\.a1 is active already"):
                await rl.abandon(SyncId(1, 1, attempt))
        assert rl.weight_version == "t1.v1.a1"
        await rl.abandon(V2)


@in_loop
async def test_an_older_attempt_cannot_abandon_a_newer_one():
    async with engine() as (_, rl, _receiver, plan, _buckets):
        second = SyncId(1, 1, 2)
        await rl.start(second)
        with pytest.raises(UpdateError, match=r"abandon of t1\.v1\.a1"):
            await rl.abandon(V1)
        await rl.update(update_info(second, plan), second)
        await rl.finish(str(second), second)


@in_loop
async def test_versions_do_not_fall():
    async with engine() as (_, rl, _receiver, plan, _buckets):
        await sync(rl, plan, V2)
        with pytest.raises(UpdateError, match=r"the newer t1\.v2\.a1 is served"):
            await rl.start(V1)
        await rl.start(SyncId(1, 2, 2))  # another attempt of the same weights is fine


@in_loop
async def test_unknown_backend_and_foreign_plans_are_refused_by_name():
    async with engine() as (_, rl, receiver, plan, _buckets):
        with pytest.raises(UpdateError, match=r"backend='nccl'; this engine has \['fake'\]"):
            await rl.init(init_info(plan, "nccl"))
        with pytest.raises(HandshakeError, match="plan_digest='x'"):
            await rl.init({**init_info(plan), "plan_digest": "x"})
        mine = weights(1)
        cases = {
            r"missing b\.weight; extra nothing": {k: v for k, v in mine.items() if k != "b.weight"},
            r"missing nothing; extra d\.weight": {**mine, "d.weight": torch.ones(2)},
            r"missing b\.weight; extra B\.weight": {k.replace("b.", "B."): v for k, v in mine.items()},
            r"b\.weight: shape \(8,\) in the plan, \(7,\) in the model": {**mine, "b.weight": torch.ones(8)},
            r"b\.weight: dtype int64": {**mine, "b.weight": torch.ones(7, dtype=torch.int64)},
        }
        joined = receiver.joined
        for message, tensors in cases.items():
            with pytest.raises(HandshakeError, match=message):
                await rl.init(init_info(pack(tensors)[0]))
        assert receiver.joined == joined  # refused before anything was joined
        await sync(rl, plan)  # and the transfer that stood before still stands


@pytest.mark.parametrize("tied", [True, False])
@in_loop
async def test_a_real_models_weights_arrive(tmp_path, tied):
    model = make_model("qwen2", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    receiver = FakeReceiver()
    async with running(TorchPolicy(tmp_path)) as core:
        rl = RlState(core, {"fake": lambda: receiver})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        names = model.state_dict() if tied else dict(model.named_parameters())  # tied: both names, one tensor
        assert ("lm_head.weight" in names) is True
        plan, receiver.buckets = pack(names, bucket_bytes=20_000)
        await rl.init(init_info(plan))
        await sync(rl, plan)
        for name, parameter in model.named_parameters():
            assert torch.equal(core.policy.parameters()[name], parameter)
        await rl.close()


@in_loop
async def test_an_untied_plan_for_a_tied_model_is_refused(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    async with running(TorchPolicy(tmp_path)) as core:
        rl = RlState(core, {"fake": FakeReceiver})
        plan, _ = pack(
            {n: t.detach() for n, t in make_model("llama", tie_word_embeddings=False).named_parameters()}
        )
        with pytest.raises(HandshakeError, match="are tied in the model, not in the plan"):
            await rl.init(init_info(plan))
