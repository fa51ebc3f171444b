"""The supervisor of a simulated cluster: it starts the members, strikes them down, and starts them again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from grpo_lab.check import CheckResult, Violation
from grpo_lab.errors import GrpoLabError
from grpo_lab.events import (
    FaultsEnded,
    GroupDropped,
    MemberDied,
    MemberStarted,
    MemberStopped,
    Reached,
    RunEnded,
)
from grpo_lab.recorders import NullRecorder
from grpo_lab.sim.declaration import converge_s, declaration
from grpo_lab.sim.engine_host import EngineHost
from grpo_lab.sim.faults import Faults
from grpo_lab.sim.greenlet_bridge import GreenletBridge, spawn_blocking
from grpo_lab.sim.life import Life
from grpo_lab.sim.light_trainer import LIMITS, SHAPES, CheckpointStore, LightTrainer, sync_settings
from grpo_lab.sim.light_worker import LightWorker
from grpo_lab.sim.network import Network, SimulatedEngine, SimulatedTransport
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import TRAINER, WORKER, Scenario
from grpo_lab.sim.simulation import SimContext
from grpo_lab.sim.stalls import Stalls, task_factory
from grpo_lab.sim.trainer_ranks import TrainerRanks
from grpo_lab.sim.watch import Measures, Watch, WatchedRecorder
from grpo_lab.trainer.protocols import RolloutWorkerProtocol, WorkerFactory, WorkerStart
from grpo_lab.transport.memory import InMemoryReceiver

RESTART_S = 1.0  # after a trainer that ended with an error
CALM_RESTARTS = 3  # more than that after the last fault: it does not converge
ENDLESS = "bound-of-the-simulation"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``marks`` counts situations that were reached; ``faults`` those that struck."""

    version: int
    optimizer_steps: int
    terms: int
    faults: int
    marks: dict[str, int]
    measures: Measures
    check: CheckResult


