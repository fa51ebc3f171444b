"""A deterministic stub worker and tiny models for the trainer's tests."""

import queue
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_lab.recorders import ListRecorder
from grpo_lab.trainer import AsyncGRPOConfig, AsyncGRPOTrainer
from grpo_lab.trainer.dataset import PromptSequence
from grpo_lab.types import CursorState, RolloutGroup, RolloutSample, VersionSpan

VOCABULARY = 24
ROWS = [{"prompt": f"{number:03d}", "answer": str(number)} for number in range(40)]


def tokenizer(text, **_):
    return {"input_ids": [3 + ord(letter) % 20 for letter in text]}


def tiny_model(kind="llama", seed=0, **extra):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    } | extra
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


def sample(sample_id, prompt, completion, reward, version, logprobs=None, term=1, **extra):
    return RolloutSample(
        sample_id=sample_id,
        prompt_token_ids=tuple(prompt),
        completion_token_ids=tuple(completion),
        behaviour_logprobs=tuple(logprobs or [-1.0] * len(completion)),
        reward=reward,
        version_first=version,
        version_last=version,
        spans=(VersionSpan(term, version, 0, len(completion)),),
        **extra,
    )


class EndlessBuffer:
    """A rollout buffer that makes a group whenever one is asked for."""

    def __init__(self, worker):
        self.worker = worker

    def get(self, block=True, timeout=None):
        if not self.worker.running:
            raise queue.Empty
        return self.worker.make_group()


class StubWorker:
    """What the public protocol asks for, and nothing else. Groups depend on the prompt index only."""

    def __init__(self, group_size=4, done=None, term=0):
        self.group_size = group_size
        self.done = done or CursorState()
        self.term = term
        self.running = False
        self.version = 0
        self.calls = []
        self.indices = []
        self.rollout_buffer = EndlessBuffer(self)

    def start(self):
        self.calls.append("start")
        self.prompts = PromptSequence(ROWS, tokenizer, seed=0, done=self.done)
        self.number = 0
        self.running = True

    def stop(self):
        self.calls.append("stop")
        self.running = False

    def update_model_version(self, version):
        self.calls.append(f"version {version}")
        self.version = version

    def make_group(self):
        index, ids, _row = self.prompts.next()
        self.indices.append(index)
        rng = random.Random(f"group {index}")
        samples = []
        for place in range(self.group_size):
            length = rng.randint(1, 6)
            tokens = [rng.randrange(3, VOCABULARY) for _ in range(length)]
            logprobs = [-rng.uniform(1.0, 4.0) for _ in tokens]
            reward = float(rng.random() < 0.5)
            samples.append(sample(f"{index}/{place}", ids, tokens, reward, self.version, logprobs))
        group = RolloutGroup(str(index), self.number, index, self.term, tuple(samples), self.version)
        self.number += 1
        return group


def config(tmp_path, **extra):
    values = {
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
    } | extra
    return AsyncGRPOConfig(**values)


INJECTED = ("weight_transfer", "callbacks", "make_weight_sync", "make_worker", "optimizers")


def make_trainer(tmp_path, worker=None, model=None, **extra):
    """A trainer that records its events; ``extra`` are settings, or things to inject."""
    injected = {key: extra.pop(key) for key in INJECTED if key in extra}
    return AsyncGRPOTrainer(
        model or tiny_model(),
        zero_reward,
        config(tmp_path, **extra),
        ROWS,
        rollout_worker=worker,
        recorder=ListRecorder("trainer", clock=lambda: 0.0),
        **injected,
    )


def zero_reward(completions, **_):
    return [0.0] * len(completions)


def events(trainer, *kinds):
    return [record.event for record in trainer.recorder.records if record.event.kind in kinds]


class StubFactory:
    """Makes a worker a term, that begins where the trainer says."""

    def __init__(self, **options):
        self.options = options
        self.workers = []

    def __call__(self, start):
        worker = StubWorker(done=start.cursor, term=start.term, **self.options)
        worker.version = start.version
        self.workers.append(worker)
        return worker

    @property
    def indices(self):
        return [index for worker in self.workers for index in worker.indices]


class OneSampleFactory(StubFactory):
    """Workers whose steps have a single sample with a gradient: fewer than there may be ranks."""

    def __call__(self, start):
        worker = super().__call__(start)
        worker.make_group = lambda make=worker.make_group: one_with_signal(make())
        return worker


def one_with_signal(group):
    """Two rewards are known; one of the two samples has no token."""
    for place, one in enumerate(group.samples):
        reward = float(place) if place < 2 and group.prompt_index % 2 else None
        object.__setattr__(one, "reward", reward)
    empty = group.samples[0]
    for field in ("completion_token_ids", "behaviour_logprobs", "spans"):
        object.__setattr__(empty, field, ())
    return group
