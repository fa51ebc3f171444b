"""Where a step's arithmetic runs: in place (virtual time) or in one worker thread (real time)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class StepRunner(Protocol):
    """Runs blocking functions one at a time, in order; their exceptions reach the caller."""

    async def run(self, function: Callable[[], T]) -> T: ...
    def close(self) -> None: ...


class InlineRunner:
    """Runs at once in the loop's thread: no threads, no clock."""

    async def run(self, function: Callable[[], T]) -> T:
        return function()

    def close(self) -> None:
        pass


class ThreadRunner:
    """One worker thread, so that the loop keeps answering HTTP during a step."""

    def __init__(self, name: str = "engine-step") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """Does not wait: a step in progress ends by itself, and nothing waits for its result any more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
