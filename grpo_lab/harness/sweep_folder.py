"""Where a sweep is read from and kept: the experiment's file, and the folder of its finished points.

Nothing here needs pandas or matplotlib, so that a wrong file or folder is refused before they are imported.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.errors import ConfigError, DataError
from grpo_lab.files import replacing, write_whole
from grpo_lab.harness.experiment import Experiment, Point
from grpo_lab.report.strict_json import strict_json

if TYPE_CHECKING:
    import pandas as pd


class SweepFolder:
    """``out/<experiment>/``: ``points/<hash>.json``, and the results that are made of them."""

    def __init__(self, out: Path, experiment: str) -> None:
        self.path = out / experiment
        self.points = self.path / "points"
        self.work = self.path / "work"

    def open(self, *, resume: bool, fresh: bool) -> None:
        """Makes the folder. Raises ``ConfigError`` when points are there and neither was asked for."""
        found = len(list(self.points.glob("*.json")))
        if found and fresh:
            shutil.rmtree(self.points)
        elif found and not resume:
            raise ConfigError(
                "out",
                str(self.path),
                f"a folder without the {found} finished points that are there",
                "Use --resume to keep them and run what is missing, or --fresh to run all again",
            )
        try:
            self.points.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError("out", str(self.path), f"a folder that can be written to ({reason})") from error

    def finished(self, point: Point) -> dict[str, Any] | None:
        """The row of a point that ended well; a damaged file counts as none."""
        try:
            row = json.loads((self.points / f"{point.hash}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return row if isinstance(row, dict) and row.get("config") == point.hash else None

    def keep(self, point: Point, row: dict[str, Any]) -> None:
        self.write(f"points/{point.hash}.json", strict_json(row))

    def write(self, name: str, text: str) -> None:
        """Whole or not at all."""
        write_whole(self.path / name, text)

    def write_parquet(self, table: pd.DataFrame) -> Path:
        target = self.path / "results.parquet"
        with replacing(target) as partial:
            table.to_parquet(partial, index=False)
        return target


def require_experiment(path: Path) -> None:
    """Raises ``DataError`` for what is no Python file."""
    if path.suffix != ".py" or not path.is_file():
        raise DataError(f"{path}: expected an experiment's file, for example experiments/sync_interval.py")


def load_experiment(path: Path) -> Experiment:
    """``EXPERIMENT`` of a module of ``experiments/``. Raises ``DataError`` for anything else."""
    require_experiment(path)
    root = str(path.resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)  # a point's process imports the module by name
    name = f"{path.resolve().parent.name}.{path.stem}"
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the file is the user's: it may raise anything
        raise DataError(f"{path}: cannot be imported as {name}: {type(error).__name__}: {error}") from error
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise DataError(f"{path}: has no EXPERIMENT, an Experiment of grpo_lab.harness.experiment")
    return experiment
