"""Makes a real, tiny causal language model: a Hugging Face directory that learns in a minute.

A model is named by what decides its weights: the spec, the task, the seed, and the code and libraries
that made it. Models are made in a temporary directory and renamed into the cache, so a reader never sees
half a model and makers that race end with one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo_lab.errors import ConfigError, ModelError
from grpo_lab.tasks.base import Task
from grpo_lab.tasks.evaluation import evaluate_greedy
from grpo_lab.tasks.tokenizer import CHARACTERS, make_tokenizer
from grpo_lab.tasks.warmup import Progress, WarmupSpec, anneal, warm_up

WARMUP_FILE = "grpo_lab_warmup.json"
CACHE_VARIABLE = "GRPO_LAB_CACHE"


@dataclass(frozen=True, slots=True)
class TinyModelSpec:
    """Sizes of a decoder with RMSNorm, RoPE, SwiGLU and tied embeddings; 569 k parameters by default."""

    architecture: Literal["llama", "qwen2"] = "llama"
    num_layers: int = 3
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    intermediate_size: int = 320
    max_position_embeddings: int = 256
    warmup: WarmupSpec = field(default_factory=WarmupSpec)

    def __post_init__(self) -> None:
        if self.architecture not in ("llama", "qwen2"):
            raise ConfigError("architecture", self.architecture, "llama or qwen2")
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size")
        for name in (*sizes, "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                "hidden_size", self.hidden_size, f"a multiple of 2 * num_heads={2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads={self.num_heads}")


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A finished model directory and how its warm-up ended."""

    path: Path
    warmup_steps: int
    development_accuracy: float


@dataclass(frozen=True, slots=True)
class AnnealedBaseline:
    """What supervision alone reaches with the warm-up's own steps and rows, learning rate annealed."""

    heldout_accuracy: float
    steps: int


def cache_directory() -> Path:
    """``$GRPO_LAB_CACHE``, else ``~/.cache/grpo_lab``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "grpo_lab").expanduser()


def model_key(spec: TinyModelSpec, task: Task, seed: int) -> str:
    """A readable name with a digest of everything that decides the weights."""
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    libraries = [torch.__version__, transformers.__version__]
    text = json.dumps([asdict(spec), task.name, seed, libraries, sources], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{spec.architecture}-{task.name}-seed{seed}-{digest}"


def make_tiny_model(
    spec: TinyModelSpec,
    task: Task,
    seed: int,
    *,
    directory: Path | None = None,
    progress: Progress | None = None,
) -> TinyModel:
    """The model of (spec, task, seed): from the cache, or made, warmed up and put there.

    Args:
        directory: where to put the model itself, instead of the cache; reused when it already holds it.

    Raises:
        ConfigError: the task needs characters that the tokenizer does not have.
        ModelError: the warm-up missed its stopping rule, the directory holds something else, or it
            cannot be written.
    """
    key = model_key(spec, task, seed)
    target = directory if directory is not None else cache_directory() / "models" / key
    if target.exists():
        return _read_finished(target, key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)  # before the work: a bad place is told at once
        model, tokenizer = build_model(spec, task, seed)
        result = warm_up(model, tokenizer, task, spec.warmup, seed, progress=progress)
        record = {"key": key, "task": task.name, "seed": seed, "spec": asdict(spec), **asdict(result)}
        _save(target, model, tokenizer, record)
    except OSError as error:
        raise ModelError(f"cannot write a model to {target}: {error}; set {CACHE_VARIABLE}") from error
    return _read_finished(target, key)


def annealed_baseline(
    spec: TinyModelSpec,
    task: Task,
    seed: int,
    *,
    steps: int,
    heldout_rows: int = 512,
    progress: Progress | None = None,
) -> AnnealedBaseline:
    """Held-out accuracy of the same ``steps`` of supervision with the learning rate falling to 0.

    Report it beside a gain of reinforcement learning: it says how much of the gain the un-annealed
    start left on the table. Costs as much time as the warm-up.
    """
    model, tokenizer = build_model(spec, task, seed)
    anneal(model, tokenizer, task, spec.warmup, seed, steps=steps, progress=progress)
    rows = task.generate("heldout", heldout_rows, seed)
    return AnnealedBaseline(evaluate_greedy(model, tokenizer, rows, task), steps)


def build_model(
    spec: TinyModelSpec, task: Task, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A freshly initialised fp32 model and its tokenizer; the global random state is left as it was."""
    missing = sorted(set(task.alphabet) - set(CHARACTERS))
    if missing:
        raise ConfigError("alphabet", "".join(missing), f"characters of the tiny tokenizer: {CHARACTERS!r}")
    tokenizer = make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if spec.architecture == "llama":
            return LlamaForCausalLM(LlamaConfig(**sizes)), tokenizer
        return Qwen2ForCausalLM(Qwen2Config(**sizes)), tokenizer


def _save(
    target: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]
) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / WARMUP_FILE).write_text(json.dumps(record, indent=2) + "\n")
        partial.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from its other users
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError:
        # A maker that raced us was first: its model has the same key, so it serves as well.
        if not (target / WARMUP_FILE).exists():
            raise


def _read_finished(target: Path, key: str) -> TinyModel:
    try:
        record = json.loads((target / WARMUP_FILE).read_text())
        found = record["key"]
        model = TinyModel(target, record["steps"], record["development_accuracy"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{target} exists but is not a tiny model made here ({error}); remove it") from error
    if found != key:
        raise ModelError(
            f"{target} holds the model {found}, not {key}; remove it or choose another directory"
        )
    return model
