"""What lies in /dev/shm: who maps it, and what nobody does any more.

vLLM and Python's ``multiprocessing`` keep named segments and semaphores there, which a kill -9 of all their
processes at once leaves behind (our own transport keeps no names: ``grpo_lab.transport.segment``).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from grpo_lab.transport.segment import SHM_DIRECTORY

# Ours, SharedMemory's and vLLM's segments; the semaphores of torch and of multiprocessing.
NAMES = ("grpo_lab_*", "psm_*", "vllm_*", "sem.mp-*", "torch_*")
YOUNG_S = 60.0


def mapped_by(pid: int) -> set[Path]:
    """Files of /dev/shm in the process's memory; none for a process that is gone or another user's."""
    with contextlib.suppress(OSError):
        maps = Path("/proc", str(pid), "maps").read_text(encoding="utf-8")
        return {Path(found) for found in re.findall(rf"{SHM_DIRECTORY}/\S+", maps)}
    return set()


def unmapped(paths: Iterable[Path]) -> set[Path]:
    """Those of ``paths`` that are there still and that no process maps."""
    left = {path for path in paths if path.exists()}
    for entry in Path("/proc").iterdir() if left else ():
        if entry.name.isdecimal():
            left -= mapped_by(int(entry.name))
    return left


def remove_unmapped(paths: Iterable[Path]) -> None:
    for path in unmapped(paths):
        with contextlib.suppress(OSError):
            path.unlink()


def forgotten(directory: Path = SHM_DIRECTORY, young_s: float = YOUNG_S) -> list[Path]:
    """This user's files with such names that no process here maps, except those just made.

    Whose they were cannot be told from their names, and a process in another container that shares the
    directory is not seen: they are for a person to remove.
    """
    before_s = time.time() - young_s
    mine = []
    for path in {found for name in NAMES for found in directory.glob(name)}:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_uid == os.geteuid() and status.st_mtime < before_s:
                mine.append(path)
    return sorted(unmapped(mine))
