"""Files that a command will write when its work is done: looked at before the work begins."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

PLOT_KINDS = (".svg", ".png", ".pdf")


def why_unwritable(path: Path) -> str:
    """Why a file could not be written there; empty when it could be. Makes nothing."""
    folder = path.absolute().parent
    if path.is_dir():
        return f"{str(path)!r} is a directory; name a file"
    if not folder.is_dir():
        return f"cannot write {str(path)!r}: there is no directory {str(folder)!r}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"cannot write {str(path)!r}: {str(folder)!r} is not writable"
    return ""


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
