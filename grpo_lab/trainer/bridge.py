"""Protocol coroutines called from the trainer's blocking code: a loop in a background thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from grpo_lab.errors import PhaseTimeout

T = TypeVar("T")
Job = Callable[[], None]

START_TIMEOUT_S = 10.0
INTERRUPT_GRACE_S = 5.0  # how long a coroutine may take to end after Ctrl-C


class ThreadBridge:
    """Implements the ``Bridge`` port in the real world.

    ``call`` blocks its thread and meanwhile runs, in that thread, what the coroutine hands to
    ``in_caller``: collectives and autograd belong there. One call at a time. An exception of the
    coroutine, or of a function in the caller, leaves through ``call``.

    Ctrl-C during a call lets the coroutine end first, for a few seconds: a sync that was cut in the
    middle would leave engines paused.
    """

    def __init__(self, name: str = "grpo-lab-protocol") -> None:
        self._loop = asyncio.new_event_loop()
        self._jobs: queue.SimpleQueue[Job | None] | None = None
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs the coroutine to its end. Raises what it raises, or ``PhaseTimeout`` after cancelling it."""
        if not self._busy.acquire(blocking=False):
            coroutine.close()
            raise RuntimeError("a call is under way: the bridge serves one blocking caller at a time")
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        try:
            self._jobs = jobs
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            future.add_done_callback(lambda _: jobs.put(None))
            try:
                ended = self._serve(jobs, timeout_s)
            except KeyboardInterrupt:
                self._cancel_after_grace(future, jobs)
                raise
            if not ended:
                future.cancel()
                self._serve(jobs, INTERRUPT_GRACE_S)
                raise PhaseTimeout(f"{getattr(coroutine, "__qualname__", "the call")} did not end within {timeout_s:g} s")
            return future.result()
        finally:
            self._jobs = None
            self._busy.release()

    def in_caller(self, function: Callable[[], T]) -> Awaitable[T]:
        """From a coroutine under ``call``: runs ``function`` in the blocked thread and awaits its result."""
        jobs = self._jobs
        if jobs is None:
            raise RuntimeError("in_caller outside of a call: no thread is waiting to run it")
        result: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                value = function()
            except Exception as error:
                self._loop.call_soon_threadsafe(_fail, result, error)
            else:
                self._loop.call_soon_threadsafe(_succeed, result, value)

        jobs.put(job)
        return result

    def close(self) -> None:
        """Ends the loop; tasks that are left are cancelled first. Safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(INTERRUPT_GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)
        self._loop.close()

    def _serve(self, jobs: queue.SimpleQueue[Job | None], timeout_s: float) -> bool:
        """Runs jobs until the coroutine has ended; False when the time is over first."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                job = jobs.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return False
            if job is None:
                return True
            job()

    def _cancel_after_grace(self, future: Future[Any], jobs: queue.SimpleQueue[Job | None]) -> None:
        if not self._serve(jobs, INTERRUPT_GRACE_S):
            future.cancel()
            self._serve(jobs, INTERRUPT_GRACE_S)


def _succeed(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in sorted(others, key=lambda task: task.get_name()):
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
