"""Real runs for comparison: each a process of its own, several recipes in turns, so that a machine that gets
slower does so for all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from grpo_lab.errors import ConfigError, DataError, GrpoLabError
from grpo_lab.harness.calibration_runs import load_real_run
from grpo_lab.harness.outcome import VIOLATED
from grpo_lab.harness.recipe import RECIPES, Recipe
from grpo_lab.harness.validation import figures_of
from grpo_lab.harness.validation_figures import Figures

RUN_TIMEOUT_S = 3600.0
RunRecipe = Callable[[Recipe, Path], Path]
"""Runs a recipe into a folder and returns the run directory."""


def run_real(recipe: Recipe, out: Path) -> Path:
    """Runs it with ``grpo-lab run`` in another process. Raises ``GrpoLabError`` with its last words.

    A run that broke a rule of the checker has been measured all the same; ``broken_rules`` says so.
    """
    out.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "grpo_lab.cli.main", "run", "quickstart", *_options(recipe, out)]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            words, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S, env={**os.environ}
        )
    except subprocess.TimeoutExpired as error:
        raise GrpoLabError(f"{recipe.name} did not end within {RUN_TIMEOUT_S:g} s") from error
    path = (out / "latest").resolve()
    judged = done.returncode == VIOLATED and broken_rules(path)
    if done.returncode != 0 and not judged:
        said = (done.stdout + done.stderr)[-2000:]
        raise GrpoLabError(f"{recipe.name} ended with exit code {done.returncode}: {said}")
    return path


def broken_rules(run: Path) -> list[str]:
    """Rules that the run's check found violated; nothing where it left none."""
    try:
        return list(json.loads((run / "check.json").read_text(encoding="utf-8"))["violated"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run}: its check.json cannot be read ({error})") from error


def _options(recipe: Recipe, out: Path) -> Iterator[str]:
    """What differs from the recipe that the command starts from."""
    base = RECIPES["quickstart"][1]
    for item in dataclasses.fields(Recipe):
        value, before = getattr(recipe, item.name), getattr(base, item.name)
        flag = f"--{item.name.replace('_', '-')}"
        if item.name == "out":
            yield from (flag, str(out))
        elif value == before:
            continue
        elif isinstance(value, bool):
            yield flag if value else f"--no-{item.name.replace('_', '-')}"
        elif value is None or isinstance(value, Path):
            raise ConfigError(item.name, value, "a value that the command line can give")
        else:
            yield from (flag, str(value))


def interleaved(names: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """(repeat, name) of every run in order; every second repeat goes backwards.

    >>> interleaved(["a", "b"], 2)
    [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    return [(n, name) for n in range(repeats) for name in (names if n % 2 == 0 else list(reversed(names)))]


def measure(
    recipes: Mapping[str, Recipe],
    repeats: int,
    out: Path,
    told: Callable[[str], None],
    run: RunRecipe = run_real,
    *,
    resume: bool = False,
    deadline_s: float = float("inf"),
) -> dict[str, list[Figures]]:
    """Figures of every repeat, by name. Repeats differ in their seed, as the predictions do.

    With ``resume``, a run that has ended in ``out`` is not run again. After ``deadline_s`` of the monotonic
    clock none is begun, and there are fewer figures.
    """
    found: dict[str, list[Figures]] = {name: [] for name in recipes}
    for repeat, name in interleaved(list(recipes), repeats):
        recipe = dataclasses.replace(recipes[name], seed=recipes[name].seed + repeat)
        place = out / f"{name}-{repeat}"
        path = (place / "latest").resolve()
        known = resume and (path / "check.json").exists()
        if not known:
            if time.monotonic() > deadline_s:
                break
            path = run(recipe, place)
        figures = figures_of(load_real_run(path).records)
        found[name].append(figures)
        notes = ["measured before" if known else _load(), *(f"broke {rule}" for rule in broken_rules(path))]
        told(f"{name}, repeat {repeat + 1}: {figures.tokens_per_s:,.0f} tokens/s, {', '.join(notes)}")
    return found


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"
