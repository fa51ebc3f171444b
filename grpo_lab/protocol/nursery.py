"""An ordered task group.

``asyncio.TaskGroup`` keeps its children in a set, so it cancels them in an order that differs from run
to run, and it raises an ``ExceptionGroup``, which hides the one failure that matters. A nursery starts,
awaits and cancels its children in order of creation and raises one exception: the first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from grpo_lab.errors import PhaseTimeout

T = TypeVar("T")

CANCEL_TIMEOUT_S = 10.0


class Nursery:
    """Children that end before the block does.

    Rules:
        - Leaving the block waits for every child, at most until ``timeout_s`` after it was entered;
          then ``PhaseTimeout`` names the children that had not ended.
        - The first child that fails cancels the block and its siblings, in order of creation. Its
          exception leaves the block; failures of the others are notes on it.
        - An exception of the block itself, or a cancellation from outside, cancels all children first
          and then leaves the block. A child's failure wins over a cancellation, which would hide it.
        - A cancelled child is not a failure.
        - Cancelled children have ``cancel_timeout_s`` to end; one that does not is named in a
          ``PhaseTimeout`` (or in a note on the exception that is already under way).

    ``timeout_s=math.inf`` is for loops that last as long as the run: what bounds them is their owner.

    >>> async def main() -> int:
    ...     async with Nursery("doubling", timeout_s=1.0) as nursery:
    ...         child = nursery.start(asyncio.sleep(0, result=21), name="half")
    ...     return 2 * child.result()
    >>> asyncio.run(main())
    42
    """

    def __init__(self, name: str, timeout_s: float, cancel_timeout_s: float = CANCEL_TIMEOUT_S) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.cancel_timeout_s = cancel_timeout_s
        self._children: dict[asyncio.Task[Any], None] = {}
        self._failures: list[tuple[str, BaseException]] = []
        self._parent: asyncio.Task[Any] | None = None
        self._deadline_s = 0.0
        self._leaving = False
        self._cancelling = False
        self._interrupted_block = False
        self._wake = asyncio.Event()

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the children that have not ended, in order of creation."""
        return tuple(task.get_name() for task in self._children)

    def start(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts a child. Raises ``RuntimeError`` outside the block or once children are being cancelled."""
        if self._parent is None or self._cancelling or (self._leaving and not self._children):
            coroutine.close()
            state = "not entered" if self._parent is None else "ending"
            raise RuntimeError(f"nursery {self.name!r} is {state}: it cannot start {name!r}")
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._children[task] = None
        task.add_done_callback(self._child_ended)
        return task

    def cancel(self) -> None:
        """Cancels every child, in order of creation. The block ends normally when they have ended."""
        self._cancelling = True
        for task in tuple(self._children):
            task.cancel()

    async def __aenter__(self) -> Self:
        self._parent = asyncio.current_task()
        timeout_s = self.timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._leaving = True
        cancelled_outside = await self._absorb_own_interrupt(exc)
        own_interrupt = isinstance(exc, asyncio.CancelledError) and not cancelled_outside
        block_error = None if own_interrupt else exc
        if block_error is not None:
            self.cancel()
        try:
            cancelled_outside |= await self._wait_for_children()
        finally:
            self._parent = None
        if self._failures and isinstance(block_error, asyncio.CancelledError):
            block_error = None
        elif cancelled_outside and block_error is None and not self._failures:
            block_error = asyncio.CancelledError()
        self._raise_one(block_error, exc)
        return own_interrupt

    def _child_ended(self, task: asyncio.Task[Any]) -> None:
        del self._children[task]
        self._wake.set()
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self._failures.append((task.get_name(), error))
        if not self._cancelling:
            self.cancel()
            if not self._leaving and self._parent is not None:
                self._interrupted_block = True
                self._parent.cancel()

    async def _absorb_own_interrupt(self, exc: BaseException | None) -> bool:
        """Takes back the cancellation by which a failed child ended the block.

        Returns True when the block was (also) cancelled from outside.
        """
        if not self._interrupted_block:
            return isinstance(exc, asyncio.CancelledError)
        assert self._parent is not None
        if not isinstance(exc, asyncio.CancelledError):
            # The block ended before the cancellation reached it: it is delivered at the next await.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        return self._parent.uncancel() > 0

    async def _wait_for_children(self) -> bool:
        """Until all children ended or refused to. Returns True when cancelled from outside meanwhile."""
        cancelled_outside = False
        deadline_s = self._deadline_s
        in_grace = False
        while self._children:
            if self._cancelling and not in_grace:
                in_grace = True
                deadline_s = asyncio.get_running_loop().time() + self.cancel_timeout_s
            self._wake.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._wake.wait()
            except TimeoutError:
                error = self._timeout_error(in_grace)
                self._failures.append((self.name, error))
                if in_grace:
                    break
                self.cancel()
            except asyncio.CancelledError:
                cancelled_outside = True
                self.cancel()
        return cancelled_outside

    def _timeout_error(self, in_grace: bool) -> PhaseTimeout:
        names = ", ".join(self.running)
        if in_grace:
            bound = f"{self.cancel_timeout_s} s of being cancelled"
            return PhaseTimeout(f"nursery {self.name!r}: {names} did not end within {bound}")
        return PhaseTimeout(f"nursery {self.name!r}: {names} did not end within {self.timeout_s} s")

    def _raise_one(self, block_error: BaseException | None, exc: BaseException | None) -> None:
        """Raises the block's error or the first failure, the rest as notes. No ``__context__`` is added."""
        failures = list(self._failures)
        self._failures.clear()
        error = block_error
        if error is None:
            if not failures:
                return
            error = failures.pop(0)[1]
        for name, other in failures:
            if other is not error:
                error.add_note(f"also failed: {name}: {type(other).__name__}: {other}")
        if error is exc:
            return  # __aexit__ returns False, so that the interpreter goes on raising it
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context


async def run_all(
    name: str, coroutines: Iterable[tuple[str, Coroutine[Any, Any, T]]], timeout_s: float
) -> list[T]:
    """Runs named coroutines side by side and returns their results in the order given.

    Raises the first failure after the others were cancelled, or ``PhaseTimeout`` naming the unfinished.
    A child that was cancelled by somebody else raises ``CancelledError`` here.
    """
    async with Nursery(name, timeout_s) as nursery:
        children = [nursery.start(coroutine, name=child) for child, coroutine in coroutines]
    return [child.result() for child in children]
