"""Which reward functions a recipe trains on. Everything here pickles: rewards run in the worker's process."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_lab.errors import ConfigError, DataError
from grpo_lab.harness.recipe import Recipe
from grpo_lab.tasks import exact_match, get_task, task_names

Reward = Callable[..., list[float | None]]


@dataclass(frozen=True)
class ShuffledReward:
    """Negative control: deals each group's rewards to its completions in a random order.

    The distribution of rewards stays, what they say about a completion is gone. The order depends on the
    prompt and the completions only, so runs repeat.
    """

    reward: Reward
    seed: int

    @property
    def __name__(self) -> str:
        return f"shuffled {getattr(self.reward, '__name__', 'reward')}"

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        rewards = list(self.reward(prompts=prompts, completions=completions, **columns))
        random.Random(f"{self.seed}/{prompts[0]}/{completions}").shuffle(rewards)
        return rewards


def reward_functions(recipe: Recipe, columns: list[str]) -> tuple[Reward, ...]:
    """The recipe's own ``reward``, the task's, or exact match against the column ``answer``.

    Raises:
        ConfigError: ``reward`` names nothing that can be called.
        DataError: there is neither a reward nor a column ``answer``.
    """
    if recipe.reward:
        functions: tuple[Reward, ...] = (import_reward(recipe.reward),)
    elif recipe.task in task_names():
        functions = get_task(recipe.task).reward_funcs
    elif "answer" in columns:
        functions = (exact_match,)
    else:
        raise DataError(
            f"{recipe.task} has the columns {columns} but no 'answer', so exact match cannot reward it. "
            "Add the column, or name a function: --reward module:function"
        )
    if recipe.shuffle_rewards:
        functions = tuple(ShuffledReward(function, recipe.seed) for function in functions)
    return functions


def import_reward(path: str) -> Reward:
    """Raises ``ConfigError`` for what is not ``module:function`` of a module that can be imported."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError("reward", path, "module:function")
    try:
        module = importlib.import_module(module_name)
        function = functools.reduce(getattr, name.split("."), module)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("reward", path, f"module:function that can be imported ({error})") from error
    if not callable(function):
        raise ConfigError("reward", path, "a callable")
    return function
