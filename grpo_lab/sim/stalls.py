"""Actors that stand still, as a process does in a long garbage collection or a debugger.

Not one step of a stalled actor's tasks runs; what others send it, and its own time-outs, wait for it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

_ACTOR: contextvars.ContextVar[Stalls | None] = contextvars.ContextVar("stalling_actor", default=None)


class Stalls:
    """Of one actor. Coroutines given to ``within``, and all tasks that they start, are the actor's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s = 0.0

    def stall(self, duration_s: float) -> None:
        self._until_s = max(self._until_s, self._clock() + duration_s)

    @property
    def left_s(self) -> float:
        """Seconds until the actor moves again."""
        return max(0.0, self._until_s - self._clock())

    def end(self) -> None:
        """The actor is dead: its tasks unwind at once when they are cancelled."""
        self._until_s = 0.0

    def spawn(self, start: Callable[[], T]) -> T:
        """Calls ``start``; the tasks that it makes are this actor's."""
        context = contextvars.copy_context()
        context.run(_ACTOR.set, self)
        return context.run(start)

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` as a part of this actor."""
        _ACTOR.set(self)
        return await _Held(work, self)


def outside(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task that is no part of the actor that starts it: a message under way, somebody else's work."""
    context = contextvars.copy_context()
    context.run(_ACTOR.set, None)
    return asyncio.get_running_loop().create_task(work, name=name, context=context)


def task_factory(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], **options: Any
) -> asyncio.Task[T]:
    """For ``loop.set_task_factory``: a task belongs to the actor that started it."""
    context = options.get("context")
    actor = _ACTOR.get() if context is None else context.get(_ACTOR)
    return asyncio.Task(work if actor is None else _Held(work, actor), loop=loop, **options)


class _Held(Coroutine[Any, Any, T]):
    """``work``, whose steps wait while its actor stands still. Its frames are those of ``work``."""

    def __init__(self, work: Coroutine[Any, Any, T], actor: Stalls) -> None:
        self._work: Any = work
        self._actor = actor
        self._steps: Generator[Any, Any, T] | None = None
        self.__qualname__ = getattr(work, "__qualname__", "")

    def send(self, value: Any) -> Any:
        if self._steps is None:
            self._steps = _steps(self._work, self._actor)
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error) if self._steps is None else self._steps.throw(*error)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        self._steps = _steps(self._work, self._actor)
        return self._steps

    @property
    def cr_frame(self) -> Any:
        return self._work.cr_frame

    @property
    def cr_await(self) -> Any:
        return self._work.cr_await


def _steps(work: Any, actor: Stalls) -> Generator[Any, Any, Any]:
    """Hands on what ``work`` waits for, and each step back only while the actor moves."""
    value: Any = None
    error: BaseException | None = None
    while True:
        while (left_s := actor.left_s) > 0:
            try:
                yield from asyncio.sleep(left_s).__await__()
            except asyncio.CancelledError as cancelled:
                error = cancelled  # it hears of that later
        try:
            waits_for = work.send(value) if error is None else work.throw(error)
        except StopIteration as stop:
            return stop.value
        value, error = None, None
        try:
            value = yield waits_for
        except GeneratorExit:
            raise
        except BaseException as raised:
            error = raised
