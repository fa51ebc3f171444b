"""Hypothesis strategies for whole simulated clusters: the cluster, its work, its delays, faults, schedules.

Everything is drawn before a run. Small values come first, so that what fails shrinks to a small cluster
with few faults and an almost empty tape.

>>> from hypothesis import find
>>> find(clusters(), lambda scenario: len(scenario.faults) == 1).faults[0].occurrence
1
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.sim.light_trainer import LIMITS
from grpo_lab.sim.scenario import (
    BUCKET_CALL,
    BUCKET_FAULTS,
    CALL_FAULTS,
    CRASHES,
    ENGINE_CALLS,
    LINK_FAULTS,
    RANK_CALLS,
    REWARD_CALL,
    TRAINER,
    WORKER,
    Fault,
    Scenario,
)
from grpo_lab.sim.tape import PctTape, Tape, pct_tape, random_tape
from grpo_lab.types import SyncScope

_DURATIONS_S = st.sampled_from((0.5, 2.0, 8.0, 25.0, 70.0))
_SCOPES: tuple[SyncScope, ...] = ("global", "global", "rolling")
_OCCURRENCES = st.integers(1, 6)
_LONGEST_WAY_S = 0.6  # of a message; a sync over slower links does not end within the bounds of its phases
_TRAINER_CALLS = tuple(call for call in ENGINE_CALLS if call != "generate")


def workloads() -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a ``Scenario``: prompts, lengths and the staleness rule; always values that go together."""
    return _workloads()


@st.composite
def _workloads(draw: st.DrawFn) -> dict[str, Any]:
    generations = draw(st.integers(1, 4))
    prompts_per_step = draw(st.integers(1, 3))
    bound: dict[str, Any] = {
        "staleness_policy": draw(st.sampled_from(("admission", "drop", "freshest", "window"))),
        "max_staleness": draw(st.integers(0, 3)),
        "weight_sync_steps": draw(st.integers(1, 3)),
    }
    if draw(st.booleans()):
        low = bound["weight_sync_steps"] - 1
        bound["max_staleness_steps"] = draw(st.integers(low, low + 4))
    if bound["staleness_policy"] == "window":
        bound["window"] = draw(st.integers(1, _widest(bound, prompts_per_step)))
    mean_tokens = draw(st.sampled_from((4, 8, 16)))
    return {
        **bound,
        "generations": generations,
        "prompts_per_step": prompts_per_step,
        "max_inflight": generations * draw(st.integers(prompts_per_step, 6)),
        "queue_capacity": draw(st.integers(1, 6)),
        "lengths": draw(st.sampled_from(("geometric", "fixed", "heavy"))),
        "mean_tokens": mean_tokens,
        "max_tokens": mean_tokens * draw(st.integers(1, 4)),
        "steps": draw(st.integers(1, 5)),
    }


def _widest(bound: dict[str, Any], groups_per_step: int) -> int:
    rule = StalenessBound(
        "admission",
        groups_per_step,
        bound["max_staleness"],
        bound["weight_sync_steps"],
        bound.get("max_staleness_steps"),
    )
    admitted = rule.admission_limit(0)
    assert admitted is not None
    spare: int = admitted - bound["weight_sync_steps"] * groups_per_step
    return min(4, spare + 1)


