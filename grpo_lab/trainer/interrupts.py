"""Ctrl-C reaches every process of a terminal's foreground group. Which of them shall mind is said here."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_CTRL_C = frozenset({signal.SIGINT})


@contextlib.contextmanager
def children_born_deaf() -> Iterator[None]:
    """A process that this thread starts within does not see Ctrl-C, until it calls :func:`hear_ctrl_c`.

    An interpreter that is interrupted while it starts prints a traceback that nothing can prevent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _CTRL_C)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_ctrl_c() -> None:
    """Undoes it, in the child."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _CTRL_C)
