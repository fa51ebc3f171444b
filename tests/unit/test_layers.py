"""Who may import whom: downwards only, no circles. Imports inside functions and for types count too."""

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_lab
from grpo_lab.cli.main import COMMANDS

ROOT = Path(grpo_lab.__file__).parent
REPOSITORY = ROOT.parent

# The allow-list. A unit is a package or a module right below grpo_lab; experiments lie beside it.
WORDS = {"types", "errors", "files"}
EVENTS = WORDS | {"events"}
SEAMS = EVENTS | {"ports", "recorders"}
PARTS = SEAMS | {"protocol", "packing", "algorithms", "tasks"}
REAL_WORLD = PARTS | {"trainer", "engine", "transport"}
TRACE_READERS = {"check", "report"}
TOOLS = REAL_WORLD | TRACE_READERS | {"sim"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "files": set(),
    "events": WORDS,
    "recorders": {"events"},
    "ports": EVENTS,
    "check": EVENTS,
    "report": EVENTS | {"check"},
    "protocol": SEAMS,
    "packing": SEAMS,
    "algorithms": SEAMS,
    "tasks": SEAMS,
    "engine": PARTS,
    "transport": PARTS,
    "trainer": PARTS | {"transport"},
    "vllm_plugin": PARTS | {"transport"},
    "sim": REAL_WORLD | {"check"},
    "harness": TOOLS,
    "testing": TOOLS | {"harness"},
    "integrations": TOOLS,
    "cli": TOOLS | {"harness", "testing", "integrations"},
    "experiments": TOOLS | {"harness", "testing", "integrations"},
    "__main__": {"cli"},
}
EXCEPTIONS: dict[tuple[str, str], str] = {}  # (importing module, imported unit): why

# What none but these may import.
RESERVED = {
    "grpo_lab.packing._packing": {"packing"},
    "grpo_lab.packing._packing_cuda": {"packing"},
    "vllm": {"vllm_plugin"},
}
HEAVY = ("torch", "transformers", "vllm", "accelerate", "datasets")
LIGHT_UNITS = ("protocol", "check", "events", "ports", "types", "errors", "files", "recorders")

# Modules that import by a name in a string, which the syntax tree does not show.
BY_NAME = {
    "grpo_lab.cli.main": "commands are modules of cli, loaded when they are asked for",
    "grpo_lab.cli.bench": "the same for what it measures",
    "grpo_lab.trainer": "its own modules, so that the rollout worker's process loads the light ones only",
    "grpo_lab.harness.rewards": "a user's reward function, module:function",
    "grpo_lab.harness.sweep_folder": "an experiment, by its file",
    "grpo_lab.testing": "its parts when they are asked for: pytest loads the plugin in every run",
    "grpo_lab.testing.coordinators": "a user's coordinator, module:Class",
    "grpo_lab.testing.mutants.planting": "what a plant names, and the command whose process it stands in for",
    "grpo_lab.testing.mutants.real_trainer": "what a plant names",
}


def imported(source, module, is_package=False):
    """Full names of all that a module imports, wherever in it: ``from a import b`` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                here = here[: len(here) - node.level + is_package]
                base = ".".join([*here, base] if base else here)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def unit_of(name):
    """The unit that a full name belongs to; None for what is not ours, and for ``grpo_lab`` itself."""
    head, _, rest = name.partition(".")
    if head == "experiments":
        return head
    first = rest.partition(".")[0]
    ours = head == "grpo_lab" and first and (first == "__main__" or not first.startswith("__"))
    return first if ours else None


def modules():
    """(full name, file) of every module."""
    for base in (ROOT, REPOSITORY / "experiments"):
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def all_imports():
    return {
        name: imported(path.read_text(encoding="utf-8"), name, path.name == "__init__.py")
        for name, path in modules()
    }


def violations(imports):
    """``module -> what``, for every import that the lists do not allow."""
    found = []
    for module, names in imports.items():
        unit = unit_of(module)
        allowed = MAY_IMPORT.get(unit, set()) | {unit}
        for other in sorted({unit_of(name) for name in names} - allowed - {None}):
            if (module, other) not in EXCEPTIONS:
                found.append(f"{module} -> {other}")
        for name, owners in RESERVED.items():
            if unit not in owners and any(f"{one}.".startswith(f"{name}.") for one in names):
                found.append(f"{module} -> {name}")
        if unit in LIGHT_UNITS:
            heavy = sorted({name.partition(".")[0] for name in names} & set(HEAVY))
            found += [f"{module} -> {name}" for name in heavy]
    return found


def test_imports_go_downwards_only():
    assert violations(all_imports()) == []


def test_every_unit_is_in_the_list():
    units = {unit_of(name) for name, _ in modules()} - {None}
    assert units <= MAY_IMPORT.keys(), "a new package: say in MAY_IMPORT what it may import"
    assert units >= MAY_IMPORT.keys() - {"experiments", "testing", "integrations"}


def test_the_package_itself_imports_nothing():
    """So that importing any of its modules loads that module's own layers only."""
    assert imported((ROOT / "__init__.py").read_text(encoding="utf-8"), "grpo_lab", is_package=True) == set()


