"""Rules checked while a run goes on: a process reads the trace, and what it finds is shown at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from grpo_lab.check import Checker, Violation
from grpo_lab.check.follow import follow
from grpo_lab.errors import GrpoLabError
from grpo_lab.trainer.interrupts import children_born_deaf
from grpo_lab.trainer.worker_main import die_with_parent

SHOWN_PER_RULE = 3
NICENESS = 5  # the run comes first
END_S = 15.0

_spawning = get_context("spawn")


class LiveCheck:
    """A context around a run. ``seen`` is called, in a thread, for the first violations of every rule.

    It does not decide how the run ends: the whole trace is checked again when it is there. ``failure`` says
    afterwards what went wrong with the checking, if anything did.
    """

    def __init__(self, events: Path, seen: Callable[[Violation], None]) -> None:
        self._seen = seen
        self._pipe, far_end = _spawning.Pipe(duplex=False)
        self._process = _spawning.Process(target=_check, args=(events, far_end), daemon=True)
        self._far_end = far_end
        self._thread = threading.Thread(target=self._listen, name="live-check", daemon=True)
        self.failure = ""

    def __enter__(self) -> Self:
        with children_born_deaf():
            self._process.start()
        self._far_end.close()
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits until the end of the trace was read."""
        self._process.join(END_S)
        if self._process.exitcode is None:
            self._process.terminate()
            self._process.join(END_S)
        self._thread.join(END_S)

    def _listen(self) -> None:
        shown: Counter[str] = Counter()
        try:
            while True:
                found: Violation | str = self._pipe.recv()
                if isinstance(found, str):
                    self.failure = f"the trace could not be checked while it was written: {found}"
                    continue
                shown[found.rule] += 1
                if shown[found.rule] <= SHOWN_PER_RULE:
                    self._seen(found)
        except EOFError:
            pass
        except Exception as error:  # showing it failed: the run goes on, and says so at its end
            self.failure = f"violations could not be shown any more: {type(error).__name__}: {error}"
        finally:
            self._pipe.close()


def _check(events: Path, pipe: Connection) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when the trace does
    os.nice(NICENESS)
    with contextlib.suppress(BrokenPipeError):
        try:
            for violation in follow(events, Checker()):
                pipe.send(violation)
        except GrpoLabError as error:
            pipe.send(str(error))
