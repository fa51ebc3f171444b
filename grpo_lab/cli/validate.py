"""``grpo-lab validate``: predicts a run that the calibration has not seen, and prints the error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import tyro
from rich.markup import escape

from grpo_lab.cli.console import PipeConsole
from grpo_lab.errors import ConfigError
from grpo_lab.harness.calibration import Calibration
from grpo_lab.harness.refusals import require_output, require_trace


def validate(
    run: tyro.conf.Positional[Path],
    latency: Path = Path("runs/calibration.toml"),
    json: Path | None = None,
    seeds: int = 3,
    record: bool = True,
) -> int:
    """Predicts a held-out real run in virtual time and prints predicted against measured.

    The errors are written into the calibration too: what simulates with it shows them beside its numbers.

    Args:
        run: a run directory, for example runs/latest.
        latency: what grpo-lab calibrate has written.
        json: file for the figures and errors.
        seeds: simulated runs.
        record: write the errors into the calibration (never those of a run that it was fitted to).
    """
    if not 1 <= seeds <= 100:
        raise ConfigError("seeds", seeds, "from 1 to 100")
    if json is not None:
        require_output("json", json)
    require_trace(run)
    calibration = Calibration.load(latency)
    if record:
        require_output("latency", latency)
    from grpo_lab.harness import calibration_runs  # noqa: PLC0415 - slow, and the others slower

    real = calibration_runs.load_real_run(run)
    from grpo_lab.harness import validation, validation_report  # noqa: PLC0415
    from grpo_lab.harness.run_dir import RunDir  # noqa: PLC0415

    name = run.resolve().name
    measured = validation.figures_of(real.records)
    predicted = validation.predict(real.parameters, calibration, seeds)
    comparison = validation.compare(predicted, [measured])
    warnings = validation.caveats(real, calibration)
    if record and name not in calibration.source.runs:
        held_out = {**calibration.held_out, name: comparison.errors()}
        calibration = replace(calibration, held_out=held_out)
        calibration.save(latency)
    console = PipeConsole(highlight=False)
    console.print(
        validation_report.comparison_table(comparison, f"{name}: predicted ({seeds} seeds), measured")
    )
    for line in warnings:
        console.print(f"[yellow]note:[/] {escape(line)}", soft_wrap=True)
    console.print(
        f"{escape(str(latency))}: {escape(validation_report.error_words(calibration))}", soft_wrap=True
    )
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
