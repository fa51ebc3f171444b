"""``grpo-lab validate``: predicts a run that the calibration has not seen, and prints the error."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape

from grpo_lab.errors import ConfigError


def validate(
    run: tyro.conf.Positional[Path],
    latency: Path = Path("runs/calibration.toml"),
    json: Path | None = None,
    seeds: int = 3,
) -> int:
    """Predicts a held-out real run in virtual time and prints predicted against measured.

    Args:
        run: a run directory, for example runs/latest.
        latency: what grpo-lab calibrate has written.
        json: file for the figures and errors.
        seeds: simulated runs.
    """
    if not 1 <= seeds <= 100:
        raise ConfigError("seeds", seeds, "from 1 to 100")
    from grpo_lab.harness import calibration_runs, validation, validation_report  # noqa: PLC0415
    from grpo_lab.harness.calibration import Calibration  # noqa: PLC0415
    from grpo_lab.harness.run_dir import RunDir  # noqa: PLC0415

    calibration = Calibration.load(latency)
    real = calibration_runs.load_real_run(run)
    measured = validation.figures_of(real.records)
    predicted = validation.predict(real.parameters, calibration, seeds)
    comparison = validation.compare(predicted, [measured])
    warnings = validation.caveats(real, calibration)
    console = Console(highlight=False)
    name = run.resolve().name
    console.print(
        validation_report.comparison_table(comparison, f"{name}: predicted ({seeds} seeds), measured")
    )
    for line in warnings:
        console.print(f"[yellow]note:[/] {escape(line)}", soft_wrap=True)
    if json is not None:
        row = {
            "run": name,
            "latency": str(latency),
            "seeds": seeds,
            **comparison.to_json(),
            "notes": warnings,
        }
        json.parent.mkdir(parents=True, exist_ok=True)
        RunDir(json.parent).write_json(json.name, row)
    return 0
