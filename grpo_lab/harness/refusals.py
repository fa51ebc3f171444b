"""What is wrong with a recipe at a glance: judged before anything that is slow to import."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from grpo_lab.errors import ConfigError, ModelError, TraceError
from grpo_lab.files import why_no_file
from grpo_lab.harness.recipe import Recipe
from grpo_lab.harness.rewards import import_reward
from grpo_lab.tasks import get_task, task_names

CONNECT_S = 5.0
DEFAULT_COMPLETION_TOKENS = 256
OWN_RATIO = ("gspo", "cispo")  # losses that take no correction


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
    _refuse_combinations(recipe)
    if recipe.token_budget <= (longest := longest_completion(recipe)):
        raise ConfigError("token_budget", recipe.token_budget, f"more than a completion's {longest} tokens")
    if recipe.reward:
        import_reward(recipe.reward)
    require_place(recipe.out)


def _refuse_combinations(recipe: Recipe) -> None:
    """Those that the trainer's configuration refuses too, in its own words and after torch was imported."""
    if recipe.loss_type in OWN_RATIO and recipe.correction != "none":
        fix = f"{recipe.loss_type} has an importance ratio of its own: add --correction none"
        raise ConfigError("correction", recipe.correction, f"none with loss_type={recipe.loss_type}", fix)
    if recipe.max_inflight < recipe.num_generations:
        fix = "The completions of a group are requested together"
        raise ConfigError(
            "max_inflight", recipe.max_inflight, f"at least num_generations = {recipe.num_generations}", fix
        )
    if recipe.window > 1 and recipe.staleness_policy != "window":
        expected = f"1 with staleness_policy={recipe.staleness_policy!r}"
        raise ConfigError("window", recipe.window, expected, "Add --staleness-policy window")


def longest_completion(recipe: Recipe) -> int:
    """Most tokens of a completion: the recipe's, or what its task's longest answer needs."""
    if recipe.max_completion_length:
        return recipe.max_completion_length
    known = recipe.task in task_names()
    return get_task(recipe.task).max_completion_tokens if known else DEFAULT_COMPLETION_TOKENS


def require_listener(field: str, url: str) -> None:
    """Raises ``ConfigError`` when nothing listens there: clients look again for a while, or say it late."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), CONNECT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            field,
            url,
            f"the address of a server that runs ({reason})",
            "Start it first (grpo-lab serve MODEL --rl-routes, or a vLLM) and wait until it is ready",
        ) from error


def require_place(out: Path) -> None:
    """Raises ``ConfigError`` for a folder that cannot be made or written to; makes nothing."""
    place = out.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigError("out", str(out), f"a directory, and {place} is none")
    if reason := why_no_file(place):
        expected = f"a directory that can be written to, and {place} cannot ({reason})"
        raise ConfigError("out", str(out), expected, "Name another place")


def require_output(field: str, path: Path) -> None:
    """Raises ``ConfigError`` for a file that could not be written (its folders are made); makes nothing."""
    if path.is_dir():
        raise ConfigError(field, str(path), "a file, not a directory")
    if path.exists() and not path.is_file():
        raise ConfigError(field, str(path), "a file, not a device or a pipe, which no file may replace")
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
