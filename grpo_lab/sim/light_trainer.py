"""A trainer without a model: the real trainer's training run, syncs and events, over synthetic weights.

What decides the order of things is not copied: ``TrainingTerm`` with its buffer and cursor, the
coordinator, and the packed source are the ones that ``AsyncGRPOTrainer`` uses. Only the gradient step is a
virtual pause, after which every weight has changed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lab.errors import GrpoLabError
from grpo_lab.events import CheckpointSaved, GroupConsumed, MicroBatchBegan, OptimizerStepApplied
from grpo_lab.ports import Engine, WeightSource
from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.protocol.canary import Canary
from grpo_lab.protocol.coordinator import Coordinator, SyncSettings
from grpo_lab.protocol.timeouts import Timeouts
from grpo_lab.sim.engine_host import model_score
from grpo_lab.sim.greenlet_bridge import GreenletBridge, virtual_sleep
from grpo_lab.sim.life import Life
from grpo_lab.sim.loop import VirtualLoop
from grpo_lab.sim.scenario import Scenario
from grpo_lab.sim.stalls import Stalls
from grpo_lab.sim.trainer_ranks import TrainerRanks
from grpo_lab.trainer.protocols import NamedTensors, SyncOutcome, WorkerFactory
from grpo_lab.trainer.ranks import SingleRank
from grpo_lab.trainer.step import group_consumed
from grpo_lab.trainer.term import Lineage, TrainingTerm
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.transport.sender import RingTransport
from grpo_lab.types import RolloutGroup

T = TypeVar("T")

SHAPES: dict[str, tuple[int, ...]] = {f"layer{index}.weight": (8, 12) for index in range(4)}
LIMITS = Timeouts(
    connect_s=60.0,
    handshake_s=10.0,
    pause_s=20.0,
    transfer_s=15.0,
    finish_s=10.0,
    resume_s=10.0,
    score_s=10.0,
    close_s=10.0,
)
STARVATION_S = 120.0
CANARY = Canary(((1, 2, 3, 5, 7), (11, 13)), tolerance=1e-3)

CoordinatorType = type[Coordinator]


@dataclass(frozen=True, slots=True)
class LightSettings:
    """What ``TrainingTerm`` reads of a configuration."""

    staleness_bound: StalenessBound
    queue_maxsize: int
    sync_attempts: int
    final_sync: bool
    starvation_timeout: float = STARVATION_S

    @property
    def staleness_policy(self) -> str:
        return self.staleness_bound.policy

    @property
    def groups_per_step(self) -> int:
        return self.staleness_bound.groups_per_step


@dataclass(frozen=True, slots=True)
class Cut:
    """A checkpoint: where a next run begins, and its weights."""

    lineage: Lineage
    weights: dict[str, Tensor]
    weights_hash: str


class CheckpointStore:
    """What outlives a trainer: complete checkpoints, and the number of the newest term."""

    def __init__(self) -> None:
        self._term = 0
        self._newest: Cut | None = None

    def save(self, cut: Cut) -> None:
        self._newest = cut

    def resume(self, fresh: Callable[[], dict[str, Tensor]]) -> Cut:
        """The newest cut, or the beginning, in a new term."""
        self._term += 1
        if self._newest is None:
            return Cut(Lineage(term=self._term), fresh(), "")
        at = self._newest.lineage
        lineage = Lineage(self._term, at.version, at.optimizer_step, at.cursor, at.checkpoint)
        weights = {name: tensor.clone() for name, tensor in self._newest.weights.items()}
        return Cut(lineage, weights, self._newest.weights_hash)


class BridgedSync:
    """``WeightSync``: the coordinator, called from the trainer's blocking stack."""

    def __init__(
        self,
        coordinator: CoordinatorType,
        scenario: Scenario,
        engines: Sequence[Engine],
        make_transport: Callable[[], RingTransport],
        weights: dict[str, Tensor],
        bridge: GreenletBridge,
        life: Life,
        source: type[PackedSource] = PackedSource,
        stalls: Stalls | None = None,
        ranks: TrainerRanks | None = None,
    ) -> None:
        self._coordinator_type = coordinator
        self._stalls = stalls
        self._ranks = ranks
        self._source_type = source
        self._scenario = scenario
        self._engines = engines
        self._make_transport = make_transport
        self._weights = weights
        self._bridge = bridge
        self._life = life
        self._coordinator: Coordinator | None = None

    def connect(self, term: int, base_version: int) -> None:
        transport = self._make_transport()
        source = self._source_type(
            lambda: iter(self._weights.items()),
            self._bridge,
            self._life,
            ring=lambda: transport.ring,
            score=lambda sequences: model_score(self._weights, sequences),
            bucket_bytes=self._scenario.bucket_bytes,
            wire_dtype=None,
            num_threads=1,
            sends=True,
        )
        ranks = self._ranks
        gathered: WeightSource = source
        if ranks is not None:
            gathered = ranks.source(source)
            ranks.make_others(source, transport)
        coordinator = self._coordinator = self._coordinator_type(
            self._engines,
            transport,
            gathered,
            SingleRank() if ranks is None else ranks.first,
            self._life,
            sync_settings(self._scenario),
        )
        self._call(coordinator, lambda one: one.connect(term, base_version), LIMITS.connect_phase_s)

    def sync(self, named_tensors: NamedTensors, optimizer_step: int) -> SyncOutcome:
        coordinator = self._coordinator
        assert coordinator is not None
        turns = self._scenario.engines if self._scenario.sync_scope == "rolling" else 1
        bound_s = LIMITS.sync_s(self._scenario.sync_attempts, turns)
        report = self._call(coordinator, lambda one: one.sync(optimizer_step), bound_s)
        total_s = report.phases_s["total"]
        return SyncOutcome(report.version, report.committed, report.phases_s, total_s, report.fenced)

    def close(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            self._call(coordinator, lambda one: one.close(), LIMITS.shutdown_s)

    def _call(
        self,
        coordinator: Coordinator,
        step: Callable[[Coordinator], Coroutine[Any, Any, T]],
        timeout_s: float,
    ) -> T:
        ranks = self._ranks
        work = self._unless_dead(step(coordinator) if ranks is None else ranks.together(coordinator, step))
        return self._bridge.call(work if self._stalls is None else self._stalls.within(work), timeout_s)

    async def _unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        """What goes wrong in a dead trainer's sync is nobody's business any more."""
        try:
            return await work
        except GrpoLabError:
            if self._life.alive:
                raise
            raise asyncio.CancelledError from None


class LightTrainer:
    """One incarnation of the trainer. ``run`` is blocking code for ``spawn_blocking``."""

    def __init__(
        self,
        scenario: Scenario,
        loop: VirtualLoop,
        life: Life,
        store: CheckpointStore,
        engines: Sequence[Engine],
        make_transport: Callable[[], RingTransport],
        make_worker: Callable[[GreenletBridge], WorkerFactory],
        coordinator: CoordinatorType,
        *,
        source: type[PackedSource] = PackedSource,
        term: type[TrainingTerm] = TrainingTerm,
        stalls: Stalls | None = None,
        ranks: TrainerRanks | None = None,
    ) -> None:
        self._scenario = scenario
        self._life = life
        self._store = store
        self._bridge = GreenletBridge(loop)
        cut = store.resume(lambda: fresh_weights(scenario.seed))
        self._weights = cut.weights
        self._restored_hash = cut.weights_hash
        sync = BridgedSync(
            coordinator,
            scenario,
            engines,
            make_transport,
            self._weights,
            self._bridge,
            life,
            source,
            stalls,
            ranks,
        )
        settings = LightSettings(
            scenario.bound,
            scenario.queue_capacity,
            scenario.sync_attempts,
            scenario.final_sync,
            max(STARVATION_S, 4 * scenario.longest_sample_s),
        )
        self.term = term(cut.lineage, settings, life, sync, make_worker(self._bridge), self._named_tensors)

    def run(self) -> None:
        """Trains to the scenario's last step. Raises why it could not; what ran has been stopped then."""
        error: BaseException | None = None
        try:
            self.term.begin(self._restored_hash)
            self.term.start_worker()
            while self.term.optimizer_step < self._scenario.steps:
                self._train_step()
        except BaseException as failure:  # also its own death: the rest must unwind
            error = failure
        _, error = self.term.close(error)
        self._bridge.close()
        if error is not None:
            raise error

    def _train_step(self) -> None:
        term, scenario = self.term, self._scenario
        groups, wait_s = term.next_groups()
        self._consume(groups)
        duration_s = self._compute(groups)
        rewards = [sample.reward or 0.0 for group in groups for sample in group.samples]
        reward_mean = sum(rewards) / len(rewards)
        for tensor in self._weights.values():
            tensor.add_(0.01 * (1 + reward_mean))
        self._life.emit(
            OptimizerStepApplied(
                term=term.term,
                optimizer_step=term.optimizer_step,
                version=term.version,
                loss=-reward_mean,
                reward_mean=reward_mean,
                duration_s=duration_s,
                wait_s=wait_s,
            )
        )
        term.step_applied(groups)
        steps = term.optimizer_step - term.lineage.optimizer_step
        if steps % scenario.weight_sync_steps == 0 and term.optimizer_step < scenario.steps:
            term.sync()
        every = scenario.checkpoint_every_steps
        if every and term.optimizer_step % every == 0:
            self._save()

    def _compute(self, groups: Sequence[RolloutGroup]) -> float:
        """The time of the gradient passes; returns its seconds."""
        virtual_sleep(self._scenario.step_s)
        return self._scenario.step_s

    def _consume(self, groups: Sequence[RolloutGroup]) -> None:
        term = self.term
        for group in groups:
            self._life.emit(self._consumed(group))
        samples = [sample for group in groups for sample in group.samples]
        self._life.emit(
            MicroBatchBegan(
                term=term.term,
                optimizer_step=term.optimizer_step,
                version=term.version,
                rank=0,
                micro_batch=0,
                groups=tuple(group.group_id for group in groups),
                samples=len(samples),
                tokens=sum(len(sample.completion_token_ids) for sample in samples),
            )
        )

    def _consumed(self, group: RolloutGroup) -> GroupConsumed:
        term = self.term
        return group_consumed(
            group,
            term=term.term,
            version=term.version,
            optimizer_step=term.optimizer_step,
            optimizer_step_first=term.step_of_version(group.version_first),
        )

    def _save(self) -> None:
        term = self.term
        if not self._life.alive:
            return
        name = f"checkpoint-{term.optimizer_step}-t{term.term}"
        cursor, digest = term.cursor, hash_of(self._weights)
        lineage = Lineage(term.term, term.version, term.optimizer_step, cursor, name)
        weights = {key: tensor.clone() for key, tensor in self._weights.items()}
        self._store.save(Cut(lineage, weights, digest))
        self._life.emit(
            CheckpointSaved(
                checkpoint=name,
                term=term.term,
                version=term.version,
                optimizer_step=term.optimizer_step,
                prompt_low_water=cursor.low_water,
                prompts_done=cursor.done,
                weights_hash=digest,
            )
        )

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._weights.items())


def sync_settings(scenario: Scenario) -> SyncSettings:
    return SyncSettings(
        pause_mode=scenario.pause_mode,
        scope=scenario.sync_scope,
        clear_cache=scenario.clear_cache,
        attempts=scenario.sync_attempts,
        min_engines=scenario.min_engines,
        canary=CANARY if scenario.canary else None,
        timeouts=LIMITS,
    )


def fresh_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


def hash_of(weights: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in weights.items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
