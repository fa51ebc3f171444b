"""The console of all commands."""

from __future__ import annotations

import contextlib

from rich.console import Console


class PipeConsole(Console):
    """A reader that leaves, as ``| head`` does, ends nothing: what is under way goes on unseen, its files are
    written, and the exit code still says how it ended. rich would exit in the middle of it, with 1.
    """

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()  # points standard output to nowhere
