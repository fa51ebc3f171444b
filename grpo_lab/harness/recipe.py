"""A recipe: everything that decides what a run does, as one flat, frozen record."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from grpo_lab.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """Settings of ``grpo-lab run``. A value that cannot work is refused before anything is started."""

    name: str = "quickstart"
    """Name of the run directory."""

    # what is learned
    task: str = "sort_digits"
    """A task's name, a JSON Lines file, a local datasets folder, or a hub name (with a network)."""
    model: str = ""
    """Model directory or hub name; empty: a tiny model is made, warmed up and cached."""
    architecture: Literal["llama", "qwen2"] = "llama"
    """Architecture of the tiny model."""
    reward: str = ""
    """module:function of a reward for a task that is a file; empty: the task's own, or exact match."""
    train_prompts: int = 4096
    """Prompts generated for a built-in task."""
    heldout_prompts: int = 512
    """Held-out prompts of the evaluation before and after; 0: no evaluation."""
    shuffle_rewards: bool = False
    """Negative control: rewards are dealt to the wrong completions of each group."""

    # optimisation
    steps: int = 80
    """Optimizer steps."""
    prompts_per_step: int = 32
    """Groups that one optimizer step consumes."""
    num_generations: int = 8
    """Completions of each prompt."""
    learning_rate: float = 5e-5
    """Constant after the ramp."""
    ramp_steps: int = 5
    """Steps of the linear ramp of the learning rate."""
    loss_type: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "dapo"
    """How tokens are averaged; gspo and cispo take no correction."""
    correction: Literal["none", "tis", "mis", "icepop", "decoupled", "clip"] = "tis"
    """Off-policy correction."""
    temperature: float = 1.0
    """Of the sampling."""
    max_completion_length: int = 0
    """Most tokens of a completion; 0: what the task's longest answer needs."""
    token_budget: int = 16_384
    """Most tokens of one forward-backward pass."""

    # asynchrony
    max_staleness: int = 1
    """Bound at consumption in weight versions; 0 is synchronous training."""
    max_staleness_steps: int | None = None
    """Bound at consumption in optimizer steps."""
    staleness_policy: Literal["admission", "window", "drop", "freshest"] = "admission"
    """Hold prompts back (admission, window), or generate freely and discard (drop, freshest)."""
    window: int = 1
    """A finished group may overtake an unfinished one; none is overtaken more than window - 1 times."""
    weight_sync_steps: int = 1
    """Optimizer steps between two weight syncs."""
    max_inflight: int = 256
    """Completion requests under way at once."""
    queue_capacity: int = 64
    """Groups that the queue to the trainer holds."""

    # weight sync
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    """What a pause does to running requests."""
    sync_scope: Literal["global", "rolling"] = "global"
    """All engines pause and switch together, or one after another while the others generate."""
    clear_cache: bool = True
    """Recompute the KV cache of running requests under the new weights."""
    transport: Literal["shm", "gloo", "stock"] = "shm"
    """Shared memory, gloo over loopback, or a stock vLLM's own wire, for engines at an address."""
    bucket_bytes: int = 1 << 20
    """Size of a packed bucket."""
    sync_attempts: int = 3
    """Attempts of one sync before the engines that fail it are fenced."""
    min_engines: int = 1
    """With fewer serving engines the run ends."""
    final_sync: bool = False
    """Sync once more after the last step."""

    # where it runs
    world: Literal["real", "sim"] = "real"
    """real processes and time, or the deterministic simulation."""
    engine: str = "sim"
    """sim: the simulated vLLM is started here; vllm: a real one; or addresses of running servers."""
    engines: int = 1
    """Engines to start."""
    trainer_ranks: int = 1
    """Data-parallel trainer processes."""
    engine_threads: int = 1
    """CPU threads of each engine."""
    trainer_threads: int = 1
    """CPU threads of each trainer rank."""
    batch_invariant: bool = False
    """Sample each sequence as if it were alone: exactly repeatable, and slow."""
    request_timeout: float = 60.0
    """Seconds for one request to an engine."""
    heartbeat_stale_after_s: float = 60.0
    """Seconds without progress after which the rollout worker counts as stalled."""
    save_steps: int = 0
    """Save a checkpoint that a run can resume from every so many steps; 0: only the final model."""
    resume_from: str = ""
    """Checkpoint directory to go on from."""
    strict: bool = False
    """Stop the run when a rule is violated; otherwise it is shown at once, and the exit code is 1."""
    log_completions: bool = False
    """Print a table of completions now and then."""
    seed: int = 0
    """Of everything."""
    out: Path = Path("runs")
    """Where run directories are made."""

    def __post_init__(self) -> None:
        for name, hint in _HINTS.items():
            value = getattr(self, name)
            if not _fits(value, hint) or not _in_range(name, value):
                raise ConfigError(name, value, _expected(name, hint))
        if not self.name or any(character in self.name for character in "/\\\0") or self.name[0] == ".":
            raise ConfigError("name", self.name, "a plain directory name")
        if self.engine not in ("sim", "vllm") and not all(map(_is_address, self.engine.split(","))):
            raise ConfigError("engine", self.engine, "sim, vllm or http:// addresses, comma separated")
        if (self.prompts_per_step * self.num_generations) % self.trainer_ranks:
            raise ConfigError(
                "trainer_ranks",
                self.trainer_ranks,
                f"a divisor of prompts_per_step * num_generations = "
                f"{self.prompts_per_step * self.num_generations}",
            )
        if self.transport == "stock" and not self.engine.startswith("http"):
            raise ConfigError("transport", "stock", "shm or gloo for engines that are started here")
        if self.min_engines > self.engines and not self.engine.startswith("http"):
            raise ConfigError("min_engines", self.min_engines, f"at most engines = {self.engines}")

    @property
    def attaches(self) -> bool:
        """Whether ``engine`` is the address of servers that run already."""
        return self.engine.startswith(("http://", "https://"))

    @property
    def engine_urls(self) -> list[str]:
        """Addresses of the servers that the recipe attaches to."""
        return [url.strip() for url in self.engine.split(",")] if self.attaches else []

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "out": str(self.out)}


