"""Files that a command will write when its work is done: looked at before the work begins."""

from __future__ import annotations

import argparse
from pathlib import Path

from grpo_lab.errors import ConfigError
from grpo_lab.files import why_no_file

PLOT_KINDS = (".svg", ".png", ".pdf")


def why_unwritable(path: Path) -> str:
    """Why a file could not be written there, in a directory that is there; empty when it could be."""
    folder = path.absolute().parent
    if path.is_dir():
        return f"{str(path)!r} is a directory; name a file"
    if path.exists() and not path.is_file():
        return f"{str(path)!r} is a device or a pipe, which no file may replace; name a file"
    if not folder.is_dir():
        return f"cannot write {str(path)!r}: there is no directory {str(folder)!r}; make it, or name another"
    if reason := why_no_file(folder):
        return (
            f"cannot write {str(path)!r}: {str(folder)!r} is not writable ({reason}); name another directory"
        )
    return ""


def require_writable(option: str, path: Path | None, kinds: tuple[str, ...] = ()) -> None:
    """Raises ``ConfigError`` for a file that could not be written, or that ends in none of ``kinds``."""
    if path is None:
        return
    if kinds and path.suffix not in kinds:
        raise ConfigError(option, str(path), f"a file that ends in {', '.join(kinds)}")
    if reason := why_unwritable(path):
        raise ConfigError(option, str(path), f"a file that can be written ({reason})")


def output_file(text: str) -> Path:
    """An argparse `type`: a path that can be written to, or the parser's error (exit code 2)."""
    path = Path(text)
    if reason := why_unwritable(path):
        raise argparse.ArgumentTypeError(reason)
    return path


def plot_file(text: str) -> Path:
    """As :func:`output_file`, for a picture of a kind that can be drawn."""
    path = output_file(text)
    if path.suffix not in PLOT_KINDS:
        raise argparse.ArgumentTypeError(
            f"cannot draw {text!r}: end its name in one of {', '.join(PLOT_KINDS)}"
        )
    return path
