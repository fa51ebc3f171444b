"""Entry of the processes of a real run in which something is planted.

``python -m grpo_lab.testing.mutants.planting trainer PLANTS RECIPE`` is ``grpo-lab run`` with other classes
in some places: in the trainer, in the engines that it starts, or in its rollout worker. The product has no
switch for it: each process sets the names in its own modules before it begins. Nothing is merged, checked or
reported here; the trace is left as the processes wrote it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import json
import socket
import sys
from collections.abc import Iterable
from typing import Any, Literal

Process = Literal["trainer", "engine", "worker"]
Plants = list[tuple[str, str, str]]
"""(process, where, what): the last two are ``module:name``, of what is replaced and of its replacement."""
ENTRY = "grpo_lab.testing.mutants.planting"


def plant(plants: Iterable[tuple[str, str, str]], process: Process) -> None:
    for of, where, what in plants:
        if of == process:
            module, name = _found(where)
            source, part = _found(what)
            setattr(module, name, getattr(source, part))


def _found(place: str) -> tuple[Any, str]:
    module, _, name = place.partition(":")
    return importlib.import_module(module), name


def distinct_characters(completions: list[str], **_: Any) -> list[float]:
    """A reward in which the samples of an untrained model differ, so that it has a gradient."""
    return [float(len(set(text))) for text in completions]


def planted_worker(plants: Plants, end: socket.socket, packed_spec: bytes) -> None:
    """``worker_main`` of a worker's process."""
    plant(plants, "worker")
    from grpo_lab.trainer.worker_main import worker_main  # noqa: PLC0415

    worker_main(end, packed_spec)


def run_trainer(plants: Plants, recipe: dict[str, Any]) -> int:
    """The run itself; its engines and its worker are started with the same plants."""
    from rich.console import Console  # noqa: PLC0415

    from grpo_lab.harness import fleet, runner  # noqa: PLC0415
    from grpo_lab.harness.engine_process import simulated_engine  # noqa: PLC0415
    from grpo_lab.harness.recipe import load_recipe, recipe_with  # noqa: PLC0415
    from grpo_lab.trainer import worker_process  # noqa: PLC0415
    from grpo_lab.trainer.worker_main import die_with_parent  # noqa: PLC0415

    die_with_parent()  # and then its engines and its worker end as well
    plant(plants, "trainer")

    def planted_engine(*args: Any, **named: Any) -> Any:
        command = simulated_engine(*args, **named)
        python, _, _, *options = command.arguments
        return dataclasses.replace(
            command, arguments=(python, "-m", ENTRY, "engine", json.dumps(plants), *options)
        )

    def left_as_it_is(directory: Any, outcome: Any, wall_s: float, console: Any) -> int:
        print(f"ended: {outcome.ended} {outcome.detail}"[:500])  # noqa: T201
        return int(outcome.exit_code)

    places: tuple[tuple[Any, str, Any], ...] = (
        (fleet, "simulated_engine", planted_engine),
        (runner, "finish_run", left_as_it_is),
        (worker_process, "worker_main", functools.partial(planted_worker, plants)),
    )
    for module, name, value in places:
        setattr(module, name, value)
    return runner.run(recipe_with(recipe, load_recipe("smoke")), Console(file=io.StringIO()))


def run_engine(plants: Plants, arguments: list[str]) -> int:
    """``grpo-lab serve``, found by its name: it lies above this package."""
    plant(plants, "engine")
    return int(importlib.import_module("grpo_lab.cli.main").main(["serve", *arguments]))


def main(arguments: list[str]) -> int:
    role, plants = arguments[0], [tuple(row) for row in json.loads(arguments[1])]
    if role == "engine":
        return run_engine(plants, arguments[2:])
    return run_trainer(plants, json.loads(arguments[2]))


if __name__ == "__main__":
    # By its name, so that the worker's process finds what it is to run.
    sys.exit(importlib.import_module(ENTRY).main(sys.argv[1:]))
