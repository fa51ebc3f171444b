"""Puts an engine together from a ``ServeConfig``; imports torch."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from grpo_lab.engine.app import create_app
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.runner import ThreadRunner
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.engine.text import Text
from grpo_lab.engine.torch_policy import TorchPolicy
from grpo_lab.errors import ConfigError
from grpo_lab.events import MemberStarted
from grpo_lab.ports import Recorder
from grpo_lab.recorders import FileRecorder, NullRecorder, run_clock
from grpo_lab.transport.receivers import RECEIVERS

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
    unknown = set(config.transports) - RECEIVERS.keys()
    if unknown:
        raise ConfigError("transports", sorted(unknown), f"some of {', '.join(RECEIVERS)}")
    names = config.transports or tuple(RECEIVERS)
    start_id = uuid.uuid4().hex[:16]
    policy = TorchPolicy(
        config.model,
        num_blocks=config.kv_blocks,
        max_model_len=config.max_model_len,
        batch_invariant=config.batch_invariant,
    )
    text = Text(config.model)
    core = EngineCore(
        policy,
        recorder_of(config, stack, start_id),
        EngineConfig(
            name=config.name,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            seed=config.seed,
            prefix_policy="versioned" if config.prefix_cache == "off" else config.prefix_cache,
            prefix_caching=config.prefix_cache != "off",
            start_id=start_id,
        ),
        runner=ThreadRunner(f"{config.name}-step"),
        decode=text.decode,
    )
    return create_app(
        core,
        receivers={name: RECEIVERS[name] for name in names},
        rl_routes=config.rl_routes,
        api_key=config.api_key,
        model=config.served_model_name or config.model.resolve().name,
        text=text,
        transfer_runner=ThreadRunner(f"{config.name}-transfer"),
    )


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
