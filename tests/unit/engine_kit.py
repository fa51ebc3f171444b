"""What the engine's tests share: tiny random models, an engine on a list recorder, a fake transport."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.packing import BucketPlan, Packer
from grpo_lab.recorders import ListRecorder
from grpo_lab.types import Bucket, SamplingParams, SyncId

VOCABULARY = 29
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def in_loop(test):
    """Runs an async test on a fresh loop, within 60 seconds."""

    @functools.wraps(test)
    def run(*arguments, **named):
        async def bounded():
            async with asyncio.timeout(60):
                await test(*arguments, **named)

        asyncio.run(bounded())

    return run


def make_model(architecture: str, **changes):
    """A random HF model, biases and norms included, in evaluation mode."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[architecture]
    model = model_class(config_class(**settings | changes)).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def reference_logprobs(model, token_ids):
    """HF's logprob of every token but the first, temperature 1."""
    with torch.no_grad():
        logprobs = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def events_of(core, kind):
    return [record.event for record in core.recorder.records if record.event.kind == kind]


def kinds_of(core, *kinds):
    return [r.event.kind for r in core.recorder.records if r.event.kind in kinds]


def sampling(max_tokens, **changes):
    return replace(SamplingParams(max_tokens=max_tokens, ignore_eos=True), **changes)


@asynccontextmanager
async def running(policy=None, latency=None, decode=None, **settings) -> AsyncIterator[EngineCore]:
    """An engine with its step task started, closed at the end."""
    recorder = ListRecorder("engine-0", asyncio.get_running_loop().time)
    core = EngineCore(policy or SyntheticPolicy(), recorder, EngineConfig(**settings), None, latency, decode)
    core.start()
    try:
        yield core
    finally:
        await core.close()


async def steps(core, count):
    """Lets the engine run until it has made ``count`` further steps."""
    target = core.counters.steps + count
    async with asyncio.timeout(10):
        while core.counters.steps < target:
            await asyncio.sleep(0)


async def turns(count=20):
    """Gives every other task a few turns."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class FakeReceiver:
    """Yields the buckets it was given, whatever they are; ``gate`` holds them back."""

    buckets: list[Bucket] = field(default_factory=list)
    gate: asyncio.Event | None = None
    error: Exception | None = None
    joined: int = 0
    closed: int = 0

    async def join(self, info):
        self.joined += 1

    async def receive(self, sync, info):
        for bucket in self.buckets:
            if self.gate is not None:
                await self.gate.wait()
            yield bucket
        if self.error is not None:
            raise self.error

    async def close(self):
        self.closed += 1


def pack(tensors, bucket_bytes=4096) -> tuple[BucketPlan, list[Bucket]]:
    """All buckets of a set of tensors, each in memory of its own."""
    plan = BucketPlan.build(tensors, bucket_bytes=bucket_bytes)
    packer = Packer(plan, slots=max(plan.num_buckets, 1))
    packer.bind(tensors)
    return plan, [_copied(packer.pack(index)) for index in range(plan.num_buckets)]


def _copied(packed) -> Bucket:
    memory = memoryview(bytearray(packed.memory))
    return Bucket(packed.index, packed.slot, memory, packed.nbytes, packed.hash64)


def init_info(plan, backend="fake"):
    return {"backend": backend, "plan": plan.to_json(), "plan_digest": plan.digest()}


def update_info(sync: SyncId, plan):
    return {"sync": str(sync), "num_buckets": plan.num_buckets}
