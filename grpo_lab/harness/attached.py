"""Engines that run already: what they can do, and which term they have seen."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from grpo_lab.errors import ConfigError, EngineError, EngineRefused
from grpo_lab.harness.refusals import require_listener
from grpo_lab.recorders import NullRecorder
from grpo_lab.transport.engines import connect_engines
from grpo_lab.transport.vllm_http import VllmHttpEngine
from grpo_lab.types import SyncId

REACH_TIMEOUT_S = 10.0
SHOWN_CHARACTERS = 300
NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Attached:
    """``capabilities`` by engine name; ``newest_term`` is 0 where no trainer of ours was before."""

    capabilities: dict[str, dict[str, Any]]
    newest_term: int


def ask_engines(urls: Sequence[str]) -> Attached:
    """Raises ``EngineError`` when one is not there or answers nonsense."""
    return asyncio.run(_ask(urls))


def attach(urls: Sequence[str]) -> Attached:
    """The same of servers that a person named. Raises ``ConfigError``, at once where nothing listens."""
    for url in urls:
        require_listener("engine", url)
    try:
        return ask_engines(urls)
    except EngineError as error:
        reason = shorten(str(error), SHOWN_CHARACTERS)  # a page of HTML, if this is no engine at all
        raise ConfigError(
            "engine", ",".join(urls), f"addresses of engines that can be trained against ({reason})"
        ) from error


async def _ask(urls: Sequence[str]) -> Attached:
    engines = await connect_engines(urls, NullRecorder("harness"), REACH_TIMEOUT_S)
    try:
        # A trainer that failed before its first commit left its term behind, and no weights of it.
        terms = [max(engine.seen_term, _term_of(await _version_of(engine))) for engine in engines]
        # Such a server writes its own events, if any, beside another run: none of them is in this trace.
        abilities = {
            engine.name: dataclasses.replace(engine.capabilities, events=False) for engine in engines
        }
        return Attached({name: dataclasses.asdict(able) for name, able in abilities.items()}, max(terms))
    finally:
        for engine in engines:
            await engine.close()


async def _version_of(engine: VllmHttpEngine) -> str:
    """Empty where the server is too old to say. Raises ``EngineError`` when its weights cannot be changed."""
    try:
        return await engine.weight_info()
    except EngineRefused as error:
        if error.status != NOT_FOUND:
            raise
    try:
        await engine.is_paused()
    except EngineRefused as error:
        if error.status == NOT_FOUND:
            raise EngineError(
                f"{engine.name} has no RL routes, so its weights cannot be updated: start vLLM with "
                "VLLM_SERVER_DEV_MODE=1, or grpo-lab serve with --rl-routes"
            ) from error
        raise
    return ""


def _term_of(version: str) -> int:
    """An engine refuses a trainer of an older term than that of the weights it holds."""
    try:
        return SyncId.parse(version).term
    except ValueError:
        return 0  # its weights are from its disk, or from somebody else's trainer
