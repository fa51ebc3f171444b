"""``grpo-lab bench NAME``: measurements on this machine."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from grpo_lab.errors import ConfigError

BENCHMARKS = {
    "pack": "grpo_lab.cli.bench_pack",
    "sync": "grpo_lab.cli.bench_sync",
    "sim": "grpo_lab.cli.bench_sim",
}


def main(arguments: Sequence[str]) -> int:
    """The first word names the benchmark; the rest are its own options."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: grpo-lab bench {{{','.join(BENCHMARKS)}}} [--help]")  # noqa: T201
        return 0 if words else 2
    module = BENCHMARKS.get(words[0])
    if module is None:
        raise ConfigError("benchmark", words[0], f"one of {', '.join(BENCHMARKS)}")
    return int(importlib.import_module(module).main(words[1:]))
