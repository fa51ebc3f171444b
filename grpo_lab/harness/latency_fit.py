"""From measured loads to an engine's step latency, and from that back to what a load would see.

A decode step of c sequences whose contexts have k tokens each takes base + sequence c + context c k; a prompt
of p tokens adds prefill p to one step. With n tokens of each of R requests, at concurrency c::

    seconds / (R / c) ~ n base + n c sequence + n c k context + c p prefill

that is, one round of c requests has n steps and c prompts. The coefficients are the non-negative least
squares solution over all loads, each weighted by 1 / seconds, so that relative errors count alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
from scipy.optimize import nnls

from grpo_lab.engine.app import create_app
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.latency import LatencyModel
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.errors import ConfigError
from grpo_lab.harness.load import Load, Measured, apply
from grpo_lab.sim.simulation import SimContext, run_simulation

MIN_BASE_S = 1e-6


@dataclass(frozen=True, slots=True)
class Fit:
    """``errors`` are predicted over measured seconds minus 1, a load each, over the loads fitted."""

    model: LatencyModel
    errors: tuple[float, ...]


def fit(measured: Sequence[Measured]) -> Fit:
    """Raises ``ConfigError`` for too few loads: four numbers are fitted."""
    if len({(row.concurrency, row.prompt_tokens, row.completion_tokens) for row in measured}) < 3:
        raise ConfigError("loads", len(measured), "at least three different ones")
    rows = np.array([_parts(row) for row in measured])
    seconds = np.array([row.seconds for row in measured])
    solution, _ = nnls(rows / seconds[:, None], np.ones(len(rows)))
    base_s, sequence_s, context_token_s, prefill_token_s = (float(value) for value in solution)
    model = LatencyModel(max(base_s, MIN_BASE_S), prefill_token_s, sequence_s, context_token_s)
    errors = rows @ solution / seconds - 1
    return Fit(model, tuple(float(value) for value in errors))


def _parts(row: Measured) -> tuple[float, float, float, float]:
    load = Load(row.concurrency, row.requests, row.prompt_tokens, row.completion_tokens)
    rounds = row.requests / row.concurrency
    steps = rounds * row.completion_tokens
    sequences = steps * row.concurrency
    prompts = rounds * row.concurrency * row.prompt_tokens
    return (steps, sequences, sequences * load.mean_context_tokens, prompts)


def predict(model: LatencyModel, load: Load, max_num_seqs: int = 32) -> Measured:
    """What the load would see of a simulated engine with this latency, in virtual time."""

    async def main(context: SimContext) -> Measured:
        policy = SyntheticPolicy(mean_tokens=1e9, max_model_len=4096, num_blocks=8192)
        config = EngineConfig(max_num_seqs=max_num_seqs)
        core = EngineCore(policy, context.recorder("engine-0"), config, timing=model)
        app = create_app(core, receivers={}, model="m")
        core.start()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(base_url="http://engine", transport=transport, timeout=1e6) as http:
            try:
                return await apply(http, "m", load)
            finally:
                await app.state.close()

    return run_simulation(main).value
