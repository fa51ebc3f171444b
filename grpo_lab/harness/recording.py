"""Measures a server at a grid of loads; writes what was measured and the step latency that explains it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx

from grpo_lab.errors import ConfigError, EngineUnreachable
from grpo_lab.files import write_whole
from grpo_lab.harness.latency_fit import Fit, fit
from grpo_lab.harness.load import Load, Measured, apply, connection, served_model

FIELDS = ("base_s", "prefill_token_s", "sequence_s", "context_token_s")


def record_server(
    url: str,
    concurrencies: Sequence[int],
    prompt_tokens: Sequence[int],
    completion_tokens: int,
    rounds: int,
    *,
    repeats: int = 1,
    out: Path | None = None,
) -> list[str]:
    """A line for each load and one for the fit; ``out`` gets the numbers. Raises ``EngineError``."""
    loads = [
        Load(concurrency, concurrency * rounds, prompt, completion_tokens)
        for concurrency in concurrencies
        for prompt in prompt_tokens
    ]
    measured = asyncio.run(_measure(url, loads, repeats))
    fitted = fit(measured)
    if out is not None:
        _write(out, measured, fitted)
    lines = [_line(row, error) for row, error in zip(measured, fitted.errors, strict=True)]
    values = ", ".join(f"{name}={getattr(fitted.model, name):.3g}" for name in FIELDS)
    return [*lines, f"step latency: {values}"]


async def _measure(url: str, loads: Sequence[Load], repeats: int) -> list[Measured]:
    try:
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
            model = await served_model(http)
            connect = partial(connection, url) if url.startswith("http:") else None  # else: over TLS
            await apply(http, model, loads[0], connect=connect)  # what a server does only once does not count
            return [await apply(http, model, load, connect=connect) for _ in range(repeats) for load in loads]
    except (httpx.TransportError, OSError, EOFError) as error:
        raise EngineUnreachable(f"{url}: {error or type(error).__name__}") from error


def _line(row: Measured, error: float) -> str:
    named = (("TTFT", row.ttft_s), ("TPOT", row.tpot_s))
    times = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in named if value is not None)
    shape = f"concurrency {row.concurrency:3}, prompt {row.prompt_tokens:4}"
    return f"{shape}: {row.tokens_per_s:7.1f} tok/s, {times}; fitted {error:+.1%}"


def _write(path: Path, measured: Sequence[Measured], fitted: Fit) -> None:
    data = {
        "latency": {name: getattr(fitted.model, name) for name in FIELDS},
        "errors": list(fitted.errors),
        "measured": [dataclasses.asdict(row) for row in measured],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise ConfigError("out", str(path), f"a file to write ({error})") from error
