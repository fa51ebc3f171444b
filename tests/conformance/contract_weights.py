"""Three sets of weights of one tiny model, what each says of a sequence, and a sender that can do wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_lab.packing import BucketPlan, Packer
from grpo_lab.tasks.tokenizer import make_tokenizer
from grpo_lab.types import Bucket

SETS = ("w0", "w1", "w2")  # w0 lies on disk: what a server begins with
OLD_HEAD = "w1 with the old head"
PROMPT = (5, 7, 9, 11)
# By engine, in tokens: how long a request may go on before a client that is short of time has paused it.
MAX_MODEL_LEN = {"sim": 1024, "sim-http": 8192, "vllm": 16384}
BUCKET_BYTES = 64 << 10
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Model:
    """``directory`` is a Hugging Face directory with the weights w0."""

    directory: Path
    tied: bool = False

    @cached_property
    def config(self) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=22,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,  # heads of 32: vLLM's CPU attention has no smaller ones
            num_key_value_heads=1,
            max_position_embeddings=max(MAX_MODEL_LEN.values()),
            tie_word_embeddings=self.tied,
            eos_token_id=1,
            bos_token_id=None,
            pad_token_id=0,
        )

    @cached_property
    def _modules(self) -> dict[str, Qwen2ForCausalLM]:
        return {name: self._random(seed) for seed, name in enumerate(SETS)}

    def _random(self, seed: int) -> Qwen2ForCausalLM:
        model = Qwen2ForCausalLM(self.config).float().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return model

    def save(self) -> None:
        tokenizer = make_tokenizer()
        assert len(tokenizer) == self.config.vocab_size
        self._modules["w0"].save_pretrained(self.directory)
        tokenizer.save_pretrained(self.directory)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return dict(self._modules[name].named_parameters())

    @property
    def sets(self) -> tuple[str, ...]:
        """What an engine may be found to serve; ``OLD_HEAD`` is w1 under the tied head of w0."""
        return (*SETS, OLD_HEAD) if self.tied else SETS

    @torch.no_grad()
    def logprobs(self, name: str, token_ids: list[int], prompt: int = len(PROMPT)) -> list[float]:
        """What the set says of every token after the prompt."""
        ids = torch.tensor([token_ids])
        if name == OLD_HEAD:
            hidden = self._modules["w1"].model(ids).last_hidden_state
            logits = self._modules["w0"].lm_head(hidden)
        else:
            logits = self._modules[name](ids).logits
        rows = logits[0].log_softmax(-1)
        picked = rows[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return [float(value) for value in picked[prompt - 1 :]]

    def plan(self, name: str = "w0") -> BucketPlan:
        return BucketPlan.build(self.tensors(name), bucket_bytes=BUCKET_BYTES)

    def renamed_plan(self) -> BucketPlan:
        """The plan of a model that has another name for one parameter, and is the same otherwise."""
        tensors = {
            name.replace("model.norm.weight", "model.bogus.weight"): tensor
            for name, tensor in self.tensors("w0").items()
        }
        return BucketPlan.build(tensors, bucket_bytes=BUCKET_BYTES)


FAULTS = ("", "corrupt", "ends_early", "silent")


async def packed(tensors: dict[str, torch.Tensor], plan: BucketPlan, ring: list[memoryview], fault: str = "",
                 hold: AsyncIterator[None] | None = None) -> AsyncIterator[Bucket]:  # fmt: skip
    """The plan's buckets, packed into ``ring``.

    ``corrupt`` flips a byte of the last bucket after it was hashed; ``ends_early`` has no last bucket (the
    sender closes the transport); ``silent`` waits before the last bucket until ``hold`` yields.
    """
    assert fault in FAULTS, fault
    packer = Packer(plan, ring=ring)
    packer.bind(tensors)
    last = plan.num_buckets - 1
    for index in range(plan.num_buckets):
        if index == last and fault == "ends_early":
            return
        if index == last and fault == "silent" and hold is not None:
            await anext(hold)
        bucket = packer.pack(index)
        if index == last and fault == "corrupt":
            bucket.memory[0] ^= 1
        yield Bucket(bucket.index, bucket.slot, bucket.memory, bucket.nbytes, bucket.hash64)
