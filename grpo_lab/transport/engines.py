"""Engine clients for addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from grpo_lab.errors import EngineUnreachable
from grpo_lab.ports import Recorder
from grpo_lab.transport.vllm_http import VllmHttpEngine

LOOK_EVERY_S = 0.25


async def connect_engines(
    urls: Sequence[str], recorder: Recorder, wait_s: float, without: Collection[str] = ()
) -> tuple[VllmHttpEngine, ...]:
    """Clients named engine-0, engine-1, ... in the order of ``urls``; what each can do has been asked.
    Those named in ``without`` are left out.

    A server that is still starting refuses connections: it is looked for again until ``wait_s``.

    Raises:
        EngineUnreachable: nothing listens there.
        EngineError: something else does, or it answers nonsense.
    """
    named = {f"engine-{index}": url for index, url in enumerate(urls)}
    engines = tuple(VllmHttpEngine(name, named[name], recorder) for name in named if name not in without)
    try:
        found = await asyncio.gather(
            *(_discover(engine, wait_s) for engine in engines), return_exceptions=True
        )
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)
        raise
    return engines


async def _discover(engine: VllmHttpEngine, wait_s: float) -> None:
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + wait_s
    while True:
        try:
            await engine.discover()
            return
        except EngineUnreachable:
            if clock() >= deadline_s:
                raise
            await asyncio.sleep(LOOK_EVERY_S)
