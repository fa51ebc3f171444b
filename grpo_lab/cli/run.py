"""``grpo-lab run [RECIPE or FILE.toml] [--field value ...]``."""

from __future__ import annotations

from collections.abc import Sequence

import tyro
from rich.console import Console

from grpo_lab.harness.recipe import RECIPES, Recipe, load_recipe
from grpo_lab.harness.refusals import refuse_at_a_glance


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
    refuse_at_a_glance(recipe)
    # Imported after the arguments were read and judged: it takes seconds, and --help should not.
    from grpo_lab.harness.runner import run  # noqa: PLC0415

    return run(recipe, Console(highlight=False))
