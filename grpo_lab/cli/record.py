"""``grpo-lab record``: measures a server under steady loads and fits the simulation's step latency to it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import tyro

from grpo_lab.errors import ConfigError, EngineError, EngineUnreachable
from grpo_lab.harness.latency_fit import Fit, fit
from grpo_lab.harness.load import Load, Measured, apply

FIELDS = ("base_s", "prefill_token_s", "sequence_s", "context_token_s")


@dataclass(frozen=True)
class RecordConfig:
    """Measure a vLLM, or ``grpo-lab serve``, and fit a step latency to it."""

    url: Annotated[str, tyro.conf.Positional]
    """The server's address, http://host:port."""
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Requests in flight, one load each."""
    prompt_tokens: tuple[int, ...] = (16, 256)
    """Of each request; every length is measured at every concurrency."""
    completion_tokens: int = 64
    """Of each request."""
    rounds: int = 3
    """Requests of each client."""
    repeats: int = 2
    """Times that all loads are measured, in turns."""
    out: Path | None = None
    """File (JSON) for what was measured and fitted."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError("url", self.url, "http://host:port")
        for name in ("completion_tokens", "rounds", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")
        if not self.concurrencies or not self.prompt_tokens:
            raise ConfigError("concurrencies", self.concurrencies, "at least one, and one prompt length")


def record(config: tyro.conf.OmitArgPrefixes[RecordConfig]) -> int:
    """Measure a server and fit a step latency to it (see RecordConfig)."""
    measured = asyncio.run(measure(config))
    fitted = fit(measured)
    for row, error in zip(measured, fitted.errors, strict=True):
        print(_line(row, error))  # noqa: T201
    print("step latency: " + ", ".join(f"{name}={getattr(fitted.model, name):.3g}" for name in FIELDS))  # noqa: T201
    if config.out is not None:
        _write(config.out, measured, fitted)
    return 0


async def measure(config: RecordConfig) -> list[Measured]:
    """All loads, in turns. Raises ``EngineError``."""
    loads = [
        Load(concurrency, concurrency * config.rounds, prompt, config.completion_tokens)
        for concurrency in config.concurrencies
        for prompt in config.prompt_tokens
    ]
    try:
        async with httpx.AsyncClient(base_url=config.url, timeout=600, trust_env=False) as http:
            model = await served_model(http)
            await apply(http, model, loads[0])  # what a server does only once is not measured
            return [await apply(http, model, load) for _ in range(config.repeats) for load in loads]
    except httpx.TransportError as error:
        raise EngineUnreachable(f"{config.url}: {error or type(error).__name__}") from error


async def served_model(http: httpx.AsyncClient) -> str:
    """The name that requests must give. Raises ``EngineError``."""
    response = await http.get("/v1/models")
    try:
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{http.base_url}: /v1/models names no model: {response.text[:200]}") from error


def _line(row: Measured, error: float) -> str:
    times = [
        f"{name} {value * 1e3:.1f} ms"
        for name, value in (("TTFT", row.ttft_s), ("TPOT", row.tpot_s))
        if value
    ]
    shape = f"concurrency {row.concurrency:3}, prompt {row.prompt_tokens:4}"
    return f"{shape}: {row.tokens_per_s:7.1f} tok/s, {', '.join(times)}; fitted {error:+.1%}"


def _write(path: Path, measured: list[Measured], fitted: Fit) -> None:
    data = {
        "latency": {name: getattr(fitted.model, name) for name in FIELDS},
        "errors": list(fitted.errors),
        "measured": [dataclasses.asdict(row) for row in measured],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError("out", str(path), f"a file to write ({error})") from error
