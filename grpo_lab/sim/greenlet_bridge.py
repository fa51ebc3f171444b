"""Blocking code in virtual time: each blocking actor is a greenlet that the loop resumes.

A task drives the greenlet. Where blocking code would block (``GreenletBridge.call``,
``virtual_sleep``, a patched ``time.sleep``) the greenlet hands an awaitable to its task and is switched
out; when the awaitable is done the task switches back in with its result or exception. So to the loop,
to its tape and to its deadlock report a blocking actor is a task like any other.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import greenlet

from grpo_lab.errors import EscapedSimulation, PhaseTimeout, SimulationError
from grpo_lab.sim.loop import VirtualLoop

T = TypeVar("T")

CANCEL_TIMEOUT_S = 10.0
_MAX_FRAMES = 12


class BlockingActor(greenlet.greenlet):  # type: ignore[misc]
    """Blocking code with a stack of its own. Make one with ``spawn_blocking``."""

    def __init__(self, function: Callable[[], Any], loop: VirtualLoop, name: str) -> None:
        super().__init__(function)
        self.loop = loop
        self.name = name
        self._grad = True

    def block(self, awaitable: Awaitable[T]) -> T:
        """Called on the actor's own stack: waits for ``awaitable`` while the loop goes on."""
        assert self.parent is not None
        if _inference_mode():
            if isinstance(awaitable, Coroutine):
                awaitable.close()
            raise SimulationError(
                f"{self.name} would wait inside torch.inference_mode(), which would then hold for every "
                "other actor of this thread: use torch.no_grad() there"
            )
        result: T = self.parent.switch(awaitable)
        return result

    async def drive(self) -> Any:
        """The task's side: runs the actor to its end and returns its result or raises its exception."""
        self.parent = greenlet.getcurrent()
        self.gr_context = self.parent.gr_context  # the actor sees its task's context variables
        awaitable = self._resume(self.switch)
        while not self.dead:
            try:
                value = await awaitable
            except BaseException as error:
                failure = error
            else:
                awaitable = self._resume(self.switch, value)
                continue
            awaitable = self._resume(self.throw, failure)
        return awaitable  # what the function returned

    def stack(self) -> list[str]:
        """Where the actor is blocked, innermost frame first, without this module's frames."""
        frame = self.gr_frame
        if frame is None:
            return []
        summary = traceback.extract_stack(frame)
        lines = [
            f"{entry.filename.rsplit('/', 1)[-1]}:{entry.lineno} {entry.name}: {entry.line}"
            for entry in reversed(summary)
            if entry.filename != __file__
        ]
        return lines[:_MAX_FRAMES]

    def _resume(self, switch: Callable[..., Any], *args: Any) -> Any:
        """Switches in. torch keeps its grad mode per thread, but here it belongs to the actor."""
        outside = _grad_enabled()
        _set_grad_enabled(self._grad)
        try:
            return switch(*args)
        finally:
            self._grad = _grad_enabled()
            _set_grad_enabled(outside)


def _grad_enabled() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or torch.is_grad_enabled()


def _set_grad_enabled(enabled: bool) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and enabled != torch.is_grad_enabled():
        torch._C._set_grad_enabled(enabled)


def _inference_mode() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_inference_mode_enabled()


def current_actor() -> BlockingActor | None:
    """The blocking actor whose stack this is, or None in a coroutine."""
    here = greenlet.getcurrent()
    return here if isinstance(here, BlockingActor) else None


def spawn_blocking(loop: VirtualLoop, function: Callable[[], T], name: str = "actor") -> asyncio.Task[T]:
    """Starts blocking code as an actor of ``loop``. The task ends with its result or exception.

    Cancelling the task raises ``CancelledError`` where the actor is blocked.
    """
    actor = BlockingActor(function, loop, name)
    task = loop.create_task(actor.drive(), name=name)
    loop.set_stack_source(task, actor.stack)
    return task


def virtual_sleep(seconds: float) -> None:
    """``time.sleep`` for blocking actors. Raises ``EscapedSimulation`` in a coroutine."""
    actor = current_actor()
    if actor is None:
        loop = asyncio.get_running_loop()
        message, instead = "time.sleep in a coroutine", "await asyncio.sleep instead"
        if isinstance(loop, VirtualLoop):
            raise loop.escape(message, instead)
        raise EscapedSimulation(f"{message}; {instead}")
    actor.block(asyncio.sleep(seconds))


