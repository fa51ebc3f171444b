"""The tasks of a loop in order of creation: what each waits for, and exceptions that nobody read.

The texts are deterministic: no addresses, no set order.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import os
import re
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_ASYNCIO_DIR = os.path.dirname(asyncio.__file__)
_MAX_TASKS = 60
_MIN_PRUNE = 64

StackSource = Callable[[], list[str]]


class TaskRegistry:
    """Keeps every task until it has ended and its outcome was read.

    ``stack_sources[task]()`` gives the stack of the blocking code that the task drives.
    """

    def __init__(self) -> None:
        self.stack_sources: weakref.WeakKeyDictionary[Any, StackSource] = weakref.WeakKeyDictionary()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._prune_at = _MIN_PRUNE

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        if len(self._tasks) > self._prune_at:
            self._prune()

    def pending(self) -> list[asyncio.Task[Any]]:
        """Tasks that have not ended, in order of creation."""
        return [task for task in self._tasks if not task.done()]

    def take_lost(self) -> list[BaseException]:
        """Exceptions of ended tasks that nobody read, in order of creation. Each is given once."""
        lost = []
        for task in self._tasks:
            if task.done() and _is_lost(task):
                error = task.exception()  # reading it also silences asyncio's own report
                assert error is not None
                error.add_note(f"raised in task {task.get_name()!r}, which nobody awaited")
                lost.append(error)
        self._prune()
        return lost

    def describe(self) -> str:
        """A paragraph for every pending task."""
        pending = self.pending()
        lines: list[str] = []
        for task in pending[:_MAX_TASKS]:
            lines.extend(_describe(task, self.stack_sources.get(task)))
        if len(pending) > _MAX_TASKS:
            lines.append(f"  ... and {len(pending) - _MAX_TASKS} more tasks")
        return "\n".join(lines) if lines else "  no task is pending"

    def _prune(self) -> None:
        self._tasks = {task: None for task in self._tasks if not task.done() or _is_lost(task)}
        self._prune_at = _MIN_PRUNE + 2 * len(self._tasks)


def _describe(task: asyncio.Task[Any], stack: StackSource | None) -> list[str]:
    frames, awaited = _await_chain(task.get_coro())
    lines = [f"  {task.get_name()} waits for {_awaited(task, frames, awaited)}"]
    user_frames = [frame for frame in frames if not _is_asyncio(frame)]
    if user_frames:
        lines.append(f"    at {frame_line(user_frames[-1])}")
    if stack is not None:
        lines.append("    blocked in (innermost first):")
        lines.extend(f"      {line}" for line in stack())
    return lines


def frame_line(frame: FrameType) -> str:
    """``file:line function: source`` of where a frame stands."""
    path = frame.f_code.co_filename
    source = linecache.getline(path, frame.f_lineno).strip()
    place = f"{os.path.basename(path)}:{frame.f_lineno} {frame.f_code.co_qualname}"
    return f"{place}: {source}" if source else place


def _await_chain(coroutine: Any) -> tuple[list[FrameType], Any]:
    """Suspended frames from the outermost coroutine inwards, and what the innermost awaits."""
    frames: list[FrameType] = []
    awaited = coroutine
    while awaited is not None:
        if inspect.iscoroutine(awaited):
            frame, inner = awaited.cr_frame, awaited.cr_await
        elif inspect.isgenerator(awaited):
            frame, inner = awaited.gi_frame, awaited.gi_yieldfrom
        elif inspect.isasyncgen(awaited):
            frame, inner = awaited.ag_frame, awaited.ag_await
        else:
            break
        if frame is not None:
            frames.append(frame)
        awaited = inner
    return frames, awaited


def _awaited(task: asyncio.Task[Any], frames: list[FrameType], awaited: Any) -> str:
    future = getattr(task, "_fut_waiter", None) or awaited
    if isinstance(future, asyncio.Task):
        return f"task {future.get_name()}"
    if frames and _is_asyncio(frames[-1]):
        owner = frames[-1].f_locals.get("self")
        if owner is not None:
            return f"{frames[-1].f_code.co_qualname} of {_plain(owner)}"
    return "its turn" if future is None else _plain(future)


def _plain(value: object) -> str:
    return _ADDRESS.sub("", repr(value))[:200]


def _is_asyncio(frame: FrameType) -> bool:
    return os.path.dirname(frame.f_code.co_filename) == _ASYNCIO_DIR


def _is_lost(task: asyncio.Task[Any]) -> bool:
    """An exception was set and nobody read it. Both task implementations of CPython keep this flag."""
    return bool(getattr(task, "_log_traceback", False))
