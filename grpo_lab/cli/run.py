"""``grpo-lab run [RECIPE or FILE.toml] [--field value ...]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from grpo_lab.cli.console import PipeConsole
from grpo_lab.harness.recipe import RECIPES, Recipe, load_recipe
from grpo_lab.harness.refusals import refuse_at_a_glance
from grpo_lab.harness.rewards import reward_functions
from grpo_lab.tasks import task_names


def main(arguments: Sequence[str]) -> int:
    """The recipe gives the defaults; fields on the command line win."""
    words = list(arguments)
    name = words.pop(0) if words and not words[0].startswith("-") else "quickstart"
    base = load_recipe(name)
    recipes = "\n".join(f"  {key:<14}{description}" for key, (description, _) in RECIPES.items())
    recipe = tyro.cli(
        Recipe,
        default=base,
        args=words,
        prog=f"grpo-lab run {name}",
        description=f"Run a recipe. The defaults below are those of {name!r}.\n\nRecipes:\n{recipes}\n\n"
        'A .toml file in place of a name sets the same fields, starting from base = "quickstart".',
    )
    if recipe.reward:
        sys.path.append(str(Path.cwd()))  # where python -m would look too, and a console script does not
    refuse_at_a_glance(recipe)
    _refuse_what_it_names(recipe)
    # Imported after the arguments were read and judged: it takes seconds, and --help should not.
    from grpo_lab.harness.runner import run  # noqa: PLC0415

    return run(recipe, PipeConsole(highlight=False))


def _refuse_what_it_names(recipe: Recipe) -> None:
    """Data, servers and a vLLM that are not there or cannot be used: seen without torch, so before it."""
    if recipe.task not in task_names():
        from grpo_lab.tasks.sources import load_dataset_source  # noqa: PLC0415 - a second

        dataset = load_dataset_source(recipe.task, count=recipe.train_prompts, seed=recipe.seed)
        reward_functions(recipe, dataset.column_names)
    if recipe.attaches:
        from grpo_lab.harness.attached import attach  # noqa: PLC0415 - brings httpx

        attach(recipe.engine_urls)
    if recipe.engine == "vllm":
        from grpo_lab.harness.vllm_server import vllm_python  # noqa: PLC0415 - brings httpx

        vllm_python()