@dataclass(frozen=True, slots=True)
class _CallerRequest:
    """A function to run on the blocked actor's stack."""

    function: Callable[[], Any]
    answer: asyncio.Future[Any]


class GreenletBridge:
    """``grpo_lab.ports.Bridge`` for one blocking actor of a simulation.

    >>> loop = VirtualLoop()
    >>> bridge = GreenletBridge(loop)
    >>> loop.run_until_complete(spawn_blocking(loop, lambda: bridge.call(asyncio.sleep(5, "slept"), 9)))
    'slept'
    >>> loop.time()
    5.0
    >>> loop.close()
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._actor: BlockingActor | None = None
        self._requests: deque[_CallerRequest] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._closed = False

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Blocks the actor until the coroutine is done; returns its result or raises its exception.

        Raises ``PhaseTimeout`` after ``timeout_s`` virtual seconds: the coroutine is cancelled first and
        given time to clean up. Calls may nest: a function given to ``in_caller`` may call again.
        """
        try:
            actor = self._calling_actor()
        except BaseException:
            coroutine.close()
            raise
        called = getattr(coroutine, "__qualname__", repr(coroutine))
        task = self._loop.create_task(coroutine, name=f"{actor.name} calls {called}")
        task.add_done_callback(self._wake_up)
        deadline_s = self._loop.time() + timeout_s
        try:
            in_time = self._serve_until_done(actor, task, deadline_s)
        except BaseException:
            task.cancel()
            raise
        if in_time:
            return task.result()
        raise self._timed_out(actor, task, timeout_s)

    def in_caller(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Runs ``function`` on the actor's stack, as soon as it is blocked in ``call``."""
        answer: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            answer.set_exception(SimulationError("the bridge is closed: nobody runs the function"))
            return answer
        self._requests.append(_CallerRequest(function, answer))
        self._wake_up()
        return answer

    def close(self) -> None:
        """Fails what is still waiting for the caller. Idempotent."""
        self._closed = True
        while self._requests:
            answer = self._requests.popleft().answer
            if not answer.done():
                answer.set_exception(SimulationError("the bridge was closed before the function could run"))

    def _calling_actor(self) -> BlockingActor:
        actor = current_actor()
        if actor is None:
            raise self._loop.escape(
                "GreenletBridge.call outside a blocking actor", "await the coroutine, or use spawn_blocking"
            )
        if self._closed:
            raise SimulationError(f"{actor.name} called through a bridge that is closed")
        if self._actor is None or self._actor.dead:
            self._actor = actor
        if actor is not self._actor:
            raise SimulationError(
                f"{actor.name} called through the bridge of {self._actor.name}: make a bridge for each actor"
            )
        return actor

    def _serve_until_done(self, actor: BlockingActor, task: asyncio.Task[Any], deadline_s: float) -> bool:
        """Runs ``in_caller`` functions until the task is done. False when the deadline came first."""
        while True:
            request = actor.block(self._next_request(task, deadline_s))
            if request is None:
                return task.done()
            if request.answer.done():  # cancelled meanwhile
                continue
            try:
                value = request.function()
            except Exception as error:
                if not request.answer.done():
                    request.answer.set_exception(error)
            else:
                if not request.answer.done():
                    request.answer.set_result(value)

    async def _next_request(self, task: asyncio.Task[Any], deadline_s: float) -> _CallerRequest | None:
        try:
            async with asyncio.timeout_at(deadline_s):
                while not self._requests and not task.done():
                    self._wake = self._loop.create_future()
                    await self._wake
        except TimeoutError:
            return None
        return self._requests.popleft() if self._requests else None

    def _wake_up(self, _: object = None) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _timed_out(self, actor: BlockingActor, task: asyncio.Task[Any], timeout_s: float) -> PhaseTimeout:
        """Cancels the call and waits for its end; the actor keeps serving ``in_caller`` meanwhile."""
        tasks = self._loop.describe_tasks()
        task.cancel()
        ended = self._serve_until_done(actor, task, self._loop.time() + CANCEL_TIMEOUT_S)
        error = PhaseTimeout(
            f"{task.get_name()}: not done after {timeout_s} virtual seconds. Tasks:\n{tasks}"
        )
        if not ended:
            error.add_note(f"it did not end within {CANCEL_TIMEOUT_S} s of being cancelled either")
        elif not task.cancelled() and (failure := task.exception()) is not None:
            error.add_note(f"while being cancelled it raised {type(failure).__name__}: {failure}")
        return error
