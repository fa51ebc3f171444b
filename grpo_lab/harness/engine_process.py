"""Engine servers as child processes: started, waited for, watched and always stopped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from grpo_lab.errors import EngineError, ModelError

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 5.0
READY_WORD = "ready at "


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start one engine. Its standard error goes to ``log``; it says on which address it listens."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    threads: int = 1


class EngineProcess:
    """One server. It gets a process group of its own, so that Ctrl-C reaches the trainer alone."""

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self.url = ""
        self.death_seen = ""  # how it ended before anybody asked it to
        self._log: IO[bytes] = command.log.open("ab")
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            command.arguments,
            stdout=subprocess.PIPE,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(command.threads), "PYTHONUNBUFFERED": "1"},
        )

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> str:
        """The server's address.

        Raises ``EngineError`` with its last words when it does not come up, ``ModelError`` if they are about
        its input.
        """
        deadline_s = time.monotonic() + timeout_s
        said = b""
        stdout = self._process.stdout
        assert stdout is not None
        while READY_WORD.encode() not in said or not said.endswith(b"\n"):
            remaining_s = deadline_s - time.monotonic()
            ready, _, _ = select.select([stdout], [], [], max(0.0, remaining_s))
            if not ready:
                raise EngineError(
                    f"{self.command.name} was not ready within {timeout_s:g} s; see {self.command.log}"
                )
            data = os.read(stdout.fileno(), 4096)
            if not data:
                code = self._process.wait(STOP_TIMEOUT_S)
                # What it was given by us is right, so bad input to it is bad input to the run: the model.
                kind = ModelError if code == ModelError.exit_code else EngineError
                raise kind(f"{self.command.name} did not start: {self.death()}")
            said += data
        self.url = said.decode().split(READY_WORD)[1].split()[0]
        return self.url

    def death(self) -> str:
        """How it ended, with the last line of its log; empty while it lives."""
        code = self._process.poll()
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = _last_line(self.command.log)
        return f"{how} (pid {self.pid}){f'; its last words: {last}' if last else ''}"

    def stop(self) -> None:
        """Asks, then insists. Safe to call twice."""
        for ask in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, ask)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def running_engines(commands: Sequence[ServerCommand]) -> Iterator[list[EngineProcess]]:
    """All engines, started side by side and ready; stopped on every path."""
    processes: list[EngineProcess] = []
    try:
        for command in commands:
            processes.append(EngineProcess(command))
        for process in processes:
            process.wait_ready()
        yield processes
    finally:
        for process in processes:
            process.stop()


def simulated_engine(
    name: str, model: Path, *, events: Path, logs: Path, started_s: float, seed: int, options: Sequence[str]
) -> ServerCommand:
    """The command line of one simulated vLLM on a free port of the loopback interface."""
    arguments = (
        sys.executable,
        "-m",
        "grpo_lab.cli.serve",
        str(model),
        "--name",
        name,
        "--port",
        "0",
        "--events",
        str(events),
        "--clock-zero",
        repr(started_s),
        "--seed",
        str(seed),
        "--parent-pid",
        str(os.getpid()),
        "--rl-routes",
        *options,
    )
    return ServerCommand(name, arguments, logs / f"{name}.log")


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""
    return ""
