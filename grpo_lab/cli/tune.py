"""``grpo-lab tune``: searches a recipe's fields in simulation, recommends one, and tries it for real."""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from grpo_lab.cli.console import PipeConsole
from grpo_lab.errors import ConfigError
from grpo_lab.files import write_whole
from grpo_lab.harness.refusals import require_output, require_place

if TYPE_CHECKING:
    from grpo_lab.harness.calibration import Calibration
    from grpo_lab.harness.tuning import Tuned

MISSED = 1
FILE_WIDTH = 120  # where there is no terminal: wide enough for a recipe's settings


@dataclass(frozen=True)
class TuneConfig:
    """Search a recipe's fields in simulation: a front of objective and staleness, one recommended recipe."""

    recipe: Annotated[str, tyro.conf.Positional]
    """A recipe's name or TOML file."""
    objective: str = "tokens_per_s"
    """QUANTITY, or min:QUANTITY or max:QUANTITY."""
    constraint: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """For example "staleness_p99<=2"; given more than once, all must hold."""
    latency: Path = Path("runs/calibration.toml")
    """What grpo-lab calibrate has written."""
    over: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A field to search, for example max_inflight=128,256; may be given more than once. Default: staleness
    bound, sync interval, requests in flight, pause mode and cache policy."""
    candidates: int = 60
    """Recipes that are tried."""
    seeds: int = 1
    """Simulated runs of each."""
    seed: int = 0
    """Which candidates are drawn."""
    workers: int = 1
    """Processes that simulate."""
    out: Path | None = None
    """File (TOML) for the recommended recipe."""
    verify: bool = False
    """Run the recipe as it is and the recommended one for real, in turns."""
    repeats: int = 3
    """Real runs of each with --verify."""
    verify_steps: int = 30
    """Optimizer steps of a real run."""
    runs: Path = Path("runs/tune")
    """Where the real runs go."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("candidates", 1, 10_000),
            ("seeds", 1, 100),
            ("workers", 1, 1024),
            ("repeats", 1, 100),
            ("verify_steps", 4, 10**6),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(name, getattr(self, name), f"from {low} to {high}")


def tune(config: tyro.conf.OmitArgPrefixes[TuneConfig]) -> int:
    """Search a recipe's fields in simulation (see TuneConfig)."""
    if config.out is not None:
        require_output("out", config.out)
    if config.verify:
        require_place(config.runs)
    from grpo_lab.harness.calibration import Calibration  # noqa: PLC0415 - --help needs none of these
    from grpo_lab.harness.recipe import load_recipe  # noqa: PLC0415
    from grpo_lab.harness.tuning_constraints import Constraint, Objective  # noqa: PLC0415

    objective = Objective.parse(config.objective)
    constraints = [Constraint.parse(text) for text in config.constraint]
    recipe = load_recipe(config.recipe)
    calibration = Calibration.load(config.latency)
    from grpo_lab.harness import tuning, tuning_report, validation_report  # noqa: PLC0415 - slow: torch

    space = tuning.parse_space(config.over, recipe) or tuning.default_space(recipe)
    console = PipeConsole(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    candidates = tuning.candidates_of(recipe, space, config.candidates, config.seed)
    console.print(f"{len(candidates)} candidates of {escape(', '.join(space))}", soft_wrap=True)
    with console.status("simulating"), _pool(config.workers) as pool:
        simulator = tuning.Simulator(recipe, calibration, config.seeds, pool)
        tuned = tuning.tune(recipe, candidates, simulator, objective, constraints)
    error = validation_report.error_words(calibration)
    console.print(tuning_report.front_table(tuned))
    console.print(f"{tuned.simulated} simulated runs; {escape(error)}", soft_wrap=True)
    if tuned.recommended is None:
        console.print("[bold red]no candidate keeps the constraints[/]: loosen them, or search more fields")
        return MISSED
    text = tuning_report.recipe_toml(tuned, error)
    console.print(escape(text), soft_wrap=True)
    if config.out is not None:
        _write(config.out, text)
    return _verify(config, tuned, calibration, console) if config.verify else 0


def _verify(config: TuneConfig, tuned: Tuned, calibration: Calibration, console: Console) -> int:
    """1 when the recommended recipe breaks a constraint for real, or is no better."""
    from grpo_lab.harness import tuning, tuning_report, validation_runs  # noqa: PLC0415
    from grpo_lab.report.summary import mean  # noqa: PLC0415

    assert tuned.recommended is not None
    simulator = tuning.Simulator(tuned.recipe, calibration, config.seeds)
    predicted = simulator([tuned.default.settings, tuned.recommended.settings], config.verify_steps)
    recipes = {
        name: replace(recipe, steps=config.verify_steps, heldout_prompts=0)
        for name, recipe in (("default", tuned.recipe), ("recommended", tuned.recipe_of(tuned.recommended)))
    }

    def told(line: str) -> None:
        console.print(escape(line))

    measured = validation_runs.measure(recipes, config.repeats, config.runs, told)
    default, recommended = measured["default"], measured["recommended"]
    known = [figures for figures in predicted if figures is not None]
    if len(known) == len(predicted):
        for line in tuning_report.verdict(tuned, known, default, recommended):
            console.print(escape(line), soft_wrap=True)
    broken = [
        str(constraint)
        for constraint in tuned.constraints
        if not all(constraint.holds(figures) for figures in recommended)
    ]
    if broken:
        console.print(f"[bold red]broken in a real run:[/] {escape(', '.join(broken))}")
    score = tuned.objective.score
    better = (mean(map(score, recommended)) or 0.0) > (mean(map(score, default)) or 0.0)
    return 0 if better and not broken else MISSED


def _pool(workers: int) -> contextlib.AbstractContextManager[Executor | None]:
    if workers == 1:
        return contextlib.nullcontext()
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
