"""Engine clients for addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from grpo_lab.errors import EngineUnreachable
from grpo_lab.ports import Recorder
from grpo_lab.transport.vllm_http import VllmHttpEngine

LOOK_EVERY_S = 0.25


def clients_of(urls: Sequence[str], recorder: Recorder) -> tuple[VllmHttpEngine, ...]:
    """Clients named engine-0, engine-1, ... in the order of ``urls``; nothing has been asked yet."""
    return tuple(
        VllmHttpEngine(f"engine-{index}", url, recorder, discover_on_use=True)
        for index, url in enumerate(urls)
    )


async def connect_engines(
    urls: Sequence[str], recorder: Recorder, wait_s: float
) -> tuple[VllmHttpEngine, ...]:
    """The clients; what each engine can do has been asked.

    A server that is still starting refuses connections: it is looked for again until ``wait_s``.

    Raises:
        EngineUnreachable: nothing listens there.
        EngineError: something else does, or it answers nonsense.
    """
    engines = clients_of(urls, recorder)
    try:
        found = await asyncio.gather(
            *(_discover(engine, wait_s) for engine in engines), return_exceptions=True
        )
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
    except BaseException:
        await close_all(engines)
        raise
    return engines


async def connect_some(
    urls: Sequence[str], recorder: Recorder, wait_s: float, fenced: Collection[str] = ()
) -> tuple[VllmHttpEngine, ...]:
    """The clients, as soon as one engine that is not in ``fenced`` has answered: the others may come later.

    Raises as ``connect_engines`` does, when none has answered.
    """
    engines = clients_of(urls, recorder)
    serving = [engine for engine in engines if engine.name not in fenced]
    looks = [
        asyncio.create_task(_discover(engine, wait_s), name=f"look for {engine.name}") for engine in serving
    ]
    try:
        waiting = set(looks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(look.exception() is None for look in done):
                return engines
        await asyncio.gather(*looks)  # raises the first engine's words
        return engines
    except BaseException:
        await close_all(engines)
        raise
    finally:
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)


async def close_all(engines: Sequence[VllmHttpEngine]) -> None:
    await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)


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
