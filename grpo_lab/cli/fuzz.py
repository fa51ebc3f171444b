"""``grpo-lab fuzz``: searches simulated clusters for a run that breaks a rule."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

from grpo_lab.cli.console import PipeConsole
from grpo_lab.errors import ConfigError
from grpo_lab.harness.refusals import require_place
from grpo_lab.testing.coordinators import MUTANT, load_coordinator

if TYPE_CHECKING:
    from grpo_lab.testing.search import Search

VIOLATED = 1
PLAIN_EVERY_S = 10.0
SHOWN_CHARACTERS = 400
# Known by name here, so that another is refused before torch is imported.
SCENARIO_NAMES = ("any", "quiet", "faults", "churn", "schedules")
CASE_NAMES = ("quick", "single", "pairs")
MAX_MINUTES, MAX_DEPTH, MAX_EXAMPLES = 10_000, 64, 10**9


def fuzz(
    minutes: float | None = None,
    scenario: str = "any",
    out: Path = Path("failures"),
    seed: int = 0,
    max_examples: int = MAX_EXAMPLES,
    coordinator: str = "",
    exhaustive: bool = False,
    depth: int | None = None,
    cases: str | None = None,
) -> int:
    """Runs whole clusters in virtual time under drawn delays, faults and schedules, all rules checked.

    With --exhaustive: all schedules of small scopes instead (one or two engines, two versions, one fault, one
    interruption), and the table of the coordinator's transitions that were reached.

    Exit code 1 when a rule was broken; what broke it is made small and written to a file, which
    ``grpo-lab replay`` runs again, step for step.

    Args:
        minutes: how long to search; without it, 1, and with --exhaustive until all was tried.
        scenario: any, quiet (no faults), faults (one small cluster), churn (engines that die and return) or
            schedules (the order of events only).
        out: directory of the failure files; it is made when there is something to write.
        seed: of the search. The same seed finds the same things, as far as the time goes.
        max_examples: ends the search earlier.
        coordinator: module:Class of a coordinator of your own, to search that instead; or mutant:ID, a fault
            of those that ``grpo-lab mutants`` plants.
        exhaustive: try everything in small scopes rather than some of everything.
        depth: with --exhaustive, decisions of the schedule that are varied in each scope; without it, 1.
        cases: with --exhaustive: quick (the default: every transition), single (a fault or an interruption)
            or pairs.
    """
    _require_known("scenario", scenario, SCENARIO_NAMES)
    if cases is not None:
        _require_known("cases", cases, CASE_NAMES)
    for name, value in (("depth", depth), ("cases", cases)):
        if value is not None and not exhaustive:
            raise ConfigError(name, value, "nothing without --exhaustive", "Leave it out or add --exhaustive")
    for name, value, default in (
        ("scenario", scenario, "any"),
        ("seed", seed, 0),
        ("max_examples", max_examples, MAX_EXAMPLES),
    ):
        if exhaustive and value != default:
            raise ConfigError(name, value, "nothing with --exhaustive, which draws no case", "Leave it out")
    if minutes is not None and not 0 < minutes <= MAX_MINUTES:
        raise ConfigError("minutes", minutes, f"above 0, at most {MAX_MINUTES:,}")
    if max_examples < 1:
        raise ConfigError("max_examples", max_examples, "an integer of at least 1")
    if depth is not None and not 0 <= depth <= MAX_DEPTH:
        raise ConfigError("depth", depth, f"0 to {MAX_DEPTH}: the number of schedules grows as 3**depth")
    require_place(out)
    if coordinator:
        sys.path.insert(0, str(Path.cwd()))  # as python -m would
    if not coordinator.startswith(MUTANT):
        load_coordinator(coordinator)
    # Imported after the arguments were judged: it takes seconds, and --help should not.
    from grpo_lab.testing.search import SCENARIOS, load_parts, save_all, search  # noqa: PLC0415

    console = PipeConsole(highlight=False)
    if exhaustive:
        protocol = load_coordinator(coordinator)
        from grpo_lab.cli.fuzz_exhaustive import fuzz_exhaustive  # noqa: PLC0415

        depth = 1 if depth is None else depth
        return fuzz_exhaustive(
            console, cases or "quick", depth, minutes or MAX_MINUTES, out, protocol, coordinator
        )
    parts = load_parts(coordinator)
    minutes = minutes or 1.0
    with _Progress(console, minutes) as progress:
        state = search(
            SCENARIOS[scenario][1],
            minutes=minutes,
            max_examples=max_examples,
            parts=parts,
            name=coordinator,
            first_seed=seed,
            on_example=progress.show,
        )
    console.print(str(state), soft_wrap=True)
    paths = save_all(state.found, out)
    for path, (_, failure) in zip(paths, sorted(state.found.items()), strict=True):
        console.print(f"[bold red]{failure.rule}[/] {path}", soft_wrap=True)
        console.print(f"  {failure.message[:SHOWN_CHARACTERS]}", markup=False, soft_wrap=True)
        console.print(f"  {state.schedules[failure.rule]}", soft_wrap=True)
    return VIOLATED if state.found else 0


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(name, value, f"one of {', '.join(known)}")


class _Progress:
    """A live line on a terminal, a plain one now and then elsewhere."""

    def __init__(self, console: Console, minutes: float) -> None:
        self._console = console
        self._minutes = minutes
        self._next_s = time.monotonic() + PLAIN_EVERY_S
        self._status: Status | None = console.status("searching") if console.is_terminal else None

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, state: Search) -> None:
        line = f"{state.wall_s / 60:.1f} of {self._minutes:g} min: {state}"
        if self._status is not None:
            self._status.update(line)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PLAIN_EVERY_S
            self._console.print(line, soft_wrap=True)
