"""Mutants that break no order: logprobs of another distribution, and memory that grows."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from grpo_lab.check.checker import Checker
from grpo_lab.engine.request import Request
from grpo_lab.engine.sampling import sample
from grpo_lab.events import Event, LogprobGapMeasured, MemoryMeasured, Record, RunDeclared
from grpo_lab.sim.scenario import Failure
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.clusters import Clusters, varied
from grpo_lab.testing.mutants.mutant import Finding, Mutant, Only
from grpo_lab.trainer.protocols import SyncOutcome
from grpo_lab.trainer.term import TrainingTerm
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.trainer.weight_transfer import resident_bytes
from grpo_lab.types import SamplingParams, SyncId

TOLERANCE = 1e-4


class Sampler:
    """The engine's way from logits to a behaviour logprob, as it is asked for at ``temperature``."""

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature)

    def logprob(self, value: float) -> float:
        return value


@dataclass(frozen=True, slots=True)
class LogitsCase:
    seed: int
    vocabulary: int
    spread: float
    temperature: float


@dataclass(frozen=True)
class EqualWeights:
    """The same logits on both sides: the engine samples and reports, the trainer scores what was sampled."""

    name: str = "equal weights"
    repeats: bool = True

    def cases(self) -> st.SearchStrategy[LogitsCase]:
        return st.builds(
            LogitsCase,
            seed=st.integers(0, 99),
            vocabulary=st.sampled_from((8, 64, 512)),
            spread=st.sampled_from((0.5, 2.0, 5.0)),
            temperature=st.sampled_from((1.0, 0.7, 1.3)),
        )

    def run(
        self, case: LogitsCase, plant: Any, only: Only, passed_over: Callable[[str], None]
    ) -> Finding | None:
        sampler = Sampler() if plant is None else plant()
        logits = (
            torch.randn(64, case.vocabulary, generator=torch.Generator().manual_seed(case.seed)) * case.spread
        )
        requests = _requests(len(logits), sampler.params(case.temperature), case.seed)
        output = sample(logits.clone(), requests)
        behaviour = torch.tensor([sampler.logprob(value) for value in output.logprobs])
        scores = (logits / case.temperature).log_softmax(-1)
        ours = scores.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        gap = (ours - behaviour).abs()
        declared = RunDeclared(parameters={"logprob_tolerance": TOLERANCE, "clear_cache": True})
        measured = LogprobGapMeasured(
            version=1, gap_max=float(gap.max()), gap_mean=float(gap.mean()), tokens=len(gap)
        )
        return checked([declared, measured], only, passed_over)

    def size(self, case: LogitsCase) -> tuple[int, ...]:
        return (case.vocabulary, case.seed)

    def smaller(self, case: LogitsCase, fails: Callable[[LogitsCase], bool]) -> LogitsCase:
        return case

    def saved(self, case: LogitsCase, finding: Finding, protocol: str) -> Failure | None:
        return None


def checked(events: list[Event], only: Only, passed_over: Callable[[str], None]) -> Finding | None:
    """The first finding in a trace of one actor."""
    records = [Record(float(place), "trainer", place, (), event) for place, event in enumerate(events)]
    checker = Checker()
    found = [violation for record in records for violation in checker.feed(record)]
    for violation in found:
        if only is None or violation.rule in only:
            return Finding(violation.rule, violation.message, violation.event_ids, records)
        passed_over(violation.rule)
    return None


def _requests(count: int, params: SamplingParams, seed: int) -> list[Request]:
    loop = asyncio.new_event_loop()
    try:
        return [
            Request(f"r{row}", (1,), params, loop.create_future(), sample_key=seed * 1000 + row)
            for row in range(count)
        ]
    finally:
        loop.close()


class Truncated(Sampler):
    """Behaviour logprobs are those of the truncated distribution, the trainer's are raw.

    Field: trl#6945: with top_p below 1 the importance ratio is wrong from the first step on.
    Planted: the engine samples with top_p 0.9.
    Exposed by: equal weights, any temperature. S24, D1.
    """

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, top_p=0.9)


class AlwaysALittleLow(Sampler):
    """Every behaviour logprob is a little too low; no single token is beyond the tolerance.

    Field: trl#6945, in its quiet form: another precision, or a temperature that differs in the fourth digit.
    Planted: 0.7 of the tolerance less.
    Exposed by: equal weights. D1: the mean is near what only the worst token may have.
    """

    def logprob(self, value: float) -> float:
        return value - 0.7 * TOLERANCE


class Measured(TrainingTerm):
    """Environment: memory is measured after every sync, as the trainer does it in the real world."""

    def sync(self) -> SyncOutcome:
        outcome = super().sync()
        self._recorder.emit(MemoryMeasured(member=self._recorder.actor, resident_bytes=resident_bytes()))
        return outcome


class BuffersPerSync(PackedSource):
    """Each sync allocates new buffers and streams, and keeps the old ones.

    Field: vllm#52950: memory grows with every update until the process dies.
    Planted: four MiB a sync that nobody frees.
    Exposed by: forty syncs. D2.
    """

    async def begin(self, sync: SyncId) -> None:
        kept: list[Any] = self.__dict__.setdefault("kept", [])
        kept.append(torch.ones(1 << 20))
        await super().begin(sync)


FORTY_SYNCS = Clusters(
    "forty syncs",
    varied(
        dataclasses.replace(
            spaces.BASE,
            engines=1,
            generations=1,
            steps=45,
            step_s=0.05,
            mean_tokens=2,
            checkpoint_every_steps=0,
        ),
        seed=st.integers(0, 3),
    ),
    environment={"term": Measured},
)
EQUAL_WEIGHTS = EqualWeights()

MUTANTS = (
    Mutant("M06-a", ("S24", "D1"), EQUAL_WEIGHTS, Truncated),
    Mutant("M06-b", ("D1",), EQUAL_WEIGHTS, AlwaysALittleLow),
    Mutant("M08", ("D2", "S30"), FORTY_SYNCS, BuffersPerSync, {"source": BuffersPerSync}),
)
