"""Engines with a real model in virtual time: real tokens and logprobs, steps that take simulated seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from fastapi import FastAPI

from grpo_lab.engine.app import create_app
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.engine.torch_policy import TorchPolicy
from grpo_lab.errors import HandshakeError
from grpo_lab.events import MemberStarted
from grpo_lab.ports import Engine, Recorder, WeightReceiver
from grpo_lab.sim.simulation import SimContext
from grpo_lab.sim.speeds import Speeds
from grpo_lab.trainer.weight_transfer import TransferSettings
from grpo_lab.transport.memory import InMemoryTransport
from grpo_lab.transport.vllm_http import VllmHttpEngine
from grpo_lab.types import Bucket

MAX_NUM_SEQS = EngineConfig().max_num_seqs


class TimedLinks(InMemoryTransport):
    """Each engine's link carries one bucket after the other at the simulated speed."""

    def __init__(self, recorder: Recorder, settings: TransferSettings, speeds: Speeds) -> None:
        super().__init__(
            recorder,
            slots=settings.ring_slots,
            accept_timeout_s=settings.sync.timeouts.handshake_s,
            progress_timeout_s=settings.sync.timeouts.transfer_s,
        )
        self._speeds = speeds

    async def carry(self, member: str, bucket: Bucket) -> Sequence[Bucket]:
        await asyncio.sleep(self._speeds.transfer(bucket.nbytes))
        return [bucket]


class TorchEngines:
    """The simulated vLLM, app and all, once for each name. Use as ``async with``.

    Clients reach it over the same HTTP client and routes as in the real world, without a network.
    """

    def __init__(
        self,
        context: SimContext,
        model: Path,
        names: Sequence[str],
        speeds: Speeds,
        *,
        seed: int = 0,
        batch_invariant: bool = False,
        max_num_seqs: int = MAX_NUM_SEQS,
    ) -> None:
        self._speeds = speeds
        self._links: TimedLinks | None = None
        self._stack = AsyncExitStack()
        self._apps: dict[str, FastAPI] = {}
        self._cores: list[EngineCore] = []
        for name in names:
            core = EngineCore(
                TorchPolicy(model, batch_invariant=batch_invariant),
                context.recorder(name),
                EngineConfig(name=name, seed=seed, max_num_seqs=max_num_seqs),
                latency=speeds.engine_step,
            )
            receivers = {InMemoryTransport.backend: self._receiver}
            self._apps[name] = create_app(core, receivers=receivers, model=model.name)
            self._cores.append(core)

    async def __aenter__(self) -> Self:
        for core, app in zip(self._cores, self._apps.values(), strict=True):
            core.start()
            core.recorder.emit(MemberStarted(member=core.config.name, role="engine"))
            self._stack.push_async_callback(app.state.close)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def clients(self, recorder: Recorder) -> tuple[VllmHttpEngine, ...]:
        """A client of each engine; its capabilities are still to be discovered."""
        return tuple(
            VllmHttpEngine(
                name,
                f"http://{name}",
                recorder,
                transport=httpx.ASGITransport(app, raise_app_exceptions=False),
                discover_on_use=True,
            )
            for name, app in self._apps.items()
        )

    async def connect(self, recorder: Recorder) -> tuple[Engine, ...]:
        clients = self.clients(recorder)
        for client in clients:
            await client.discover()
        return clients

    def links(self, settings: TransferSettings, recorder: Recorder) -> TimedLinks:
        """The sender that the engines' receivers belong to from now on."""
        self._links = TimedLinks(recorder, settings, self._speeds)
        return self._links

    def _receiver(self) -> WeightReceiver:
        if self._links is None:
            raise HandshakeError("no transfer to join: the trainer has not opened one")
        return self._links.receiver()
