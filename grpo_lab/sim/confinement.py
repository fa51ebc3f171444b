"""Keeps simulated code inside: ``time`` is virtual, randomness is seeded, ways out raise.

While a simulation runs, on its thread only:

- ``time.time``, ``monotonic``, ``perf_counter``, ``process_time`` (and ``_ns``), ``localtime``, ``gmtime``,
  ``ctime``, ``strftime``, ``datetime.now`` and ``date.today`` give virtual time; ``time.sleep`` blocks the
  actor in virtual time;
- ``random``'s global functions are seeded for the run (and put back after it); ``os.urandom``, and with
  it ``uuid.uuid4``, ``secrets`` and ``random.SystemRandom``, is drawn from the seed;
- new sockets, threads and processes raise ``EscapedSimulation``.

Other threads are not affected. Not reached: names that a module copied with ``from time import time``
before the run (a copied class ``datetime`` is reached), and C code. A progress bar of tqdm starts a
monitor thread: turn bars off, or set ``tqdm.monitor_interval = 0``.
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
from grpo_lab.sim.virtual_datetime import virtual_datetime

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
    with ExitStack() as undo:
        for name, virtual in _clocks(loop).items():
            _patch(undo, loop, time, name, virtual)
        inside = _inside(loop)
        undo.enter_context(virtual_datetime(inside, lambda: EPOCH_S + loop.time()))
        _patch(undo, loop, os, "urandom", entropy.randbytes)
        _patch(undo, loop, random, "_urandom", entropy.randbytes)  # the copy that SystemRandom reads
        for owner, name, call, instead in _EXITS:
            if hasattr(owner, name):
                _patch(undo, loop, owner, name, _refusal(loop, call, instead))
        undo.callback(random.setstate, random.getstate())
        random.seed(f"global {seed}")
        yield


def _clocks(loop: VirtualLoop) -> dict[str, Callable[..., Any]]:
    """Functions of ``time``, by name."""

    def unix_s() -> float:
        return EPOCH_S + loop.time()

    def seconds(name: str) -> Callable[..., Any]:
        real = getattr(time, name)
        return lambda secs=None: real(unix_s() if secs is None else secs)

    gmtime, strftime, asctime = time.gmtime, time.strftime, time.asctime
    clocks: dict[str, Callable[..., Any]] = {
        "time": unix_s,
        "time_ns": lambda: EPOCH_S * _NS + round(loop.time() * _NS),
        "sleep": virtual_sleep,
        "strftime": lambda form, at=None: strftime(form, gmtime(unix_s()) if at is None else at),
        "asctime": lambda at=None: asctime(gmtime(unix_s()) if at is None else at),
    }
    for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
        clocks[name] = loop.time
        clocks[f"{name}_ns"] = lambda: round(loop.time() * _NS)
    return clocks | {name: seconds(name) for name in ("gmtime", "localtime", "ctime")}


def _inside(loop: VirtualLoop) -> Callable[[], bool]:
    """Whether the caller is simulated code, as opposed to another thread or the world around it."""
    thread_id = threading.get_ident()
    return lambda: loop.is_running() and threading.get_ident() == thread_id


def _patch(undo: ExitStack, loop: VirtualLoop, owner: Any, name: str, virtual: Callable[..., Any]) -> None:
    """Inside the running simulation ``owner.name`` is ``virtual``; everywhere else it is what it was."""
    real = getattr(owner, name)
    inside = _inside(loop)

    def patched(*args: Any, **kwargs: Any) -> Any:
        if inside():
            return virtual(*args, **kwargs)
        return real(*args, **kwargs)

    patched.__name__ = name
    setattr(owner, name, patched)
    undo.callback(setattr, owner, name, real)


def _refusal(loop: VirtualLoop, call: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise loop.escape(call, instead)

    return refuse
