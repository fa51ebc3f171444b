"""The three engines under one face: simulated in process (virtual time), simulated server, real vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from contract_rows import KINDS, STRICT
from contract_servers import API_KEY, MAX_NUM_SEQS, VLLM_PYTHON, Server, Servers
from contract_stock import MemoryTrainer, StockTrainer
from contract_weights import MAX_MODEL_LEN, Model

from grpo_lab.engine.app import create_app
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.engine.text import Text
from grpo_lab.engine.torch_policy import TorchPolicy
from grpo_lab.recorders import ListRecorder
from grpo_lab.sim.simulation import SimContext, run_simulation
from grpo_lab.transport.asgi import AsgiTransport
from grpo_lab.transport.memory import InMemoryTransport
from grpo_lab.transport.sender import RingTransport
from grpo_lab.transport.shared_memory import SharedMemoryTransport

ROW_S = 400.0
CALL_S = 180.0


@dataclass
class Target:
    """An engine that a row is played on. ``server`` is None where it runs in this process."""

    kind: str
    http: httpx.AsyncClient
    transport: RingTransport
    trainer: StockTrainer
    model: Model
    server: Server | None


Play = Callable[[Target], Awaitable[None]]


def run_row(kind: str, profile: str, model: Model, owner: Servers, play: Play) -> None:
    """Plays on the engine, on the clock that it has."""
    if kind in ("sim", STRICT):
        faithful = kind == "sim"
        run_simulation(
            lambda context: _in_process(context, profile, model, play, faithful), max_virtual_s=3600
        )
        return
    server = owner.get(kind, profile, model.directory)
    asyncio.run(_over_http(kind, server, model, play))


async def _over_http(kind: str, server: Server, model: Model, play: Play) -> None:
    recorder = ListRecorder("suite", asyncio.get_running_loop().time)
    transport = SharedMemoryTransport(recorder, accept_timeout_s=30, progress_timeout_s=30)
    trainer = StockTrainer()
    # No connection is used twice: vLLM closes them behind its 500s, which races with the next request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        asyncio.timeout(ROW_S),
        httpx.AsyncClient(base_url=server.url, timeout=CALL_S, trust_env=False, limits=limits) as http,
    ):
        try:
            await play(Target(kind, http, transport, trainer, model, server))
        finally:
            await trainer.close()
            await transport.close()


async def _in_process(context: SimContext, profile: str, model: Model, play: Play, faithful: bool) -> None:
    recorder = context.recorder("suite")
    transport = InMemoryTransport(recorder, accept_timeout_s=30, progress_timeout_s=30)
    trainer = MemoryTrainer()
    policy = TorchPolicy(model.directory, num_blocks=256, max_model_len=MAX_MODEL_LEN["sim"])
    if model.tied and faithful:
        policy.keep_tied_head()  # as `grpo-lab serve --faithful` does
    core = EngineCore(
        policy,
        context.recorder("engine-0"),
        EngineConfig(name="engine-0", max_num_seqs=MAX_NUM_SEQS, prefix_policy="shared"),
        latency=lambda plan: 0.004 + 1e-4 * len(plan.scheduled) + 1e-5 * plan.prefill_tokens,
    )
    app = create_app(
        core,
        receivers={transport.backend: transport.receiver} if profile == "main" else {},
        stock=trainer.receiver if profile in ("stock", "doomed") else None,
        rl_routes=profile != "keyed",
        api_key=API_KEY if profile == "keyed" else None,
        model="m",
        text=Text(model.directory),
        faithful=faithful,
    )
    core.start()
    network = AsgiTransport(app)
    try:
        async with httpx.AsyncClient(
            base_url="http://engine", transport=network, timeout=CALL_S, trust_env=False
        ) as http:
            await play(Target("sim", http, transport, trainer, model, None))
    finally:
        await transport.close()
        await app.state.close()


def wanted_kinds() -> tuple[str, ...]:
    """``CONFORMANCE_ENGINES``, or the simulations."""
    chosen = tuple(filter(None, os.environ.get("CONFORMANCE_ENGINES", "sim,sim-http").split(",")))
    unknown = set(chosen) - set(KINDS)
    if unknown:
        raise ValueError(f"CONFORMANCE_ENGINES={','.join(chosen)}: one of {', '.join(KINDS)}")
    if "vllm" in chosen and not VLLM_PYTHON.exists():
        raise ValueError(f"{VLLM_PYTHON} is missing: make venv-vllm")
    return chosen


def played_kinds() -> tuple[str, ...]:
    """The simulation in process is played when it is strict, too."""
    chosen = wanted_kinds()
    return (*chosen, STRICT) if "sim" in chosen else chosen


def make_model(directory: Path, tied: bool = False) -> Model:
    model = Model(directory, tied)
    model.save()
    return model
