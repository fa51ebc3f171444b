"""Keeps simulated code inside: ``time`` is virtual, randomness is seeded, ways out raise.

While a simulation runs, on its thread only:

- ``time.time``, ``monotonic``, ``perf_counter`` (and ``_ns``) give virtual time; ``time.sleep`` blocks the
  actor in virtual time;
- ``random``'s global functions are seeded for the run (and put back after it); ``os.urandom``, and with
  it ``uuid.uuid4``, is drawn from the seed;
- new sockets, threads and processes raise ``EscapedSimulation``.

Other threads are not affected. Not reached: names that a module copied with ``from time import time``
before the run, C code, and ``datetime.now``. A progress bar of tqdm starts a monitor thread: turn bars
off, or set ``tqdm.monitor_interval = 0``.
"""

from __future__ import annotations

import multiprocessing.process
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_lab.sim.greenlet_bridge import virtual_sleep
from grpo_lab.sim.loop import VirtualLoop

EPOCH_S = 1_000_000_000  # virtual second 0 on time.time(): 2001-09-09 01:46:40 UTC
_NS = 1_000_000_000

_EXITS: tuple[tuple[Any, str, str, str], ...] = (
    (socket.socket, "__init__", "socket.socket", "use a simulated port (grpo_lab.ports)"),
    (threading.Thread, "start", "threading.Thread.start", "use an actor: a task, or spawn_blocking"),
    (subprocess.Popen, "__init__", "subprocess.Popen", "use an actor: a task, or spawn_blocking"),
    (multiprocessing.process.BaseProcess, "start", "multiprocessing.Process.start", "use an actor"),
    (os, "fork", "os.fork", "use an actor: a task, or spawn_blocking"),
    (os, "system", "os.system", "use an actor: a task, or spawn_blocking"),
)


@contextmanager
def confined(loop: VirtualLoop, seed: int = 0) -> Iterator[None]:
    """Patches the standard library for the time of a ``with`` block. Blocks may nest."""
    entropy = random.Random(f"urandom {seed}")
    clocks: dict[str, Callable[..., Any]] = {
        "time": lambda: EPOCH_S + loop.time(),
        "time_ns": lambda: EPOCH_S * _NS + round(loop.time() * _NS),
        "monotonic": loop.time,
        "monotonic_ns": lambda: round(loop.time() * _NS),
        "perf_counter": loop.time,
        "perf_counter_ns": lambda: round(loop.time() * _NS),
        "sleep": virtual_sleep,
    }
    with ExitStack() as undo:
        for name, virtual in clocks.items():
            _patch(undo, loop, time, name, virtual)
        _patch(undo, loop, os, "urandom", entropy.randbytes)
        for owner, name, call, instead in _EXITS:
            if hasattr(owner, name):
                _patch(undo, loop, owner, name, _refusal(loop, call, instead))
        undo.callback(random.setstate, random.getstate())
        random.seed(f"global {seed}")
        yield


def _patch(undo: ExitStack, loop: VirtualLoop, owner: Any, name: str, virtual: Callable[..., Any]) -> None:
    """Inside the running simulation ``owner.name`` is ``virtual``; everywhere else it is what it was."""
    real = getattr(owner, name)
    thread_id = threading.get_ident()

    def patched(*args: Any, **kwargs: Any) -> Any:
        if loop.is_running() and threading.get_ident() == thread_id:
            return virtual(*args, **kwargs)
        return real(*args, **kwargs)

    patched.__name__ = name
    setattr(owner, name, patched)
    undo.callback(setattr, owner, name, real)


def _refusal(loop: VirtualLoop, call: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise loop.escape(call, instead)

    return refuse