_RANGES: Mapping[str, tuple[float, float]] = {
    "train_prompts": (1, 10**8),
    "heldout_prompts": (0, 10**6),
    "steps": (1, 10**9),
    "prompts_per_step": (1, 10**6),
    "num_generations": (2, 10**4),
    "learning_rate": (0.0, 10.0),
    "ramp_steps": (0, 10**9),
    "temperature": (1e-3, 100.0),
    "max_completion_length": (0, 10**6),
    "token_budget": (2, 10**9),
    "max_staleness": (0, 10**6),
    "max_staleness_steps": (0, 10**6),
    "window": (1, 10**6),
    "weight_sync_steps": (1, 10**6),
    "max_inflight": (2, 10**6),
    "queue_capacity": (1, 10**6),
    "bucket_bytes": (4096, 2**40),
    "sync_attempts": (1, 100),
    "min_engines": (1, 10**4),
    "engines": (1, 64),
    "trainer_ranks": (1, 64),
    "engine_threads": (1, 1024),
    "trainer_threads": (1, 1024),
    "request_timeout": (0.1, 86_400.0),
    "heartbeat_stale_after_s": (0.1, 86_400.0),
    "save_steps": (0, 10**9),
    "seed": (0, 2**32 - 1),
}
_HINTS: Mapping[str, Any] = get_type_hints(Recipe)
_WORDS: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    int | None: "nothing, or an integer",
}


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text.strip())
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        return False


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type; a bool is no number."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _in_range(name: str, value: Any) -> bool:
    """NaN is in no range."""
    if value is None or name not in _RANGES:
        return True
    low, high = _RANGES[name]
    return bool(low <= value <= high)


def _expected(name: str, hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    low, high = _RANGES.get(name, (None, None))
    return _WORDS[hint] if low is None else f"{_WORDS[hint]} from {low} to {high}"


RECIPES: Mapping[str, tuple[str, Recipe]] = {
    "quickstart": ("sort digits by asynchronous GRPO, two minutes on two cores", Recipe()),
    "synchronous": (
        "the same without asynchrony (max_staleness 0): what the overlap is measured against",
        Recipe(name="synchronous", max_staleness=0),
    ),
    "running-sum": (
        "the second task: running sum modulo 10",
        Recipe(name="running-sum", task="running_sum", learning_rate=1e-4),
    ),
    "smoke": (
        "a few steps of everything, in seconds",
        Recipe(name="smoke", steps=3, prompts_per_step=4, num_generations=4, heldout_prompts=32),
    ),
}


def load_recipe(name_or_file: str) -> Recipe:
    """A recipe by name, or from a TOML file whose keys are ``Recipe``'s fields.

    A file starts from another recipe with ``base = "quickstart"``, or from a file beside it with
    ``base = "common.toml"``.

    Raises:
        ConfigError: an unknown recipe or field, with the one that is close; a file that cannot be read, is
            not TOML, or is its own base; a value that cannot work.
    """
    return _load(name_or_file, ())


def _load(name_or_file: str, above: tuple[Path, ...]) -> Recipe:
    """``above`` are the files that led here, each by its ``base``."""
    if name_or_file in RECIPES:
        return RECIPES[name_or_file][1]
    path = above[-1].parent / name_or_file if above else Path(name_or_file)
    if path.suffix != ".toml":
        raise ConfigError(
            "base" if above else "recipe",
            name_or_file,
            f"one of {', '.join(RECIPES)}, or a .toml file{_close(name_or_file, RECIPES)}",
        )
    values = _read_toml(path)
    if path.resolve() in [one.resolve() for one in above]:
        raise ConfigError("base", name_or_file, f"another recipe: {path} would be its own base")
    base = values.pop("base", "quickstart")
    if not isinstance(base, str):
        raise ConfigError("base", base, "the name of a recipe or of a .toml file, in quotes")
    return recipe_with({"name": path.stem, **values}, _load(base, (*above, path)))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("recipe", str(path), f"a readable file ({error.strerror})") from error
    except ValueError as error:  # also a name with a NUL, text that is not UTF-8, and TOML's own
        raise ConfigError("recipe", str(path), f"valid TOML ({error})") from error


def recipe_with(values: Mapping[str, Any], base: Recipe) -> Recipe:
    """``base`` with other values; each must be a field and of its type."""
    for name, value in values.items():
        if name not in _HINTS:
            expected = f"a field of Recipe{_close(name, _HINTS)}"
            raise ConfigError(name, value, expected, "See grpo-lab run --help")
    paths = {name: Path(value) for name, value in values.items() if name == "out" and isinstance(value, str)}
    return dataclasses.replace(base, **{**values, **paths})


def _close(name: str, names: Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(name, names, n=1)
    return f". Did you mean {matches[0]!r}?" if matches else ""
