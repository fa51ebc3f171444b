# ruff: noqa: T201 - a command
"""Does the simulated engine predict a real server's speed at loads that it was not calibrated at?

``python -m experiments.vllm_timing MODEL [--repeats 5] [--json FILE]`` starts a real vLLM (.venv-vllm) on
MODEL, measures it at all concurrencies, interleaved and repeated, fits the step latency at those of
``CALIBRATION`` and predicts those of ``PREDICTION``. For each it prints the error of the prediction against
the mean of the runs, the server's own spread (half of max - min, over the mean), and whether the error is
at most max(10 %, spread). Then the request rate of ``grpo-lab serve`` with synthetic tokens against the
real one's.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from grpo_lab.engine.latency import LatencyModel
from grpo_lab.harness.engine_process import ServerCommand, running_engines
from grpo_lab.harness.latency_fit import fit, predict
from grpo_lab.harness.load import Load, Measured, apply, served_model
from grpo_lab.harness.recording import FIELDS
from grpo_lab.harness.vllm_server import VllmServerConfig, running_vllm

CALIBRATION = (2, 4, 16, 24)
PREDICTION = (1, 8, 32)
RATE = Load(32, 320, 8, 8)  # short requests: what a server can take in
GOAL_RATE = 5.0


def load_of(concurrency: int) -> Load:
    return Load(concurrency, max(8, 3 * concurrency), 16, 64)


async def measure(url: str, repeats: int) -> list[list[Measured]]:
    """``repeats`` rounds; each visits all concurrencies once, in turns, so that drift hits all alike."""
    rounds: list[list[Measured]] = []
    order = sorted({*CALIBRATION, *PREDICTION})
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        model = await served_model(http)
        await apply(http, model, load_of(8))  # warm
        for number in range(repeats):
            turn = order if number % 2 == 0 else order[::-1]
            rounds.append([await apply(http, model, load_of(concurrency)) for concurrency in turn])
    return rounds


async def rates(urls: dict[str, str], repeats: int) -> dict[str, list[float]]:
    """Requests a second of each server, in turns."""
    found: dict[str, list[float]] = {name: [] for name in urls}
    for _ in range(repeats + 1):
        for name, url in urls.items():
            async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
                found[name].append((await apply(http, await served_model(http), RATE)).requests_per_s)
    return {name: values[1:] for name, values in found.items()}  # the first round warms


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One concurrency: tokens a second, predicted and measured; ``error`` and ``spread`` as fractions."""

    concurrency: int
    predicted: float
    measured: float
    error: float
    spread: float
    runs: int

    @property
    def holds(self) -> bool:
        return abs(self.error) <= max(0.10, self.spread)


def compare(model: LatencyModel, rounds: Sequence[Sequence[Measured]]) -> list[Row]:
    rows = []
    for concurrency in PREDICTION:
        runs = [row.tokens_per_s for turn in rounds for row in turn if row.concurrency == concurrency]
        mean = statistics.mean(runs)
        predicted = predict(model, load_of(concurrency)).tokens_per_s
        spread = (max(runs) - min(runs)) / 2 / mean
        rows.append(Row(concurrency, predicted, mean, predicted / mean - 1, spread, len(runs)))
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as logs:
        config = VllmServerConfig(model=arguments.model, log=Path(logs) / "vllm.log")
        with running_vllm(config) as [server]:
            rounds = asyncio.run(measure(server.url, arguments.repeats))
            synthetic = (sys.executable, "-m", "grpo_lab.cli.serve", "--policy", "synthetic", "--port", "0")
            command = ServerCommand("synthetic", synthetic, Path(logs) / "serve.log")
            with running_engines([command]) as [simulated]:
                urls = {"vllm": server.url, "grpo-lab serve": simulated.url}
                rate = asyncio.run(rates(urls, arguments.repeats))
    return report(rounds, rate, arguments.json)


def report(rounds: Sequence[Sequence[Measured]], rate: dict[str, list[float]], path: Path | None) -> int:
    fitted = fit([row for turn in rounds for row in turn if row.concurrency in CALIBRATION])
    rows = compare(fitted.model, rounds)
    worst = max(map(abs, fitted.errors))
    print(f"fitted at concurrency {CALIBRATION}: {fitted.model}; largest residual {worst:.0%}")
    print("concurrency  predicted tok/s  measured tok/s  error  spread  within max(10 %, spread)")
    for row in rows:
        numbers = f"{row.concurrency:11} {row.predicted:16.0f} {row.measured:15.0f} {row.error:+6.1%}"
        print(f"{numbers} {row.spread:7.1%}  {'yes' if row.holds else 'no'} ({row.runs} runs)")
    means = {name: statistics.mean(values) for name, values in rate.items()}
    for name, values in rate.items():
        print(f"{name}: {means[name]:.1f} requests/s ({min(values):.1f} to {max(values):.1f})")
    ratio = means["grpo-lab serve"] / means["vllm"]
    print(f"ratio {ratio:.1f}, goal {GOAL_RATE:g}: {'met' if ratio >= GOAL_RATE else 'missed'}")
    if path is not None:
        data = {
            "latency": {key: getattr(fitted.model, key) for key in FIELDS},
            "rows": [dataclasses.asdict(row) for row in rows],
            "requests_per_s": rate,
            "measured": [[dataclasses.asdict(row) for row in turn] for turn in rounds],
        }
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.holds for row in rows) and ratio >= GOAL_RATE else 1


if __name__ == "__main__":
    sys.exit(main())
