"""``grpo-lab``: finds the command and turns every error into one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

import grpo_lab
from grpo_lab.errors import ConfigError, GrpoLabError

FAILED = 3
INTERRUPTED = 130
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BROKEN_PIPE = 141  # what a shell says of a process that SIGPIPE has ended
SURROGATES = ("\ud800", "\udfff")
USAGE = """\
usage: grpo-lab COMMAND [OPTIONS]

A wind tunnel for asynchronous GRPO: is the weight sync correct under every delay and fault, how stale
is what is trained on, what does each choice cost?

{commands}

First steps:
  grpo-lab run quickstart              train a small model asynchronously (about two minutes on two cores)
  grpo-lab run quickstart --help       every setting of a run, with its default
  grpo-lab run smoke --max-staleness 0 a few synchronous steps, in seconds
  grpo-lab check runs/latest           check the trace of the newest run again

Exit codes: 0 fine, 1 a rule was violated, 2 bad input, 3 the run failed, 130 interrupted.
"""


@dataclass(frozen=True, slots=True)
class Command:
    """``module`` is imported only when asked for. tyro reads the arguments of its function ``function``;
    a function ``main`` gets the words and reads them itself. Both return the exit code.
    """

    words: str
    module: str
    function: str = "main"

    def run(self, name: str, words: list[str]) -> int:
        function = getattr(importlib.import_module(self.module), self.function)
        if self.function == "main":
            return int(function(words))
        return int(tyro.cli(function, args=words, prog=f"grpo-lab {name}"))


COMMANDS = {
    "run": Command("run a recipe: engines, rollout worker and trainer, then the report", "grpo_lab.cli.run"),
    "check": Command("check a trace against the rules of the protocol", "grpo_lab.cli.check", "check"),
    "report": Command("make report.html of a run again", "grpo_lab.cli.report", "report"),
    "fuzz": Command("search simulated clusters for a broken rule", "grpo_lab.cli.fuzz", "fuzz"),
    "mutants": Command("plant faults of the field: is each caught?", "grpo_lab.cli.mutants", "mutants"),
    "replay": Command("run a failure that fuzz found again", "grpo_lab.cli.replay", "replay"),
    "serve": Command("serve a model like a vLLM server, simulated", "grpo_lab.cli.serve", "serve"),
    "record": Command(
        "measure a server under steady loads, fit the step latency", "grpo_lab.cli.record", "record"
    ),
    "bench": Command("measure on this machine: bench pack, sync, sim", "grpo_lab.cli.bench"),
    "sweep": Command("run an experiment's grid and draw its figures", "grpo_lab.cli.sweep", "sweep"),
    "calibrate": Command("fit the simulation's times to a real run", "grpo_lab.cli.calibrate", "calibrate"),
    "validate": Command("predict a held-out run, print the error", "grpo_lab.cli.validate", "validate"),
    "tune": Command("search a recipe's fields in simulation", "grpo_lab.cli.tune", "tune"),
    "doctor": Command("say what this machine can do and what is missing", "grpo_lab.cli.doctor", "doctor"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:  # as `| head` closes it
        code = BROKEN_PIPE
    except OSError as error:
        print(f"grpo-lab: the output cannot be written: {error}", file=sys.stderr)  # noqa: T201
        code = FAILED
    else:
        return code
    with contextlib.suppress(OSError):  # or the interpreter fails to flush it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())  # noqa: T201
        return 0 if words else 2
    if words[0] == "--version":
        print(f"grpo-lab {grpo_lab.__version__}")  # noqa: T201
        return 0
    name, rest = words[0], words[1:]
    command = COMMANDS.get(name)
    if command is None:
        print(f"grpo-lab: no command {name!r}; one of {', '.join(COMMANDS)}", file=sys.stderr)  # noqa: T201
        return 2
    return _guarded(name, command, rest)


def _guarded(name: str, command: Command, words: list[str]) -> int:
    try:
        _require_text(words)
        return command.run(name, words)
    except GrpoLabError as error:
        print(f"grpo-lab {name}: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except OSError as error:  # a full disk, say: nothing that a traceback would explain
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            raise
        hint = ". Make room there, or have it written elsewhere" if error.errno in NO_ROOM else ""
        print(f"grpo-lab {name}: {error}{hint}", file=sys.stderr)  # noqa: T201
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that its reader has closed; a pipe of ours may break as well."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except OSError:  # it is no file
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _require_text(words: list[str]) -> None:
    """Bytes that are no UTF-8 could be neither printed nor written into a trace."""
    for word in words:
        if any(SURROGATES[0] <= letter <= SURROGATES[1] for letter in word):
            raise ConfigError(
                "argument", word, "text in UTF-8", "Rename the file, or use a locale like LANG=C.UTF-8"
            )


def _usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    rows = [f"  {name:<{width}}{command.words}" for name, command in COMMANDS.items()]
    return USAGE.format(commands="\n".join(["Commands (each has --help):", *rows]))


if __name__ == "__main__":
    sys.exit(main())
