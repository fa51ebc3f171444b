"""What is wrong with a recipe at a glance: judged before anything that is slow to import."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from grpo_lab.errors import ConfigError, ModelError, TraceError
from grpo_lab.harness.recipe import Recipe


def refuse_at_a_glance(recipe: Recipe) -> None:
    """Raises ``ConfigError`` or ``ModelError``. What needs the data, the model or vLLM is judged later."""
    if recipe.world == "sim" and recipe.engine != "sim":
        raise ConfigError("engine", recipe.engine, "sim in a simulated world")
    if recipe.world == "sim" and recipe.trainer_ranks != 1:
        raise ConfigError("trainer_ranks", recipe.trainer_ranks, "1 in a simulated world")
    if recipe.engine == "vllm" and recipe.batch_invariant:
        raise ConfigError("batch_invariant", True, "false with a real vLLM", "Leave it out")
    if recipe.model and not Path(recipe.model, "config.json").is_file():
        raise ModelError(
            f"{recipe.model}: there is no config.json. Give a model directory in Hugging Face format, or "
            "leave --model out to train a tiny one"
        )
    if recipe.resume_from and not Path(recipe.resume_from).is_dir():
        raise ConfigError("resume_from", recipe.resume_from, "a checkpoint directory of an earlier run")
    if recipe.reward:
        _require_reward(recipe.reward)
    require_place(recipe.out)


def require_place(out: Path) -> None:
    """Raises ``ConfigError`` for a folder that cannot be made or written to; makes nothing."""
    place = out.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigError("out", str(out), f"a directory, and {place} is none")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError("out", str(out), f"a directory that can be written to, and {place} cannot")


def require_file(field: str, path: Path) -> None:
    """Raises ``ConfigError`` for a file that could not be written (its folders are made); makes nothing."""
    if path.is_dir():
        raise ConfigError(field, str(path), "a file, not a directory")
    try:
        require_place(path.absolute().parent)
    except ConfigError as error:
        raise ConfigError(field, str(path), f"a file that can be written ({error})") from None
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(field, str(path), "a file that can be written", "Change its permissions")


def require_trace(run: Path) -> None:
    """Raises ``TraceError`` for a path that is no run directory and no trace."""
    trace = run if run.is_file() else run / "events.jsonl"
    if not trace.is_file():
        raise TraceError(f"{trace}: there is no such file. Name the directory of a run, like runs/latest")


def _require_reward(path: str) -> None:
    """The module is looked for, not imported."""
    module, _, function = path.partition(":")
    package = module.partition(".")[0]
    if not package or not function:
        raise ConfigError("reward", path, "module:function")
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ConfigError(
            "reward", path, f"module:function that can be imported (No module named {package!r})"
        )
