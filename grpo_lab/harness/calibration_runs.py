"""Reads real runs for calibration and validation, and refuses what is none."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.errors import DataError
from grpo_lab.events import Record, RunDeclared
from grpo_lab.harness.calibration import Calibration, Source
from grpo_lab.harness.calibration_fits import fit
from grpo_lab.harness.calibration_trace import RunTrace
from grpo_lab.harness.run_dir import source_commit
from grpo_lab.report.files import read_trace

SETTINGS = (
    "engine",
    "engines",
    "engine_threads",
    "trainer_threads",
    "trainer_ranks",
    "task",
    "model",
    "transport",
)
"""What a calibration holds for, besides the machine; other settings are what predictions are made of."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """A run directory: its records, its declaration, and what ``config.json`` says ({} without one)."""

    path: Path
    records: list[Record]
    declared: RunDeclared
    config: dict[str, Any]

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything that decided the run: the recipe's fields, and what the trace declares over them."""
        engines = len(self.declared.capabilities) or 1
        return {**self.config, **self.declared.parameters, "engine": self.declared.engine, "engines": engines}


def load_real_run(path: Path) -> RealRun:
    """Raises ``TraceError`` for no trace, ``DataError`` for a simulated one or one without a declaration."""
    trace = path if path.is_file() else path / "events.jsonl"
    records = list(read_trace(trace))
    declared = next((record.event for record in records if isinstance(record.event, RunDeclared)), None)
    if declared is None:
        raise DataError(f"{trace}: no run_declared event, so what ran is not known")
    if declared.world != "real":
        raise DataError(
            f"{trace}: a simulated run (world {declared.world!r}); its times were chosen, not measured. "
            "Calibrate from and validate against a real run: grpo-lab run RECIPE --world real"
        )
    return RealRun(path, records, declared, _config(trace.parent / "config.json"))


def _config(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def calibrate(paths: Sequence[Path]) -> Calibration:
    """Fits everything to one or more real runs. Several with different batch sizes tell a step's base from
    its tokens. Raises ``UserError`` for runs that are simulated, too short, or not of one kind.
    """
    if not paths:
        raise DataError("no run to calibrate from: name at least one run directory")
    runs = [load_real_run(path) for path in paths]
    settings = [{name: run.parameters[name] for name in SETTINGS if name in run.parameters} for run in runs]
    for path, other in zip(paths[1:], settings[1:], strict=True):
        different = [name for name in SETTINGS if other.get(name) != settings[0].get(name)]
        if different:
            raise DataError(f"{path} and {paths[0]} differ in {', '.join(different)}: calibrate them apart")
    traces = [RunTrace(run.records) for run in runs]
    longest = max((sample.tokens for trace in traces for sample in trace.samples.values()), default=1)
    source = Source(
        runs=tuple(path.resolve().name for path in paths),
        machine=machine(),
        settings={**settings[0], "longest_completion_tokens": longest},
    )
    return fit(traces, source)


def machine() -> dict[str, Any]:
    """What measured times hold for. The load is that of now: a busy machine's times are no use elsewhere."""
    return {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "platform": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
        "commit": source_commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
