"""``grpo-lab mutants``: is every planted fault caught?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from grpo_lab.cli.console import PipeConsole
from grpo_lab.cli.outputs import PLOT_KINDS, require_writable
from grpo_lab.errors import ConfigError
from grpo_lab.files import replacing
from grpo_lab.harness.refusals import require_place

if TYPE_CHECKING:
    from grpo_lab.testing.mutants.campaign import Clean, Kill, Result

SURVIVED = 1
MAX_WORKERS = 1024
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"


def mutants(
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    json: Path | None = None,
    html: Path | None = None,
    table: Path | None = None,
    plot: Path | None = None,
    seconds_per_mutant: float = 60.0,
    workers: int = 0,
    out: Path = Path("runs/mutants"),
    resume: bool = False,
    real: bool = False,
) -> int:
    """Plants faults that people met in real systems, one at a time, and searches until a rule sees each.

    Every mutant is searched in a fixture that exposes it; the correct protocol then goes through the same
    searches. Exit code 1 when a mutant survived, or when the correct protocol raised an alarm.

    Args:
        only: a mutant's id (M01-a) or case (M01); may be given several times.
        json: also write the result to this file.
        html: also write the kill table, with its figure, to this page.
        plot: also draw the kill table into this file (.svg, .png or .pdf).
        table: also write the kill table into this Markdown file, between its two marks.
        seconds_per_mutant: until a mutant counts as survived.
        workers: processes; 0 is one a core.
        out: directory of the cases that were found (``grpo-lab replay`` runs them) and of the progress.
        resume: keep what an interrupted call has found.
        real: also those of the real trainer on the virtual clock, and of runs with real processes, in shared
            memory and over gloo (ten seconds each).
    """
    if not 0 < seconds_per_mutant <= 86_400:
        raise ConfigError("seconds_per_mutant", seconds_per_mutant, "above 0, at most 86,400")
    if not 0 <= workers <= MAX_WORKERS:
        raise ConfigError("workers", workers, f"an integer from 0 to {MAX_WORKERS:,}")
    for option, path in (("json", json), ("html", html), ("table", table)):
        require_writable(option, path)
    require_writable("plot", plot, PLOT_KINDS)
    if table is not None:
        _around(table)
    require_place(out)
    # Imported after the arguments were judged: it takes seconds, and --help should not.
    from grpo_lab.testing.mutants.campaign import run_campaign  # noqa: PLC0415
    from grpo_lab.testing.mutants.catalogue import chosen  # noqa: PLC0415
    from grpo_lab.testing.mutants.page import summary  # noqa: PLC0415

    picked = chosen(only, real=real)
    console = PipeConsole(highlight=False)
    with _Shown(console, len(picked)) as shown:
        result = run_campaign(
            picked,
            seconds=seconds_per_mutant,
            workers=workers or len(os.sched_getaffinity(0)),
            out=out,
            resume=resume,
            on_result=shown.show,
        )
    console.print(summary(result), soft_wrap=True)
    _write(result, json, html, table)
    if plot is not None:
        _draw(result, plot)
    return SURVIVED if result.survivors or result.alarms else 0


class _Shown:
    """A bar on a terminal; a line for each result everywhere."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("mutants", total=total)

    def __enter__(self) -> _Shown:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def show(self, item: Kill | Clean) -> None:
        # Two kinds of results come through one callback; only a mutant's moves the bar.
        name = getattr(item, "id", None)
        if name is not None:
            self._progress.advance(self._task)
        self._console.print(_line(item), soft_wrap=True)


def _line(item: Kill | Clean) -> str:
    from grpo_lab.testing.mutants.campaign import Kill  # noqa: PLC0415

    if not isinstance(item, Kill):
        verdict = f"[red]{item.message}[/]" if item.alarms else "clean"
        return f"correct   {item.fixture}: {verdict} ({item.examples} runs, {item.seconds:.1f} s)"
    if not item.killed:
        return f"[red]survived[/]  {item.id} {item.title} ({item.examples} runs, {item.seconds:.1f} s)"
    return (
        f"killed    {item.id} by {item.rule} in {item.seconds:.1f} s, {item.examples} runs, "
        f"{item.events} events: {item.title}"
    )


def _write(result: Result, to_json: Path | None, to_html: Path | None, to_table: Path | None) -> None:
    from grpo_lab.testing.mutants import page  # noqa: PLC0415

    if to_json is not None:
        with replacing(to_json) as temporary:
            temporary.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    if to_html is not None:
        with replacing(to_html) as temporary:
            temporary.write_text(page.html(result), encoding="utf-8")
    if to_table is not None:
        before, after = _around(to_table)
        with replacing(to_table) as temporary:
            temporary.write_text(f"{before}{BEGIN}\n{page.markdown(result)}{END}{after}", encoding="utf-8")


def _around(table: Path) -> tuple[str, str]:
    """The text before and after the place of the table. Raises ``ConfigError`` where there is none."""
    try:
        text = table.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("table", str(table), f"a Markdown file that can be read ({error})") from error
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ConfigError("table", str(table), f"a file with the marks {BEGIN} and {END}", "Add both")
    return before, after


def _draw(result: Result, path: Path) -> None:
    from grpo_lab.testing.mutants import figure, page  # noqa: PLC0415

    with replacing(path) as temporary:
        figure.save(result, page.summary(result), temporary, path.suffix)
