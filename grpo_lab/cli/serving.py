"""Puts an engine together from a ``ServeConfig``; imports torch."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from grpo_lab.engine.app import create_app
from grpo_lab.engine.block_pool import PrefixPolicy
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.policy import Policy, SyntheticPolicy
from grpo_lab.engine.runner import InlineRunner, ThreadRunner
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.engine.text import Text
from grpo_lab.engine.torch_policy import TorchPolicy
from grpo_lab.errors import ConfigError
from grpo_lab.events import MemberStarted
from grpo_lab.ports import Recorder
from grpo_lab.recorders import FileRecorder, NullRecorder, run_clock
from grpo_lab.transport.receivers import RECEIVERS
from grpo_lab.transport.stock import BACKEND as STOCK
from grpo_lab.transport.stock import StockGlooReceiver

if TYPE_CHECKING:
    from grpo_lab.cli.serve import ServeConfig


SHUTDOWN_S = 5


class EngineServer(uvicorn.Server):
    """uvicorn that says when it is ready, leaves signals to its owner, and ends held requests at once."""

    def __init__(self, app: FastAPI, ready: Callable[[], None]) -> None:
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
            lifespan="on",
            proxy_headers=False,
        )
        super().__init__(settings)
        self._app, self._ready = app, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First the engine: uvicorn waits for open requests, and a pause may be holding them.
        await self._app.state.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def build_app(config: ServeConfig, stack: ExitStack) -> FastAPI:
    """The app, and on ``stack`` what must be closed after it. Raises ``ModelError`` or ``ConfigError``."""
    names = wanted_transports(config)
    text = Text(config.model) if config.model is not None else None
    start_id = uuid.uuid4().hex[:16]
    core = EngineCore(
        _policy(config),
        recorder_of(config, stack, start_id),
        EngineConfig(
            name=config.name,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            seed=config.seed,
            prefix_policy=_prefix_policy(config),
            prefix_caching=config.prefix_cache != "off",
            start_id=start_id,
        ),
        runner=InlineRunner() if config.policy == "synthetic" else ThreadRunner(f"{config.name}-step"),
    )
    served = config.model.resolve().name if config.model is not None else "synthetic"
    return create_app(
        core,
        receivers={name: RECEIVERS[name] for name in names if name in RECEIVERS},
        stock=StockGlooReceiver if STOCK in names else None,
        rl_routes=config.rl_routes,
        token_route=config.enable_scale_out or not config.faithful,
        api_key=config.api_key,
        model=config.served_model_name or served,
        text=text,
        transfer_runner=ThreadRunner(f"{config.name}-transfer"),
        faithful=config.faithful,
        raw_logprobs=_raw_logprobs(config),
    )


def wanted_transports(config: ServeConfig) -> tuple[str, ...]:
    """Raises ``ConfigError`` for one that does not exist."""
    known = (*RECEIVERS, STOCK)
    names = config.transports
    if config.weight_transfer_config:
        try:
            names = (*names, json.loads(config.weight_transfer_config)["backend"])
        except (ValueError, TypeError, KeyError) as error:
            expected = 'JSON with a backend: {"backend": "gloo_packed"}'
            given = config.weight_transfer_config
            raise ConfigError("weight_transfer_config", given, expected) from error
    unknown = sorted(str(name) for name in names if name not in known)
    if unknown:
        raise ConfigError("transports", unknown, f"some of {', '.join(known)}")
    return names or (() if config.faithful else known)


def _policy(config: ServeConfig) -> Policy:
    if config.policy == "synthetic" or config.model is None:
        return SyntheticPolicy(
            mean_tokens=config.mean_tokens,
            max_model_len=config.max_model_len or 4096,
            num_blocks=config.kv_blocks,
        )
    policy = TorchPolicy(
        config.model,
        num_blocks=config.kv_blocks,
        max_model_len=config.max_model_len,
        batch_invariant=config.batch_invariant,
    )
    if config.faithful and policy.tied:
        policy.keep_tied_head()
    return policy


def _prefix_policy(config: ServeConfig) -> PrefixPolicy:
    """vLLM's prefix cache knows nothing of weights: a pause clears it, or it serves old ones."""
    if config.prefix_cache == "auto":
        return "shared" if config.faithful else "versioned"
    return "versioned" if config.prefix_cache == "off" else config.prefix_cache


def _raw_logprobs(config: ServeConfig) -> bool:
    return config.logprobs_mode == "raw_logprobs" or (config.faithful and config.logprobs_mode == "auto")


def recorder_of(config: ServeConfig, stack: ExitStack, start_id: str = "") -> Recorder:
    """Where the engine's part of the trace goes; that it starts is the first thing there."""
    if config.events is None:
        return NullRecorder(config.name)  # a server without --events must not grow
    try:
        started_before = _starts(config.events / f"{config.name}.jsonl")
        clock = run_clock(config.clock_zero)
        recorder = stack.enter_context(FileRecorder(config.name, config.events, clock))
    except OSError as error:
        raise ConfigError("events", str(config.events), f"a directory to write to ({error})") from error
    recorder.emit(
        MemberStarted(member=config.name, role="engine", incarnation=started_before + 1, start=start_id)
    )
    return recorder


def _starts(part: Path) -> int:
    """How often the member whose part of the trace this is has begun."""
    if not part.exists():
        return 0
    kind = f'"kind":"{MemberStarted.kind}"'
    with part.open(encoding="utf-8", errors="replace") as lines:
        return sum(kind in line for line in lines)
