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
            task = self._start(coroutine, jobs)
            try:
                ended = self._serve(jobs, timeout_s)
            except KeyboardInterrupt:
                self._end_after_interrupt(task, jobs)
                raise
            if not ended:
                ended = self._cancel(task, jobs)
                name = getattr(coroutine, "__qualname__", "the call")
                also = "" if ended else f", nor within {INTERRUPT_GRACE_S:g} s of being cancelled"
                raise PhaseTimeout(f"{name} did not end within {timeout_s:g} s{also}")
            return task.result()
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
            except BaseException:
                # Ctrl-C: nobody will compute this any more, and whoever awaits it must clean up.
                self._loop.call_soon_threadsafe(result.cancel)
                raise
            else:
                self._loop.call_soon_threadsafe(_succeed, result, value)

        jobs.put(job)
        return result

    def close(self) -> None:
        """Ends the loop; tasks that are left are cancelled first. Safe to call twice.

        Raises ``PhaseTimeout`` when a task does not end; its loop is abandoned with its (daemon) thread.
        """
        if self._loop.is_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(INTERRUPT_GRACE_S)
        except TimeoutError as error:
            raise PhaseTimeout(
                f"tasks of {self._thread.name} did not end within {INTERRUPT_GRACE_S:g} s of being cancelled"
            ) from error
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(START_TIMEOUT_S)
            if not self._thread.is_alive():
                self._loop.close()

    def _start(
        self, coroutine: Coroutine[Any, Any, T], jobs: queue.SimpleQueue[Job | None]
    ) -> asyncio.Task[T]:
        """The end is announced by the task itself, so that a cancelled one is waited for, too."""
        started: Future[asyncio.Task[T]] = Future()

        def start() -> None:
            task = self._loop.create_task(coroutine)
            task.add_done_callback(lambda _: jobs.put(None))
            started.set_result(task)

        self._loop.call_soon_threadsafe(start)
        return started.result(START_TIMEOUT_S)

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

    def _end_after_interrupt(self, task: asyncio.Task[Any], jobs: queue.SimpleQueue[Job | None]) -> None:
        if not self._serve(jobs, INTERRUPT_GRACE_S):
            self._cancel(task, jobs)

    def _cancel(self, task: asyncio.Task[Any], jobs: queue.SimpleQueue[Job | None]) -> bool:
        """True when the task ended; what it still needs from this thread is done meanwhile."""
        self._loop.call_soon_threadsafe(task.cancel)
        return self._serve(jobs, INTERRUPT_GRACE_S)


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
