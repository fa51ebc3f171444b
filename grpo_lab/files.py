"""Files that are written whole or not at all: under a temporary name beside their place, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def why_no_file(folder: Path) -> str:
    """Why no file can be made in ``folder``; empty when one can be. It is tried: a file comes and goes.

    Permission bits do not say: they let root write to /proc, and to a file system that is read-only.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its name on success and is removed on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        if error.filename is None:  # a full disk does not say whose
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):  # what went wrong before says more
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Raises ``OSError`` when the place cannot be written to."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