def test_neither_the_list_nor_the_code_has_circles():
    real = {}
    for module, names in all_imports().items():
        unit = unit_of(module)
        if unit is not None:
            real.setdefault(unit, set()).update({unit_of(name) for name in names} - {unit, None})
    for graph in (MAY_IMPORT, real):
        assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names it


def test_exceptions_are_needed():
    imports = all_imports()
    for module, other in EXCEPTIONS:
        assert other in {unit_of(name) for name in imports[module]}, f"{module} -> {other} is gone"


def test_imports_by_name_are_known():
    users = {
        name
        for name, names in all_imports().items()
        if any(one in ("importlib", "importlib.import_module", "runpy") for one in names)
    }
    assert users == BY_NAME.keys()
    assert all(command.module.startswith("grpo_lab.cli.") for command in COMMANDS.values())


@pytest.mark.parametrize(
    ("module", "source", "seen"),
    [
        ("grpo_lab.engine.core", "from grpo_lab.trainer import AsyncGRPOTrainer", "trainer"),
        ("grpo_lab.engine.core", "from grpo_lab.transport.gloo import receive", "transport"),
        ("grpo_lab.transport.gloo", "import grpo_lab.engine.app as app", "engine"),
        ("grpo_lab.trainer.step", "from grpo_lab.engine.policy import load", "engine"),
        ("grpo_lab.trainer.step", "from grpo_lab import harness", "harness"),
        ("grpo_lab.protocol.canary", "def f():\n    from grpo_lab.sim.loop import run", "sim"),
        ("grpo_lab.protocol.canary", "if TYPE_CHECKING:\n    from grpo_lab.packing import plan", "packing"),
        ("grpo_lab.protocol.canary", "from ..tasks import base", "tasks"),
        ("grpo_lab.protocol.canary", "from .. import tasks", "tasks"),
        ("grpo_lab.protocol.canary", "async def f():\n    import torch.nn", "torch"),
        ("grpo_lab.check.checker", "from grpo_lab.report.files import read_trace", "report"),
        ("grpo_lab.check.checker", "from grpo_lab.ports import Engine", "ports"),
        ("grpo_lab.recorders", "from grpo_lab.ports import Recorder", "ports"),
        ("grpo_lab.ports", "from grpo_lab.recorders import ListRecorder", "recorders"),
        ("grpo_lab.types", "from grpo_lab.errors import ConfigError", "errors"),
        ("grpo_lab.harness.runner", "from grpo_lab.cli.main import main", "cli"),
        ("grpo_lab.trainer.step", "from grpo_lab.packing import _packing", "grpo_lab.packing._packing"),
        ("grpo_lab.trainer.step", "from vllm.engine import x", "vllm"),
        ("grpo_lab.new.part", "from grpo_lab.types import SyncId", "types"),
    ],
)
def test_the_scan_sees(module, source, seen):
    assert f"{module} -> {seen}" in violations({module: imported(source, module)})


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("grpo_lab.trainer.step", "from grpo_lab.transport import engines\nimport torch"),
        ("grpo_lab.protocol.canary", "from .nursery import run_all\nimport asyncio"),
        ("grpo_lab.report.html", "from grpo_lab.check import CheckResult"),
        ("grpo_lab.engine.app", "import grpo_lab\nfrom grpo_lab import __version__"),
        ("experiments.async_against_sync", "from grpo_lab.harness.runner import run"),
        ("grpo_lab.packing.native", "from grpo_lab.packing import _packing"),
    ],
)
def test_the_scan_does_not_see(module, source):
    assert violations({module: imported(source, module)}) == []


BLOCKED = f"""
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
"""


def without_heavy_packages(script, *arguments):
    """(exit code, output) of a script in a fresh interpreter where none of ``HEAVY`` can be imported."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + script, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_block_holds():
    code, output = without_heavy_packages("import torch")
    assert code == 1
    assert "torch is blocked" in output


def test_light_units_need_no_torch():
    script = """
for unit in sys.argv[1:]:
    package = importlib.import_module(f"grpo_lab.{unit}")
    for one in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
        importlib.import_module(one.name)
print(sum(name.startswith("grpo_lab.") for name in sys.modules))
"""
    code, output = without_heavy_packages(script, *LIGHT_UNITS)
    assert code == 0, output
    assert int(output) == sum(unit_of(name) in LIGHT_UNITS for name, _ in modules())


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_needs_no_torch(words):
    script = "from grpo_lab.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    code, output = without_heavy_packages(script, *words, "--help")
    assert code == 0, output
    assert "usage" in output.lower()
