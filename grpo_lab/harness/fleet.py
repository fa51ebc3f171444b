"""The engines of a run: our simulated vLLM, a real vLLM started here, or servers that run already."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from grpo_lab.errors import EngineError
from grpo_lab.events import MemberDied, MemberStopped
from grpo_lab.harness.attached import ask_engines
from grpo_lab.harness.engine_process import ServerCommand, running_engines, simulated_engine
from grpo_lab.harness.progress import RunProgress
from grpo_lab.harness.recipe import Recipe
from grpo_lab.harness.run_dir import RunDir
from grpo_lab.harness.vllm_server import VllmServerConfig, running_vllm
from grpo_lab.ports import Recorder
from grpo_lab.types import EngineCapabilities

SIMULATED = EngineCapabilities(
    staged=True, hashes=True, token_versions=True, term_fencing=True, score_while_paused=True, events=True
)
REAL_VLLM = EngineCapabilities(staged=True, hashes=True, token_versions=True, term_fencing=True)

CANARY_SLOTS = 8  # beside the rollouts, so that a canary does not wait for one of them to end
MIN_KV_BYTES, MAX_KV_BYTES = 64 << 20, 1 << 30
FLOAT32_BYTES = 4
DEFAULT_MODEL_LEN = 2048


class RunningEngine(Protocol):
    """A server that this run has started."""

    death_seen: str

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    def death(self) -> str: ...


def own_capabilities(recipe: Recipe) -> EngineCapabilities:
    """What the engines that the recipe starts can do."""
    return REAL_VLLM if recipe.engine == "vllm" else SIMULATED


@contextlib.contextmanager
def running_fleet(
    recipe: Recipe,
    directory: RunDir,
    recorder: Recorder,
    model: Path,
    started_s: float,
    progress: RunProgress,
    started: list[RunningEngine],
) -> Iterator[Sequence[str]]:
    """Addresses of the engines; ``started`` gets those that are our own, which are stopped at the end."""
    if recipe.attaches:
        yield recipe.engine_urls
        return
    kind = "vLLM" if recipe.engine == "vllm" else "simulated vLLM"
    try:
        with contextlib.ExitStack() as stack:
            with progress.stage(f"{recipe.engines} {kind}"):
                if recipe.engine == "vllm":
                    started.extend(
                        stack.enter_context(running_vllm(*_vllm_configs(recipe, directory, model)))
                    )
                    _require_declared([engine.url for engine in started])
                else:
                    commands = _simulated_commands(recipe, directory, model, started_s)
                    started.extend(stack.enter_context(running_engines(commands)))
            try:
                yield [engine.url for engine in started]
            finally:
                for engine in started:
                    engine.death_seen = engine.death()
    finally:  # they have ended, one way or the other
        for engine in started:
            if engine.death_seen:
                recorder.emit(MemberDied(member=engine.name, detail=engine.death_seen))
            else:
                recorder.emit(MemberStopped(member=engine.name))


def _simulated_commands(
    recipe: Recipe, directory: RunDir, model: Path, started_s: float
) -> list[ServerCommand]:
    options = ["--threads", str(recipe.engine_threads)]
    options += ["--batch-invariant"] if recipe.batch_invariant else []
    return [
        simulated_engine(
            f"engine-{index}",
            model,
            events=directory.events,
            logs=directory.logs,
            started_s=started_s,
            seed=recipe.seed,
            options=options,
        )
        for index in range(recipe.engines)
    ]


def _vllm_configs(recipe: Recipe, directory: RunDir, model: Path) -> list[VllmServerConfig]:
    length, kv_bytes = _sizes(model, recipe.max_inflight)
    return [
        VllmServerConfig(
            model,
            directory.logs / f"engine-{index}.log",
            name=f"engine-{index}",
            backend=f"lab_{recipe.transport}",
            max_model_len=length,
            max_num_seqs=recipe.max_inflight + CANARY_SLOTS,
            kv_cache_bytes=kv_bytes,
            threads=recipe.engine_threads,
            extra=("--seed", str(recipe.seed)),
        )
        for index in range(recipe.engines)
    ]


def _sizes(model: Path, sequences: int) -> tuple[int, int]:
    """Longest sequence, and bytes of KV cache for all of them at half that length, within bounds."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    length = min(int(config.get("max_position_embeddings", DEFAULT_MODEL_LEN)), DEFAULT_MODEL_LEN)
    heads = int(config.get("num_attention_heads", 1))
    head_dim = int(config.get("head_dim") or config.get("hidden_size", 0) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    token_bytes = 2 * int(config.get("num_hidden_layers", 1)) * kv_heads * head_dim * FLOAT32_BYTES
    wanted = sequences * length // 2 * token_bytes
    return length, min(max(wanted, MIN_KV_BYTES), MAX_KV_BYTES)


def _require_declared(urls: Sequence[str]) -> None:
    """The trace's first event has said what they can do: it must be so."""
    declared = dataclasses.asdict(REAL_VLLM)
    for name, found in ask_engines(urls).capabilities.items():
        if found != declared:
            raise EngineError(
                f"{name} can do {found}, but a vLLM with our plugin can do {declared}. Is grpo_lab installed "
                "beside that vLLM, and its version the same? `make venv-vllm` does so"
            )
