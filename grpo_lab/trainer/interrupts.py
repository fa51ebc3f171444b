"""Ctrl-C reaches every process of a terminal's foreground group. Here the parent alone hears it."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker

_CTRL_C = frozenset({signal.SIGINT})


@contextlib.contextmanager
def children_born_deaf() -> Iterator[None]:
    """A process that this thread starts within does not see Ctrl-C.

    An interpreter that is interrupted while it starts, or imports what its task needs, prints a traceback
    that nothing can prevent.
    """
    resource_tracker.ensure_running()  # multiprocessing's: the first start lets the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _CTRL_C)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def children_ended_early() -> Iterator[None]:
    """Whatever raises within, Ctrl-C for one, ends this process's children: by SIGTERM, which a run of ours
    takes for Ctrl-C and which ends all else at once, without a word.
    """
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
