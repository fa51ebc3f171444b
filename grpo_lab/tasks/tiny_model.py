"""Makes a real, tiny causal language model: a Hugging Face directory that learns in a minute.

A model is named by what decides its weights: the spec, the task, the seed, and the libraries and code that
make it, comments and docstrings left out. Models are made in a temporary directory and renamed into the
cache, so a reader never sees half a model and makers that race end with one.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from grpo_lab.errors import ConfigError, ModelError
from grpo_lab.tasks import base as base_module
from grpo_lab.tasks import evaluation as evaluation_module
from grpo_lab.tasks import tokenizer as tokenizer_module
from grpo_lab.tasks import warmup as warmup_module
from grpo_lab.tasks.base import Task
from grpo_lab.tasks.evaluation import evaluate_greedy
from grpo_lab.tasks.tokenizer import CHARACTERS, make_tokenizer
from grpo_lab.tasks.warmup import Progress, anneal, warm_up
from grpo_lab.tasks.warmup_spec import WarmupSpec

WARMUP_FILE = "grpo_lab_warmup.json"
CACHE_VARIABLE = "GRPO_LAB_CACHE"

_ROWS_IN_KEY = 64  # enough to tell two definitions of a task apart


@dataclass(frozen=True, slots=True)
class TinyModelSpec:
    """Sizes of a decoder with RMSNorm, RoPE, SwiGLU and tied embeddings; 569 k parameters by default.

    Attributes:
        warmup: the supervised phase; None takes the task's own.
    """

    architecture: Literal["llama", "qwen2"] = "llama"
    num_layers: int = 3
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    intermediate_size: int = 320
    max_position_embeddings: int = 256
    warmup: WarmupSpec | None = None

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

    def warmup_for(self, task: Task) -> WarmupSpec:
        return task.warmup if self.warmup is None else self.warmup


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A finished model directory and how its warm-up ended."""

    path: Path
    warmup_steps: int
    development_pass_rate: float


@dataclass(frozen=True, slots=True)
class AnnealedBaseline:
    """What supervision alone reaches with the warm-up's own steps and rows, learning rate annealed."""

    heldout_accuracy: float
    steps: int


def cache_directory() -> Path:
    """``$GRPO_LAB_CACHE``, else ``~/.cache/grpo_lab``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "grpo_lab").expanduser()


def model_key(spec: TinyModelSpec, task: Task, seed: int) -> str:
    """A readable name with a digest of everything that decides the weights.

    The task counts by what it draws and the length of its completions, the code by its syntax tree: a changed
    comment here, or any change elsewhere, keeps the cache.
    """
    resolved = asdict(replace(spec, warmup=spec.warmup_for(task)))
    rng = random.Random(0)
    drawn = [task.draw(rng) for _ in range(_ROWS_IN_KEY)]
    libraries = [torch.__version__, transformers.__version__]
    makers = (base_module, evaluation_module, tokenizer_module, warmup_module, build_model)
    code = [_syntax(inspect.getsource(maker)) for maker in makers]
    text = json.dumps(
        [resolved, task.name, task.max_completion_tokens, drawn, seed, libraries, code], sort_keys=True
    )
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{spec.architecture}-{task.name}-seed{seed}-{digest}"


def _syntax(source: str) -> str:
    """The syntax tree of a source, to which docstrings, comments and layout make no difference."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [line for line in node.body if not _is_string(line)]
    return ast.dump(tree)


def _is_string(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


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
        plan = spec.warmup_for(task)
        result = warm_up(model, tokenizer, task, plan, seed, progress=progress)
        made_of = asdict(replace(spec, warmup=plan))
        record = {"key": key, "task": task.name, "seed": seed, "spec": made_of, **asdict(result)}
        with no_progress_bars():
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
    anneal(model, tokenizer, task, spec.warmup_for(task), seed, steps=steps, progress=progress)
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
        "initializer_range": spec.warmup_for(task).initializer_range,
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


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hides transformers' own progress bars, which would break up ours; afterwards they are as before."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _save(
    target: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]
) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        try:
            model.save_pretrained(partial)
        except SafetensorError as error:  # it hides the system's error, a full disk for instance
            raise OSError(str(error)) from error
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
        model = TinyModel(target, record["steps"], record["development_pass_rate"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{target} exists but is not a tiny model made here ({error}); remove it") from error
    if found != key:
        raise ModelError(
            f"{target} holds the model {found}, not {key}; remove it or choose another directory"
        )
    return model
