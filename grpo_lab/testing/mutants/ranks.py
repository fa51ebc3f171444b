"""Mutants of the trainer's ranks: several coordinators, collectives between them, one engine to sync."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from grpo_lab.errors import GrpoLabError, PackingError, SimulationError
from grpo_lab.events import PhaseAgreed, Record, RunEnded
from grpo_lab.protocol.coordinator import Coordinator
from grpo_lab.protocol.delivery import drain
from grpo_lab.sim.declaration import declaration
from grpo_lab.sim.engine_host import EngineHost, model_score
from grpo_lab.sim.faults import Faults
from grpo_lab.sim.life import Life
from grpo_lab.sim.light_trainer import SHAPES, fresh_weights, sync_settings
from grpo_lab.sim.network import Network, SimulatedEngine, SimulatedTransport
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.ranks import RankGroup
from grpo_lab.sim.scenario import Failure, Scenario
from grpo_lab.sim.simulation import SimContext, run_simulation
from grpo_lab.sim.tape import Tape
from grpo_lab.sim.watch import Watch, WatchedRecorder
from grpo_lab.testing.mutants.mutant import Finding, Mutant, Only, finding_of
from grpo_lab.testing.strategies import tapes
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.types import Bucket, SyncId

GATHER_TIMEOUT_S = 20.0
SYNCS = 2


@dataclass(frozen=True, slots=True)
class RankCase:
    """``delays_s[rank]`` comes before each gather; rank ``failing`` (-1: none) fails in bucket ``at``."""

    size: int
    delays_s: tuple[float, ...]
    failing: int
    at: int
    tape: Tape


class GatheringSource:
    """Every ``next`` gathers a bucket, on all ranks, in the groups ``shards`` and ``replicas``."""

    order = ("shards", "replicas")

    def __init__(self, rank: int, case: RankCase, groups: dict[str, RankGroup], packed: PackedSource) -> None:
        self._rank, self._case, self._groups, self._packed = rank, case, groups, packed
        self.plan, self.plan_digest = packed.plan, packed.plan_digest
        self.num_buckets, self.num_tensors = packed.num_buckets, packed.num_tensors
        self._attempt = self._next = 0

    async def begin(self, sync: SyncId) -> None:
        self._attempt, self._next = sync.attempt, 0
        if self._rank == 0:
            await self._packed.begin(sync)

    async def next(self) -> Bucket | None:
        if self._next >= self.num_buckets:
            return None
        index, self._next = self._next, self._next + 1
        await asyncio.sleep(self._case.delays_s[self._rank])
        for name in self.groups_of(index):
            await self._groups[name].ranks[self._rank].barrier(GATHER_TIMEOUT_S)
        if (self._rank, index, self._attempt) == (self._case.failing, self._case.at, 1):
            raise PackingError(f"rank {self._rank} has no room for bucket {index}")
        return await self._packed.next() if self._rank == 0 else Bucket(index, 0, memoryview(b""), 0, 0)

    def groups_of(self, index: int) -> Sequence[str]:
        return self.order

    def phases_s(self) -> dict[str, float]:
        return self._packed.phases_s()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._packed.score(sequences)


class InPlace:
    """A bridge for a caller that is no thread of its own."""

    async def in_caller(self, function: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        return function()

    def call(self, coroutine: Any, timeout_s: float) -> Any:
        raise SimulationError("nothing blocks here")

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True)
class RankParts:
    source: type[GatheringSource] = GatheringSource
    coordinator: type[Coordinator] = Coordinator


@dataclass(frozen=True)
class TrainerRanks:
    """Two syncs on two to four ranks."""

    name: str = "ranks"
    repeats: bool = True

    def cases(self) -> st.SearchStrategy[RankCase]:
        return _cases()

    def run(
        self, case: RankCase, plant: Any, only: Only, passed_over: Callable[[str], None]
    ) -> Finding | None:
        records: list[Record] = []
        watch = Watch(records, only=only)
        parts = RankParts(**(plant or {}))
        error: Exception | None = None
        try:
            run_simulation(lambda context: _syncs(context, case, parts, watch), case.tape, records=records)
        except Exception as raised:  # whatever ends a simulation is a finding
            error = raised
        for rule in watch.checker.finish().rules:
            for violation in rule.violations:
                watch.judge(violation)
        for passed in watch.passed_over:
            passed_over(passed)
        if watch.violation is not None:
            found = watch.violation
            return Finding(found.rule, found.message, found.event_ids, records)
        if error is None:
            return None
        finding = finding_of(error, records)
        if only is None or finding.rule in only:
            return finding
        passed_over(finding.rule)
        return None

    def size(self, case: RankCase) -> tuple[int, ...]:
        late = sum(1 for delay in case.delays_s if delay)
        return (case.size, case.failing >= 0, late, case.tape.canonical().unusual)

    def smaller(self, case: RankCase, fails: Callable[[RankCase], bool]) -> RankCase:
        plain = dataclasses.replace(case, tape=Tape())
        return plain if fails(plain) else case

    def saved(self, case: RankCase, finding: Finding, protocol: str) -> Failure | None:
        return None


@st.composite
def _cases(draw: st.DrawFn) -> RankCase:
    size = draw(st.integers(2, 4))
    delays = draw(st.lists(st.sampled_from((0.0, 0.01, 0.5)), min_size=size, max_size=size))
    return RankCase(
        size, tuple(delays), draw(st.integers(-1, size - 1)), draw(st.integers(0, 3)), draw(tapes())
    )


async def _syncs(context: SimContext, case: RankCase, parts: RankParts, watch: Watch) -> None:
    scenario = Scenario(engines=1, faults=())

    def recorder(actor: str) -> WatchedRecorder:
        return WatchedRecorder(actor, context.loop.time, watch)

    run = recorder("run")
    run.emit(declaration(scenario, Parts()))
    names = ["trainer", *(f"trainer-r{rank}" for rank in range(1, case.size))]
    lives = [Life(recorder(name)) for name in names]
    groups = {name: RankGroup(case.size, name, lives) for name in ("shards", "replicas", "agreements")}
    network = Network(scenario, Faults(scenario, run, context.loop.time), lambda member, down_s: None)
    transport = SimulatedTransport(lives[0], network, 15.0)
    host = EngineHost(
        "engine-0", scenario, SHAPES, recorder("engine-0"), run, {transport.backend: transport.receiver}
    )
    host.start()
    weights = fresh_weights(0)
    coordinators = []
    for rank, life in enumerate(lives):
        life.observe(run.last_id)
        packed = PackedSource(
            lambda: iter(weights.items()),
            InPlace(),
            life,
            ring=lambda: transport.ring,
            score=lambda sequences: model_score(weights, sequences),
            bucket_bytes=512,
            wire_dtype=None,
            num_threads=1,
            sends=rank == 0,
            rank=rank,
        )
        engines = [SimulatedEngine(host, life, network)] if rank == 0 else []
        source = parts.source(rank, case, groups, packed)
        ranks, settings = groups["agreements"].ranks[rank], sync_settings(scenario)
        coordinators.append(parts.coordinator(engines, transport, source, ranks, life, settings))
    await _all(one.connect(1, 0) for one in coordinators)
    for _ in range(SYNCS):
        for tensor in weights.values():
            tensor.add_(0.1)
        await _all(one.sync() for one in coordinators)
    await _all(one.close() for one in coordinators)
    await host.stop()
    for life in lives:
        run.observe(life.last_id)
    run.emit(RunEnded(outcome="failed"))


async def _all(steps: Any) -> None:
    """A failed step is an outcome here, unless it is a bug."""
    for outcome in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, GrpoLabError):
            raise outcome


class OtherOrderOnOneRank(GatheringSource):
    """Gathers of two process groups enter in another order on one rank.

    Field: trl#6797, #6798: lazy gathers are entered when they are first needed, and that differs by rank.
    Planted: rank 1 enters the groups of the second bucket the other way round.
    Exposed by: two ranks and two groups. S29, or a deadlock.
    """

    def groups_of(self, index: int) -> Sequence[str]:
        return self.order[::-1] if self._rank == 1 and index == 1 else self.order


class RunsAhead(Coordinator):
    """A rank that failed leaves the gathers of the others.

    Field: trl#7103: one rank blocks in a send between two gathers, the others run ahead; no barrier after
    the start.
    Planted: after a failure a rank goes to the agreement at once, instead of through the rest of the gathers.
    Exposed by: one rank's gather that fails. S29, or a deadlock.
    """

    async def _attempt(self) -> None:
        if self.is_sender:
            await super()._attempt()
            return
        await self._source.begin(self._sync)
        await drain(self._source)


class DecidesAlone(Coordinator):
    """A rank takes its own word for the outcome of a phase.

    Own case: the answer of the collective is not looked at.
    Planted: every rank goes by whether it failed itself.
    Exposed by: one rank's gather that fails. L10.
    """

    async def _agree(self, phase: str, failure: GrpoLabError | None) -> bool:
        await self._ranks.agree(failure is None, self._limits.agree_s)
        self._recorder.emit(
            PhaseAgreed(
                phase=phase,
                rank=self._ranks.rank,
                ok=failure is None,
                term=self._sync.term,
                version=self._sync.version,
                attempt=self._sync.attempt,
            )
        )
        return failure is None


RANKS = TrainerRanks()

MUTANTS = (
    Mutant("M02", ("S29", "deadlock"), RANKS, OtherOrderOnOneRank, {"source": OtherOrderOnOneRank}),
    Mutant("M03", ("S29", "deadlock"), RANKS, RunsAhead, {"coordinator": RunsAhead}),
    Mutant("M70", ("L10",), RANKS, DecidesAlone, {"coordinator": DecidesAlone}),
)
