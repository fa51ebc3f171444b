"""An ``asyncio`` event loop in virtual time, whose schedule comes from a tape.

Time stands still while anything is ready and then jumps to the next timer. Which ready callback runs
next is read from the ``Tape``; its zero is first in, first out, the order of stock asyncio.

The tape chooses only among orders that asyncio's contract leaves open. A *lane* is what keeps its
order: every task is one, every due timer is one (asyncio: callbacks due at the same time run in an
undefined order), and all other ``call_soon`` callbacks together are one ("called in the order in which
they are registered"). So a schedule that no event loop may produce is never blamed on the program.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Hashable
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from grpo_lab.errors import Deadlock, SimulationBoundExceeded
from grpo_lab.sim.escapes import refuse_the_rest
from grpo_lab.sim.tape import Tape, fifo
from grpo_lab.sim.task_keeping import TaskKeepingLoop, all_ended

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_VIRTUAL_S = 7 * 86_400.0
MAX_CALLBACKS = 50_000_000
_SHUTDOWN_CALLBACKS = 100_000
_SHUTDOWN_VIRTUAL_S = 3_600.0
_MIN_CANCELLED_TIMERS = 100


class VirtualLoop(TaskKeepingLoop):
    """Runs coroutines in virtual time, one callback after the other, in the order of ``tape``.

    Args:
        tape: the schedule; first in, first out when not given.
        max_virtual_s: ``SimulationBoundExceeded`` when the clock would pass it.
        max_callbacks: ``SimulationBoundExceeded`` when more callbacks ran (a livelock).

    Raises (from ``run_until_complete`` and ``run_forever``):
        Deadlock: nothing is ready and no timer is set; names every task and what it waits for.
        EscapedSimulation: a socket, process, thread, executor or signal handler was asked for, also
            when the caller swallowed the refusal.
        Any exception of a callback. An exception of a task that nobody awaited is raised by ``close``,
        or is a note on the exception that is already under way.

    >>> loop = VirtualLoop()
    >>> loop.run_until_complete(asyncio.sleep(3600, result="an hour later")), loop.time()
    ('an hour later', 3600.0)
    >>> loop.close()
    """

    def __init__(
        self,
        tape: Tape | None = None,
        max_virtual_s: float = MAX_VIRTUAL_S,
        max_callbacks: int = MAX_CALLBACKS,
    ) -> None:
        super().__init__()
        self.tape = fifo() if tape is None else tape
        self.max_virtual_s = max_virtual_s
        self.max_callbacks = max_callbacks
        self.callbacks = 0
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_seq = itertools.count()
        self._cancelled_timers = 0
        self._batch = 0
        self._stopping = False
        self._running = False
        self._closed = False
        self._debug = False
        self._thread_id = threading.get_ident()
        self._task_count = 0
        self._task_factory: Any = None
        self._asyncgens: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    # Time and callbacks

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if math.isnan(when):
            raise ValueError("a timer cannot be set for time nan")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]  # so that its cancel() tells us
        heapq.heappush(self._timers, (when, next(self._timer_seq), timer))
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """The same as ``call_soon`` from the loop's own thread; refused from any other."""
        if threading.get_ident() != self._thread_id:
            name = threading.current_thread().name
            raise self.escape(
                f"loop.call_soon_threadsafe from thread {name!r}", "a simulation has one thread: use an actor"
            )
        return self.call_soon(callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1
        if self._cancelled_timers > max(_MIN_CANCELLED_TIMERS, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    # Futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **kwargs: Any,
    ) -> asyncio.Task[T]:
        """Like stock asyncio; default names count from 1 in every loop, so that texts repeat."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        self._task_count += 1
        name = f"task-{self._task_count}" if name is None else str(name)
        task: asyncio.Task[T]
        if self._task_factory is not None:
            if context is not None:
                kwargs["context"] = context
            task = self._task_factory(self, coro, **kwargs)
            task.set_name(name)
        else:
            task = asyncio.Task(coro, loop=self, name=name, context=context, **kwargs)
        self._tasks.add(task)
        return task

    def set_task_factory(self, factory: Any) -> None:
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        return self._task_factory

    # Running

    def run_forever(self) -> None:
        """Until ``stop``. Raises what the class says."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if self._running:
            raise RuntimeError("This event loop is already running")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("Cannot run the event loop while another loop is running")
        old_hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._asyncgen_began, finalizer=self._asyncgen_dropped)
        self._running = True
        self._thread_id = threading.get_ident()
        asyncio._set_running_loop(self)
        try:
            self._run()
        finally:
            self._stopping = False
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*old_hooks)

    def run_until_complete(self, future: Awaitable[T]) -> T:
        """Runs until ``future`` is done and returns its result."""
        main: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)
        main.add_done_callback(self._main_ended)
        try:
            self.run_forever()
        except BaseException as error:
            if main.done() and not main.cancelled():
                main.exception()  # read: the error under way says more
            self._note_lost(error)
            raise
        finally:
            main.remove_done_callback(self._main_ended)
        if not main.done():
            raise RuntimeError("Event loop stopped before Future completed.")
        if not main.cancelled() and (failure := main.exception()) is not None:
            self._note_lost(failure)
        return main.result()

    def _main_ended(self, main: asyncio.Future[Any]) -> None:
        self.stop()

    def _run(self) -> None:
        ready, tape = self._ready, self.tape
        while True:
            if self._batch <= 0:
                if self._stopping:
                    return
                self._begin_batch()
            handle = ready.popleft() if tape.exhausted or len(ready) == 1 else self._choose()
            self._batch -= 1
            if handle._cancelled:
                continue
            self.callbacks += 1
            if self.callbacks > self.max_callbacks:
                ready.appendleft(handle)  # it is not lost: a shutdown may follow
                raise self._livelock()
            try:
                handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                if self._exception_handler is None:
                    raise
                self.call_exception_handler(
                    {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
                )
            if self.escaped is not None:
                break
        raise self.escaped

    def _begin_batch(self) -> None:
        """Moves due timers behind what is ready, as stock asyncio does once per round.

        The clock jumps only when nothing is ready.
        """
        timers, ready = self._timers, self._ready
        while timers and timers[0][2].cancelled():
            self._forget(heapq.heappop(timers)[2])
        if not ready:
            if not timers or timers[0][0] == math.inf:
                raise self._deadlock()
            self._advance_to(timers[0][0])
        now_s = self._now_s
        while timers and timers[0][0] <= now_s:
            timer = heapq.heappop(timers)[2]
            if timer.cancelled():
                self._forget(timer)
            else:
                timer._scheduled = False  # type: ignore[attr-defined]
                ready.append(timer)
        self._batch = len(ready)

    def _forget(self, timer: asyncio.TimerHandle) -> None:
        timer._scheduled = False  # type: ignore[attr-defined]
        self._cancelled_timers -= 1

    def _advance_to(self, when_s: float) -> None:
        if when_s > self.max_virtual_s:
            raise SimulationBoundExceeded(
                f"the next timer is set for virtual second {when_s:.6g}, past max_virtual_s="
                f"{self.max_virtual_s:.6g}: the simulation does not end, or raise the bound. Tasks:\n"
                + self.describe_tasks()
            )
        self._now_s = max(self._now_s, when_s)

    def _choose(self) -> asyncio.Handle:
        """Takes out of ``_ready`` the first callback of the lane that the tape chooses."""
        ready = self._ready
        lanes: list[Hashable] = []
        indices: list[int] = []
        plain_seen = False
        for index, handle in enumerate(ready):
            if handle._cancelled:
                continue
            owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
            if isinstance(owner, asyncio.Task):
                lanes.append(owner)
            elif isinstance(handle, asyncio.TimerHandle):
                lanes.append(handle)
            elif plain_seen:
                continue
            else:
                plain_seen = True
                lanes.append("call_soon")
            indices.append(index)
        chosen = indices[self.tape.choose(lanes)] if len(lanes) > 1 else (indices or [0])[0]
        if chosen == 0:
            return ready.popleft()
        handle = ready[chosen]
        del ready[chosen]
        return handle

    def _deadlock(self) -> Deadlock:
        return Deadlock(
            f"deadlock at virtual second {self._now_s:.6g}: nothing is ready, no timer is set, and the main "
            f"task has not ended. Tasks:\n{self.describe_tasks()}"
        )

    def _livelock(self) -> SimulationBoundExceeded:
        return SimulationBoundExceeded(
            f"{self.max_callbacks} callbacks ran by virtual second {self._now_s:.6g}, and more are ready: "
            f"max_callbacks={self.max_callbacks} met a livelock, or must be raised. Tasks:\n"
            + self.describe_tasks()
        )

    # The end

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def shutdown(self) -> list[str]:
        """Cancels all pending tasks in order of creation and runs until they have ended.

        Returns the names of the tasks that were pending. Raises ``Deadlock`` or
        ``SimulationBoundExceeded`` when one of them refuses to end.
        """
        names = [task.get_name() for task in self.pending_tasks()]
        self.escaped = None
        self.max_callbacks = max(self.max_callbacks, self.callbacks + _SHUTDOWN_CALLBACKS)
        self.max_virtual_s = max(self.max_virtual_s, self._now_s + _SHUTDOWN_VIRTUAL_S)
        while tasks := self.pending_tasks():
            for task in tasks:
                task.cancel("shutdown")
            self.run_until_complete(all_ended(tasks))
        self.run_until_complete(self.shutdown_asyncgens())
        return names

    async def shutdown_asyncgens(self) -> None:
        for generator in list(self._asyncgens):
            await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""

    def close(self) -> None:
        """Raises the first exception that nobody read, with the others as notes."""
        if self._running:
            raise RuntimeError("Cannot close a running event loop")
        if self._closed:
            return
        self._closed = True
        for task in self.pending_tasks():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        lost = self.lost_exceptions()
        self._ready.clear()
        self._timers.clear()
        if lost:
            for other in lost[1:]:
                lost[0].add_note(f"also lost: {type(other).__name__}: {other}")
            raise lost[0]

    def _asyncgen_began(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens[generator] = None

    def _asyncgen_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(generator.aclose())

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled


refuse_the_rest(VirtualLoop)
