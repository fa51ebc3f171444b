"""The part of an event loop that knows its tasks, and loses no exception, whoever forgot to await one."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from grpo_lab.errors import SimulationError
from grpo_lab.sim.escapes import NoIoLoop
from grpo_lab.sim.task_registry import StackSource, TaskRegistry

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class TaskKeepingLoop(NoIoLoop):
    """Collects what asyncio would only log. ``lost_exceptions`` gives each exception once."""

    def __init__(self) -> None:
        self._tasks = TaskRegistry()
        self._exception_handler: ExceptionHandler | None = None
        self._lost: list[BaseException] = []

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks that have not ended, in order of creation."""
        return self._tasks.pending()

    def describe_tasks(self) -> str:
        """What every pending task waits for."""
        return self._tasks.describe()

    def set_stack_source(self, task: asyncio.Task[Any], source: StackSource) -> None:
        """``source()`` gives the stack of the blocking code that ``task`` drives, innermost first."""
        self._tasks.stack_sources[task] = source

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        self._exception_handler = handler

    def get_exception_handler(self) -> ExceptionHandler | None:
        return self._exception_handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Keeps the exception for ``lost_exceptions``: asyncio calls this where raising is impossible."""
        error = context.get("exception") or SimulationError(context.get("message", "unknown failure"))
        error.add_note(f"reported to the event loop: {context.get('message', '')}")
        self._lost.append(error)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._exception_handler is None:
            self.default_exception_handler(context)
        else:
            self._exception_handler(self, context)

    def lost_exceptions(self) -> list[BaseException]:
        """Exceptions that nobody read, in order of their tasks' creation; each is given once."""
        lost, self._lost = self._lost, []
        return lost + self._tasks.take_lost()

    def _note_lost(self, error: BaseException) -> None:
        for other in self.lost_exceptions():
            if other is not error:
                error.add_note(f"also lost: {type(other).__name__}: {other} ({'; '.join(_notes(other))})")


async def all_ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Waits without reading the outcomes, so that failures stay visible as lost."""
    for task in tasks:
        if not task.done():
            ended = asyncio.get_running_loop().create_future()
            task.add_done_callback(functools.partial(_set, ended))
            await ended


def _set(ended: asyncio.Future[None], task: asyncio.Task[Any]) -> None:
    if not ended.done():  # whoever waited may have been cancelled
        ended.set_result(None)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])
