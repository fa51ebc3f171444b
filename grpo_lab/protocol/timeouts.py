"""Every bounded wait of the protocol in one table, and the one way to wait."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_lab.errors import ConfigError, PhaseTimeout

T = TypeVar("T")

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. Owner: who waits; the configuration field that sets it stands in brackets.

    Attributes:
        connect_s: coordinator, until an engine answers /health [vllm_server_timeout].
        handshake_s: coordinator, until all engines have joined the transfer [request_timeout].
        pause_s: coordinator, until a pause is acknowledged; ``wait`` drains the running requests
            [pause_timeout].
        transfer_s: coordinator, from start to the last engine's "received" [sync_timeout].
        finish_s: coordinator, until the engine has loaded [sync_timeout].
        resume_s: coordinator, until a resume is acknowledged [request_timeout].
        score_s: coordinator, for a canary [request_timeout].
        agree_s: every rank, until all ranks have reported a phase [sync_timeout].
        close_s: coordinator, for all of the shutdown [request_timeout].
    """

    connect_s: float = 60.0
    handshake_s: float = 30.0
    pause_s: float = 60.0
    transfer_s: float = 120.0
    finish_s: float = 60.0
    resume_s: float = 30.0
    score_s: float = 30.0
    agree_s: float = 150.0
    close_s: float = 10.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not 0 < value < 86_400:
                raise ConfigError(item.name, value, "seconds above 0 and below 86,400")


async def bounded(awaitable: Awaitable[T], timeout_s: float, what: str) -> T:
    """Awaits with a limit; what ran out is said with every task and where it stands.

    Raises:
        PhaseTimeout: after ``timeout_s`` seconds of the loop's clock.
    """
    try:
        async with asyncio.timeout(timeout_s) as scope:
            return await awaitable
    except TimeoutError as error:
        if not scope.expired():
            raise
        waiting = describe_tasks()
        message = f"{what}: no answer within {timeout_s:g} s. Waiting tasks:\n{waiting}"
        raise PhaseTimeout(message) from error


def describe_tasks() -> str:
    """One line per task of the running loop, sorted: its name, and where it is suspended.

    The lines are sorted, not the tasks: equal names must not come in the order of a set. Addresses are
    left out. So two runs of one simulation say the same.
    """
    lines = [f"  {task.get_name()}: {_where(task)}" for task in sorted(asyncio.all_tasks(), key=_name)]
    return _ADDRESS.sub("", "\n".join(sorted(lines)))


def _name(task: asyncio.Task[Any]) -> str:
    return task.get_name()


def _where(task: asyncio.Task[Any]) -> str:
    coroutine: Any = task.get_coro()
    place = "?"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None:
            place = f"{frame.f_code.co_qualname} line {frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None)
        if coroutine is not None and not hasattr(coroutine, "cr_frame"):
            return f"{place}, awaiting {coroutine!r}"
    return place
