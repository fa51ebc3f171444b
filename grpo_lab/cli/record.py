"""``grpo-lab record``: measures a server under steady loads and fits the simulation's step latency to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from grpo_lab.errors import ConfigError
from grpo_lab.harness.refusals import require_listener, require_output

MIN_LOADS = 3  # the fit has four numbers
LIMITS = {
    "concurrencies": 4096,
    "prompt_tokens": 1 << 20,
    "completion_tokens": 1 << 20,
    "rounds": 10_000,
    "repeats": 1000,
}


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
        for name, most in LIMITS.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or not all(1 <= one <= most for one in values):
                raise ConfigError(name, value, f"from 1 to {most:,}")
        if (loads := len(set(self.concurrencies)) * len(set(self.prompt_tokens))) < MIN_LOADS:
            raise ConfigError(
                "concurrencies",
                self.concurrencies,
                f"{MIN_LOADS} different loads or more with prompt_tokens={self.prompt_tokens}, not {loads}",
            )


def record(config: tyro.conf.OmitArgPrefixes[RecordConfig]) -> int:
    """Measure a server and fit a step latency to it (see RecordConfig)."""
    if config.out is not None:
        require_output("out", config.out)
    require_listener("url", config.url)
    from grpo_lab.harness.recording import record_server  # noqa: PLC0415 - --help needs no torch

    loads = (config.concurrencies, config.prompt_tokens, config.completion_tokens, config.rounds)
    for line in record_server(config.url, *loads, repeats=config.repeats, out=config.out):
        print(line)  # noqa: T201
    return 0
