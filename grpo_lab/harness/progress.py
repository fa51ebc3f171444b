"""What a user sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 5.0


class RunProgress:
    """Stages, then the steps of the training. Without a terminal a line at most every few seconds."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._last_plain_s = 0.0
        self._clock = time.monotonic  # kept: while a simulation runs, the name means virtual time
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def stage(self, words: str) -> Iterator[None]:
        """Says what is being done, and how long it took."""
        started_s = self._clock()
        if self._bar is None:
            self._console.print(f"{words} ...")
        yield
        took = self._clock() - started_s
        if self._bar is not None:
            self._console.print(f"[green]done[/] {words} [dim]({took:.1f} s)[/]")
        elif took > 1.0:
            self._console.print(f"  done in {took:.1f} s")

    def warmup(self, step: int, most_steps: int, pass_rate: float | None) -> None:
        """Progress of the tiny model's supervised phase."""
        figures = "" if pass_rate is None else f"development pass rate {pass_rate:.2f}"
        self._show("warm-up", step, most_steps, figures, force=False)

    def step(self, step: int, figures: dict[str, float]) -> None:
        """One optimizer step is done."""
        words = "  ".join(_figure(name, value) for name, value in figures.items())
        self._show("training", step, self._total, words, force=step == self._total)

    def _show(self, what: str, done: int, total: int, figures: str, *, force: bool) -> None:
        if self._bar is not None:
            if self._task is None or self._bar.tasks[-1].description != what:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(what, total=total, figures="")
            self._bar.update(self._task, completed=done, total=total, figures=figures)
            return
        now_s = self._clock()
        if force or now_s - self._last_plain_s >= PLAIN_EVERY_S:
            self._last_plain_s = now_s
            self._console.print(f"{what} {done}/{total}  {figures}", highlight=False, soft_wrap=True)


_FORMATS = {
    "reward": "reward {:.2f}",
    "version": "v{:.0f}",
    "staleness": "staleness {:.1f}",
    "tokens_per_s": "{:,.0f} trained tokens/s",
    "sync_ms": "sync {:.0f} ms",
}


def _figure(name: str, value: float) -> str:
    return _FORMATS.get(name, name + " {:.3g}").format(value)