class Cluster:
    """Everything of one simulation. Actors: ``run`` (the supervisor), engines, ``worker``, ``trainer``."""

    def __init__(self, context: SimContext, scenario: Scenario, watch: Watch, parts: Parts) -> None:
        self.scenario = scenario
        self._context = context
        self._watch = watch
        self._parts = parts
        self._run = WatchedRecorder("run", context.loop.time, watch)
        self._faults = Faults(scenario, self._run, context.loop.time)
        self._network = Network(scenario, self._faults, self._crash, self._stall)
        self._trainer_stalls = Stalls(context.loop.time)
        if any(fault.kind == "stall" for fault in scenario.faults):
            context.loop.set_task_factory(task_factory)
        self._trainer_recorder = self._recorder(TRAINER)
        self._worker_recorder = self._recorder(WORKER)
        self._rank_recorders = [self._recorder(name) for name in scenario.rank_names[1:]]
        self._ranks: TrainerRanks | None = None
        self._hosts = {
            name: EngineHost(
                name,
                scenario,
                SHAPES,
                NullRecorder(name) if scenario.stock else self._recorder(name),
                self._run,
                {SimulatedTransport.backend: self._receiver},
                policy=parts.policy,
                core=parts.core,
                rl=parts.rl,
            )
            for name in scenario.engine_names
        }
        self._store = CheckpointStore()
        self._transport: SimulatedTransport | None = None
        self._life = Life(self._trainer_recorder, 0)
        self._worker: LightWorker | None = None
        self._workers = 0
        self._trainer_task: asyncio.Task[None] | None = None
        self._killed = asyncio.Event()
        self._down_s = 0.0
        self._background: list[asyncio.Task[Any]] = []
        self._calm = not scenario.faults
        self._calm_restarts = 0
        self._terms = 0

    async def run(self) -> Outcome:
        self._run.emit(declaration(self.scenario, self._parts))
        for host in self._hosts.values():
            host.start()
        for recorder in (self._trainer_recorder, self._worker_recorder):
            recorder.observe(self._run.last_id)
        ending = self._start(self._end_faults(), "end of faults") if self.scenario.faults else None
        trainer = await self._train_to_the_end()
        if ending is not None:
            ending.cancel()
        self._faults.end()
        await asyncio.gather(*self._background, return_exceptions=True)
        for host in self._hosts.values():
            await host.stop()
        self._run.observe(self._trainer_recorder.last_id)
        self._run.emit(RunEnded(outcome="clean"))
        return self._outcome(trainer)

    # -- trainer -------------------------------------------------------------------------------------

    async def _train_to_the_end(self) -> LightTrainer:
        """One incarnation of the trainer after another, each from the newest checkpoint."""
        while True:
            trainer = self._new_trainer()
            failure = await self._ended()
            self._run.observe(self._trainer_recorder.last_id)
            if failure is None:
                self._life.end()
                self._run.emit(MemberStopped(member=TRAINER))
                self._end_lost_groups()
                return trainer
            self._count_restart(failure)
            await asyncio.sleep(self._down_s or RESTART_S)
            self._end_lost_groups()

    def _new_trainer(self) -> LightTrainer:
        self._terms += 1
        life = self._life = Life(self._trainer_recorder, self._terms)
        self._run.emit(MemberStarted(member=TRAINER, role="trainer", incarnation=self._terms))
        life.observe(self._run.last_id)
        self._worker = None
        self._killed.clear()
        self._down_s = 0.0
        self._trainer_stalls = Stalls(self._context.loop.time)
        ranks = self._make_ranks(life)
        trainer = self._parts.trainer(
            self.scenario,
            self._context.loop,
            life,
            self._store,
            self._clients(life),
            self._make_transport,
            self._worker_factory,
            self._parts.coordinator,
            source=self._parts.source,
            term=self._parts.term,
            stalls=self._trainer_stalls,
            ranks=ranks,
        )
        self._trainer_task = self._trainer_stalls.spawn(
            lambda: spawn_blocking(self._context.loop, trainer.run, name="trainer")
        )
        self._trainer_task.add_done_callback(lambda _: self._killed.set())
        return trainer

    def _make_ranks(self, life: Life) -> TrainerRanks | None:
        self._ranks = None
        if self.scenario.trainer_ranks > 1:
            lives = [life]
            for recorder in self._rank_recorders:
                lives.append(Life(recorder, self._terms))
                self._run.emit(MemberStarted(member=recorder.actor, role="trainer", incarnation=self._terms))
                recorder.observe(self._run.last_id)
            settings = sync_settings(self.scenario)
            self._ranks = TrainerRanks(
                lives, self._faults, self._crash, self._parts.coordinator, settings, self.scenario.seed
            )
        return self._ranks

    def _end_ranks(self, detail: str) -> None:
        """What starts ranks ends them all when one has ended."""
        if self._ranks is not None:
            for rank in range(1, self.scenario.trainer_ranks):
                self._end_rank(rank, detail)

    def _end_rank(self, rank: int, detail: str) -> None:
        assert self._ranks is not None
        recorder = self._rank_recorders[rank - 1]
        if self._ranks.alive(rank):
            self._ranks.fail(rank, detail)
            self._run.observe(recorder.last_id)
            if detail:
                self._run.emit(MemberDied(member=recorder.actor, detail=detail))
            else:
                self._run.emit(MemberStopped(member=recorder.actor))

    async def _ended(self) -> str | None:
        """Until the trainer has ended or was killed; why it must start again, None when it need not."""
        await self._killed.wait()
        task, life = self._trainer_task, self._life
        assert task is not None
        if not life.alive:
            self._background.append(task)  # it unwinds, unseen
            return "killed"
        error = task.exception()
        if error is not None and not isinstance(error, GrpoLabError):
            raise error
        self._end_ranks("" if error is None else "ended with rank 0")
        if error is None:
            return None
        life.end()
        self._run.emit(MemberDied(member=TRAINER, detail=f"{type(error).__name__}: {error}"[:500]))
        return str(error)

    def _count_restart(self, failure: str) -> None:
        if self._calm:
            self._calm_restarts += 1
            if self._calm_restarts > CALM_RESTARTS:
                self._not_converged(
                    f"the trainer failed {self._calm_restarts} times, at last with: {failure}"
                )

    def _end_lost_groups(self) -> None:
        """Samples never outlive their term: what the dead had is accounted for by the supervisor. What a
        member lost that lived to the end is its own to tell (S20).
        """
        for group in list(self._watch.lost_groups.values()):
            self._run.emit(
                GroupDropped(
                    term=group.term,
                    group=group.group,
                    prompt_index=group.prompt_index,
                    samples=group.samples,
                    reason="term_ended",
                    detail="lost with a member that died",
                )
            )

    # -- parts of an incarnation -----------------------------------------------------------------------

    def _recorder(self, actor: str) -> WatchedRecorder:
        loop, skew_s = self._context.loop, self._faults.skew_s(actor)
        return WatchedRecorder(actor, lambda: loop.time() + skew_s, self._watch)

    def _clients(self, life: Life) -> list[SimulatedEngine]:
        return [self._parts.client(host, life, self._network) for host in self._hosts.values()]

    def _make_transport(self) -> SimulatedTransport:
        self._transport = self._parts.transport(self._life, self._network, LIMITS.transfer_s)
        return self._transport

    def _receiver(self) -> InMemoryReceiver:
        assert self._transport is not None, "an engine is asked to join before any trainer connects"
        return self._transport.receiver()

    def _worker_factory(self, bridge: GreenletBridge) -> WorkerFactory:
        trainer = self._life

        def make(start: WorkerStart) -> RolloutWorkerProtocol:
            self._workers += 1
            life = Life(self._worker_recorder, self._workers)
            self._worker = self._parts.worker_actor(
                self.scenario,
                start,
                self._clients(life),
                trainer,
                life,
                bridge,
                self._faults.strike,
                self._parts.worker,
                Stalls(self._context.loop.time),
                self._trainer_stalls,
            )
            return self._worker

        return make

    # -- faults ------------------------------------------------------------------------------------------

    def _crash(self, member: str, down_s: float) -> None:
        if member == WORKER:
            if self._worker is not None:
                self._worker.crash()
        elif member == TRAINER:
            self._crash_trainer(down_s)
        elif member in self.scenario.rank_names:
            self._end_rank(self.scenario.rank_names.index(member), "killed by SIGKILL")
        elif self._hosts[member].crash("killed by SIGKILL"):
            self._start(self._restart(self._hosts[member], down_s), f"restart of {member}")

    def _stall(self, member: str, duration_s: float) -> None:
        if member == TRAINER:
            self._trainer_stalls.stall(duration_s)
        elif self._worker is not None:
            self._worker.stalls.stall(duration_s)

    def _crash_trainer(self, down_s: float) -> None:
        if not self._life.alive:
            return
        self._life.end()
        self._run.observe(self._trainer_recorder.last_id)
        self._run.observe(self._worker_recorder.last_id)
        self._run.emit(MemberDied(member=TRAINER, detail="killed by SIGKILL"))
        self._end_ranks("killed with rank 0")
        if self._worker is not None and self._worker.crash():
            self._run.emit(MemberDied(member=WORKER, detail="killed with its trainer"))
        if self._transport is not None:
            self._start(self._transport.close(), "connections of a dead trainer")
        assert self._trainer_task is not None
        self._trainer_stalls.end()
        self._trainer_task.cancel()
        self._down_s = max(down_s, RESTART_S)
        self._killed.set()

    async def _restart(self, host: EngineHost, down_s: float) -> None:
        await asyncio.sleep(down_s)
        host.start()

    async def _end_faults(self) -> None:
        await self._faults.over(self.scenario.faults_until_s)
        self._faults.end()
        await asyncio.sleep(RESTART_S)
        self._calm = True
        self._run.emit(FaultsEnded())
        await asyncio.sleep(converge_s(self.scenario))
        tasks = self._context.loop.describe_tasks()
        self._not_converged(f"not at its end {converge_s(self.scenario):g} s after the last fault:\n{tasks}")

    def _not_converged(self, message: str) -> None:
        now_s = self._context.now_s
        self._run.emit(Reached(mark=ENDLESS))  # a silent trace says too little of how long rules waited
        self._judge_all(self._watch.checker.finish())  # a rule that was waiting says more
        self._watch.break_off(Violation("convergence", message, (self._run.last_id,), now_s))

    # -- the end -----------------------------------------------------------------------------------------

    def _judge_all(self, check: CheckResult) -> None:
        for rule in check.rules:
            for violation in rule.violations:
                self._watch.judge(violation)

    def _start(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = self._context.loop.create_task(work, name=name)
        self._background.append(task)
        return task

    def _outcome(self, trainer: LightTrainer) -> Outcome:
        check = self._watch.checker.finish()
        self._judge_all(check)
        return Outcome(
            version=trainer.term.version,
            optimizer_steps=trainer.term.optimizer_step,
            terms=self._terms,
            faults=self._faults.struck,
            marks=dict(sorted(self._watch.marks.items())),
            measures=self._watch.measures,
            check=check,
        )
