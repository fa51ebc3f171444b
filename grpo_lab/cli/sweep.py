"""``grpo-lab sweep``: runs an experiment's grid and draws its figures."""

from __future__ import annotations

import contextlib
from pathlib import Path

import tyro

from grpo_lab.cli.console import PipeConsole
from grpo_lab.errors import ConfigError
from grpo_lab.harness.executors import Executor, LocalExecutor, RayExecutor
from grpo_lab.harness.experiment import Scale
from grpo_lab.harness.refusals import require_place
from grpo_lab.harness.sweep_folder import SweepFolder, load_experiment, require_experiment


def sweep(
    file: tyro.conf.Positional[Path],
    workers: int | None = None,
    ray: str | None = None,
    seeds: int = 3,
    full: bool = False,
    resume: bool = False,
    fresh: bool = False,
    dry_run: bool = False,
    out: Path = Path("runs/experiments"),
) -> int:
    """Runs an experiment of experiments/ and writes results.parquet, figures and reading.md.

    Exit code 1 when a run failed or a claim of the reading guide does not hold on these results.

    Args:
        file: the experiment, for example experiments/sync_interval.py.
        workers: runs at a time; default: as many as there are cores, or what the experiment allows.
        ray: address of a Ray cluster to run on instead ("auto": the one on this machine).
        seeds: of every setting.
        full: the large grid.
        resume: keep the points that are finished, run the others.
        fresh: run all points again.
        dry_run: say what would be run and about how long it takes, from two points; keep nothing.
        out: where the experiment's folder is made.
    """
    if resume and fresh:
        raise ConfigError("fresh", fresh, "not together with --resume")
    if ray is not None and workers is not None:
        raise ConfigError("workers", workers, "nothing with --ray: the cluster decides how many run at once")
    scale = Scale(seeds, full)
    if workers is not None:
        LocalExecutor(workers)
    require_experiment(file)
    require_place(out)
    experiment = load_experiment(file)
    # Imported after the arguments were judged: they take seconds.
    from grpo_lab.harness.dry_run import dry_run as run_dry  # noqa: PLC0415
    from grpo_lab.harness.sweep import run_sweep, tell  # noqa: PLC0415

    folder = SweepFolder(out, experiment.name)
    console = PipeConsole(highlight=False)
    with contextlib.ExitStack() as stack:
        executor = _executor(ray, workers if workers is not None else experiment.workers, stack)
        console.print(f"[bold]{experiment.name}[/]: {experiment.question}", soft_wrap=True)
        if dry_run:
            return run_dry(experiment, scale, executor, console)
        folder.open(resume=resume, fresh=fresh)
        result = run_sweep(experiment, scale, executor, folder, console)
    tell(result, folder, console)
    return result.exit_code


def _executor(ray: str | None, workers: int | None, stack: contextlib.ExitStack) -> Executor:
    if ray is None:
        return LocalExecutor(workers)
    cluster = RayExecutor(ray)
    stack.callback(cluster.close)
    return cluster
