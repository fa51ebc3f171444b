# ruff: noqa: T201 - a command
"""Does the simulated engine predict a real server's speed at loads that it was not calibrated at?

``python -m experiments.vllm_timing MODEL [--part speed|rate] [--repeats 5] [--json FILE]`` starts a real vLLM
(.venv-vllm) on MODEL.

speed: measures it at all concurrencies, interleaved and repeated, fits the step latency at those of
    ``CALIBRATION``, with long completions and short ones, and predicts those of ``PREDICTION``. Of each
    quantity it prints the error of the prediction against the mean of the runs and the server's own spread
    (half of max - min, over the mean); for throughput also whether the error is at most max(10 %, spread).
rate: the request rate of ``grpo-lab serve`` with synthetic tokens against the real one's, each alone on the
    machine (an idle vLLM is not idle), at both shapes of ``RATES``.

The client is a few lines of asyncio: a client library takes from the server the cores that it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from grpo_lab.engine.latency import LatencyModel
from grpo_lab.harness.engine_process import ServerCommand, running_engines
from grpo_lab.harness.latency_fit import Fit, fit, predict
from grpo_lab.harness.load import Load, Measured, apply, connection, served_model
from grpo_lab.harness.recording import FIELDS
from grpo_lab.harness.vllm_server import VllmServerConfig, running_vllm

CALIBRATION = (2, 4, 16, 24)
PREDICTION = (1, 8, 32)
QUANTITIES = {"tokens_per_s": ("tok/s", 1.0), "ttft_s": ("TTFT ms", 1e3), "tpot_s": ("TPOT ms", 1e3)}
TOLERANCE = 0.10
RATES = {"64 tokens": Load(32, 320, 16, 64), "8 tokens": Load(32, 640, 8, 8)}
GOAL_RATE = 5.0


def load_of(concurrency: int) -> Load:
    return Load(concurrency, max(16, 8 * concurrency), 16, 64)


# Short completions tell what a request costs from what a token costs.
CALIBRATED = [load for c in CALIBRATION for load in (load_of(c), Load(c, max(32, 16 * c), 16, 16))]
LOADS = sorted([*CALIBRATED, *map(load_of, PREDICTION)], key=lambda load: load.concurrency)


async def measure(url: str, repeats: int) -> list[list[Measured]]:
    """``repeats`` rounds; each visits all loads once, in turns, so that drift hits all alike."""
    rounds: list[list[Measured]] = []
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        model = await served_model(http)

        def measured(load: Load) -> Awaitable[Measured]:
            return apply(http, model, load, connect=partial(connection, url))

        for load in LOADS:  # what a server does only once is not measured
            await measured(load)
        for number in range(repeats):
            turn = LOADS if number % 2 == 0 else LOADS[::-1]
            rounds.append([await measured(load) for load in turn])
    return rounds


async def rates(url: str, repeats: int) -> dict[str, list[float]]:
    """Requests a second at each shape of ``RATES``, in turns."""
    found: dict[str, list[float]] = {shape: [] for shape in RATES}
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        model = await served_model(http)
        for _ in range(repeats + 1):
            for shape, load in RATES.items():
                row = await apply(http, model, load, connect=partial(connection, url))
                found[shape].append(row.requests_per_s)
    return {shape: values[1:] for shape, values in found.items()}  # the first round warms


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A quantity at one concurrency, predicted and measured; ``error`` and ``spread`` as fractions."""

    quantity: str
    concurrency: int
    predicted: float
    measured: float
    error: float
    spread: float
    runs: int

    @property
    def holds(self) -> bool:
        return abs(self.error) <= max(TOLERANCE, self.spread)


def compare(model: LatencyModel, rounds: Sequence[Sequence[Measured]]) -> list[Row]:
    rows = []
    for quantity in QUANTITIES:
        for concurrency in PREDICTION:
            runs = [
                getattr(row, quantity) for turn in rounds for row in turn if row.concurrency == concurrency
            ]
            mean = statistics.mean(runs)
            predicted = getattr(predict(model, load_of(concurrency)), quantity)
            spread = (max(runs) - min(runs)) / 2 / mean
            rows.append(Row(quantity, concurrency, predicted, mean, predicted / mean - 1, spread, len(runs)))
    return rows


def speed(model: Path, logs: Path, repeats: int) -> dict[str, Any]:
    with running_vllm(VllmServerConfig(model=model, log=logs / "vllm.log")) as [server]:
        rounds = asyncio.run(measure(server.url, repeats))
    fitted = fit([row for turn in rounds for row in turn if row.concurrency in CALIBRATION])
    rows = compare(fitted.model, rounds)
    _print_speed(fitted, rows)
    return {
        "latency": {key: getattr(fitted.model, key) for key in FIELDS},
        "rows": [dataclasses.asdict(row) for row in rows],
        "measured": [[dataclasses.asdict(row) for row in turn] for turn in rounds],
        "holds": all(row.holds for row in rows if row.quantity == "tokens_per_s"),
    }


def _print_speed(fitted: Fit, rows: Sequence[Row]) -> None:
    worst = max(map(abs, fitted.errors))
    print(f"fitted at concurrency {CALIBRATION}: {fitted.model}; largest residual {worst:.0%}")
    print(f"{'':8} concurrency  predicted  measured   error  spread  within max({TOLERANCE:.0%}, spread)")
    for row in rows:
        name, factor = QUANTITIES[row.quantity]
        numbers = f"{name:8} {row.concurrency:11} {row.predicted * factor:10.1f} {row.measured * factor:9.1f}"
        verdict = ("yes" if row.holds else "no") if row.quantity == "tokens_per_s" else "not asked"
        print(f"{numbers} {row.error:+7.1%} {row.spread:7.1%}  {verdict} ({row.runs} runs)")


def rate(model: Path, logs: Path, repeats: int) -> dict[str, Any]:
    found = {}
    with running_vllm(VllmServerConfig(model=model, log=logs / "vllm.log")) as [server]:
        found["vllm"] = asyncio.run(rates(server.url, repeats))
    synthetic = (sys.executable, "-m", "grpo_lab.cli.serve", "--policy", "synthetic", "--port", "0")
    with running_engines([ServerCommand("synthetic", synthetic, logs / "serve.log")]) as [simulated]:
        found["grpo-lab serve"] = asyncio.run(rates(simulated.url, repeats))
    ratios = {}
    for shape, load in RATES.items():
        print(f"{shape}, {load.concurrency} in flight:")
        for name, shapes in found.items():
            values = shapes[shape]
            words = f"{statistics.mean(values):.1f} requests/s ({min(values):.1f} to {max(values):.1f})"
            print(f"  {name} {words}")
        means = [statistics.mean(shapes[shape]) for shapes in found.values()]
        ratios[shape] = means[1] / means[0]
        print(f"  ratio {ratios[shape]:.1f}: {'met' if ratios[shape] >= GOAL_RATE else 'missed'}")
    return {"requests_per_s": found, "ratios": ratios, "holds": all(r >= GOAL_RATE for r in ratios.values())}


PARTS = {"speed": speed, "rate": rate}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--part", choices=PARTS, help="both by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    found = {}
    with tempfile.TemporaryDirectory() as logs:
        for name in [arguments.part] if arguments.part else PARTS:
            found[name] = PARTS[name](arguments.model, Path(logs), arguments.repeats)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(part["holds"] for part in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