def delays() -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a ``Scenario``: how long everything takes."""
    return st.fixed_dictionaries(
        {
            "step_s": st.sampled_from((0.05, 0.5, 2.0)),
            "token_s": st.sampled_from((0.01, 0.03, 0.2)),
            "reward_s": st.sampled_from((0.0, 0.05, 1.0)),
            "network_s": st.sampled_from((0.0, 0.002, 0.05, 0.3)),
            "jitter": st.sampled_from((0.0, 1.0, 10.0)),
            "step_jitter": st.sampled_from((0.0, 0.5)),
            "context_token_s": st.sampled_from((0.0, 0.0, 1e-3)),
            "bandwidth_bytes_s": st.sampled_from((1e7, 1e5, 5e3)),
        }
    ).filter(lambda drawn: drawn["network_s"] * (1 + drawn["jitter"]) <= _LONGEST_WAY_S)


def faults(engines: int, trainer_ranks: int = 1) -> st.SearchStrategy[tuple[Fault, ...]]:
    """None to four faults of a cluster of ``engines`` engines."""
    names = tuple(f"engine-{index}" for index in range(engines))
    return st.lists(_one_fault(names, trainer_ranks), max_size=4).map(tuple)


def _one_fault(names: tuple[str, ...], ranks: int = 1) -> st.SearchStrategy[Fault]:
    further = tuple(f"{TRAINER}-r{rank}" for rank in range(1, ranks))
    engine = st.sampled_from(names)
    call = st.sampled_from(ENGINE_CALLS)

    def made(kinds: tuple[str, ...], calls: st.SearchStrategy[str], target: st.SearchStrategy[str]) -> Any:
        kind = st.sampled_from(kinds)
        return st.builds(
            Fault, kind=kind, target=target, call=calls, occurrence=_OCCURRENCES, duration_s=_DURATIONS_S
        )

    collective = st.sampled_from(RANK_CALLS)
    of_ranks = [made((*CRASHES, "hang"), collective, st.sampled_from((TRAINER, *further)))] if further else []
    return st.one_of(
        *of_ranks,
        made(CALL_FAULTS, call, engine),
        made(BUCKET_FAULTS, st.just(BUCKET_CALL), engine),
        made(LINK_FAULTS, call, engine),
        made(("oom",), st.just("finish_update"), engine),
        made(("stall",), call, engine),
        made(("stall",), st.sampled_from(_TRAINER_CALLS), st.just(TRAINER)),
        made(("stall",), st.just("generate"), st.just(WORKER)),
        made(CRASHES, call, engine),
        made(CRASHES, st.sampled_from(_TRAINER_CALLS), st.just(TRAINER)),
        made(CRASHES, st.just("generate"), st.just(WORKER)),
        made(("reward_error",), st.just(REWARD_CALL), st.just(WORKER)),
        st.builds(
            Fault,
            kind=st.just("clock_skew"),
            target=st.sampled_from((*names, TRAINER, WORKER)),
            duration_s=st.sampled_from((-2.0, 0.5, 2.0)),
        ),
    )


def clusters(*, with_faults: bool = True) -> st.SearchStrategy[Scenario]:
    """Whole scenarios."""
    return _clusters(with_faults)


@st.composite
def _clusters(draw: st.DrawFn, with_faults: bool) -> Scenario:
    engines = draw(st.integers(1, 3))
    ranks = draw(st.sampled_from((1, 1, 1, 2, 3)))
    scenario = Scenario(
        engines=engines,
        trainer_ranks=ranks,
        slots=draw(st.integers(1, 6)),
        pause_mode=draw(st.sampled_from(("keep", "abort", "wait"))),
        clear_cache=draw(st.sampled_from((True, True, False))),
        sync_scope=draw(st.sampled_from(_SCOPES)),
        sync_attempts=draw(st.integers(1, 3)),
        min_engines=draw(st.integers(1, engines)),
        canary=draw(st.booleans()),
        stock=draw(st.sampled_from((False, False, True))),
        final_sync=draw(st.booleans()),
        kv_blocks=draw(st.sampled_from((64, 24))),
        engine_mode=draw(st.sampled_from(("step", "event"))),
        engine_ranks=draw(st.sampled_from((1, 1, 2))),
        prefix_policy=draw(st.sampled_from(("versioned", "flush"))),
        cache_outputs=draw(st.booleans()),
        bucket_bytes=draw(st.sampled_from((512, 2048))),
        topology=draw(st.sampled_from(("independent", "p2p", "tree", "ring"))),
        ring_slots=draw(st.integers(2, 4)),
        checkpoint_every_steps=draw(st.integers(0, 2)),
        faults_until_s=draw(st.sampled_from((30.0, 90.0))),
        seed=draw(st.integers(0, 3)),
        faults=draw(faults(engines, ranks)) if with_faults else (),
        **draw(workloads()),
        **draw(delays()),
    )
    if scenario.pause_mode == "wait" and scenario.longest_drain_s > LIMITS.pause_s:
        return dataclasses.replace(scenario, pause_mode="keep")  # no pause of it could end within its bound
    return scenario


def churn() -> st.SearchStrategy[Scenario]:
    """Longer runs of small clusters whose engines die and come back, stall and are cut off, many times."""
    return st.integers(2, 3).flatmap(_churn)


def _churn(engines: int) -> st.SearchStrategy[Scenario]:
    names = st.sampled_from(tuple(f"engine-{index}" for index in range(engines)))
    kinds = st.sampled_from((*CRASHES, "stall", "partition", "partition_trainer", "refuse", "lose_reply"))
    one = st.builds(
        Fault,
        kind=kinds,
        target=names,
        call=st.sampled_from(ENGINE_CALLS),
        occurrence=st.integers(1, 12),
        duration_s=st.sampled_from((0.05, 0.5, 2.0, 8.0)),
    )
    return st.builds(
        Scenario,
        engines=st.just(engines),
        steps=st.integers(6, 12),
        engine_mode=st.sampled_from(("step", "event")),
        pause_mode=st.sampled_from(("keep", "abort", "wait")),
        sync_scope=st.sampled_from(_SCOPES),
        canary=st.booleans(),
        stock=st.sampled_from((False, False, True)),
        sync_attempts=st.integers(1, 3),
        max_staleness=st.integers(0, 2),
        step_s=st.sampled_from((0.2, 2.0)),
        network_s=st.sampled_from((0.002, 0.05)),
        checkpoint_every_steps=st.just(1),
        faults_until_s=st.just(120.0),
        faults=st.lists(one, min_size=1, max_size=8).map(tuple),
    )


def tapes(max_choices: int = 60) -> st.SearchStrategy[Tape]:
    """Schedules: first in first out, a short list of choices that shrinks, random, and priorities (PCT)."""
    short = st.lists(st.integers(0, 5), max_size=max_choices).map(Tape)
    seeds = st.integers(0, 2**16)
    return st.one_of(
        st.just(Tape()),
        short,
        seeds.map(lambda seed: random_tape(seed, 3000)),
        seeds.map(_pct),
    )


def _pct(seed: int) -> PctTape:
    return pct_tape(seed, depth=3, steps=1500)
