"""A trainer's buckets on a stock vLLM's wire: what comes out at the engine's end, and what is refused."""

import asyncio

import pytest
import torch

from grpo_lab.engine.stock import GlooInit, GlooUpdate
from grpo_lab.errors import ConfigError, TransportError
from grpo_lab.harness.recipe import Recipe
from grpo_lab.packing import BucketPlan, Packer
from grpo_lab.recorders import ListRecorder
from grpo_lab.transport.receivers import make_transport
from grpo_lab.transport.stock import StockGlooReceiver
from grpo_lab.transport.stock_sender import StockGlooTransport
from grpo_lab.types import Bucket, SyncId

SYNC = SyncId(1, 1, 1)
BUCKET_BYTES = 4096


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (700, 5), "norm": (7,), "down": (33, 65)}  # embed is cut over buckets
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


async def packed(transport, plan, tensors):
    packer = Packer(plan, ring=transport.ring)
    packer.bind(tensors)
    for index in range(plan.num_buckets):
        bucket = packer.pack(index)
        yield Bucket(bucket.index, bucket.slot, bucket.memory, bucket.nbytes, bucket.hash64)


async def received(receiver, info):
    layout = GlooUpdate(**info).layout()
    return {name: tensor async for part in receiver.receive(layout) for name, tensor in part}


@pytest.mark.parametrize("buffer_bytes", [1, 5000, 1 << 20])
def test_two_engines_receive_the_tensors_of_two_syncs(buffer_bytes):
    async def play():
        recorder = ListRecorder("trainer", asyncio.get_running_loop().time)
        transport = StockGlooTransport(recorder, buffer_bytes=buffer_bytes)
        plan = BucketPlan.build(weights(), bucket_bytes=BUCKET_BYTES)
        assert plan.num_buckets > 4
        receivers = [StockGlooReceiver(), StockGlooReceiver()]
        try:
            await transport.open(["a", "b"], plan.to_json())
            inits = [GlooInit(**transport.init_info(member)) for member in ("a", "b")]
            assert [init.rank_offset for init in inits] == [1, 2]
            joins = [receiver.join(init) for receiver, init in zip(receivers, inits, strict=True)]
            await asyncio.gather(transport.accept(), *joins)
            for seed in (1, 2):
                info, sent = transport.update_info(SYNC), weights(seed)
                _, *found = await asyncio.gather(
                    transport.send(SYNC, packed(transport, plan, sent)),
                    *(received(receiver, info) for receiver in receivers),
                )
                for tensors in found:
                    assert list(tensors) == list(sent)
                    assert all(torch.equal(tensors[name], sent[name]) for name in sent)
        finally:
            await asyncio.gather(transport.close(), *(receiver.close() for receiver in receivers))

    asyncio.run(play())


def test_an_engine_that_never_comes_ends_the_accept():
    async def play():
        recorder = ListRecorder("trainer", asyncio.get_running_loop().time)
        transport = StockGlooTransport(recorder, progress_timeout_s=1.0)
        plan = BucketPlan.build(weights(), bucket_bytes=BUCKET_BYTES)
        await transport.open(["a"], plan.to_json())
        with pytest.raises(TransportError):
            await transport.accept()
        with pytest.raises(TransportError, match="not open"):
            transport.init_info("a")

    asyncio.run(play())


def test_it_is_a_transport_by_name_for_engines_at_an_address():
    made = make_transport("stock", recorder=ListRecorder("trainer", lambda: 0.0))
    assert isinstance(made, StockGlooTransport)
    assert Recipe(transport="stock", engine="http://127.0.0.1:1").transport == "stock"
    for engine in ("sim", "vllm"):
        with pytest.raises(ConfigError, match="transport"):
            Recipe(transport="stock", engine=engine)
