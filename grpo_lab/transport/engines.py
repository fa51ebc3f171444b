"""Engine clients for addresses."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_lab.ports import Engine, Recorder
from grpo_lab.transport.vllm_http import VllmHttpEngine


async def connect_engines(urls: Sequence[str], recorder: Recorder) -> tuple[Engine, ...]:
    """Clients named engine-0, engine-1, ... in the order of ``urls``; what each can do has been asked.

    Raises:
        EngineError: an engine that answers something unexpected; one that is still starting is no error
            here, it is waited for by whoever connects.
    """
    engines = tuple(VllmHttpEngine(url, f"engine-{index}", recorder) for index, url in enumerate(urls))
    for engine in engines:
        await engine.discover()
    return engines
