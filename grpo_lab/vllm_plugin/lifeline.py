"""A server must not outlive who started it, nor its engine the server.

A kill -9 runs no clean-up code. The trainer's would leave the whole server behind; the API server's leaves
vLLM's engine core and workers behind, with their memory (seen with vLLM 0.32). So each of vLLM's processes
watches the process that it depends on.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable

PARENT_VARIABLE = "GRPO_LAB_PARENT_PID"
GRACE_S = 10.0
_THREAD = "grpo_lab-lifeline"

Kill = Callable[[int, int], None]


def watch_parents() -> None:
    """Begins to watch: this process ends with its own parent, and its whole group with the process named in
    ``GRPO_LAB_PARENT_PID``. Idempotent.
    """
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        return
    starter = os.environ.get(PARENT_VARIABLE, "")
    if starter.isdecimal() and _in_another_group(int(starter)):
        _watch(int(starter), os.killpg, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:  # a child of the API server or of the engine core
        _watch(parent.pid, os.kill, os.getpid())


def _in_another_group(pid: int) -> bool:
    """The group must be the server's own: what is ended is all of it."""
    try:
        return os.getpgid(pid) != os.getpgrp()
    except ProcessLookupError:  # it has ended already
        return True


def _watch(pid: int, kill: Kill, target: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        descriptor = None
    threading.Thread(target=_end_after, args=(descriptor, kill, target), name=_THREAD, daemon=True).start()


def _end_after(descriptor: int | None, kill: Kill, target: int) -> None:
    if descriptor is not None:
        select.select([descriptor], [], [])  # readable when the process has ended
    kill(target, signal.SIGTERM)
    time.sleep(GRACE_S)
    kill(target, signal.SIGKILL)
