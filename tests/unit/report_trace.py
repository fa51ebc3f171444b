"""A small asynchronous run, written event by event, with tallies of its own to compare a report with.

Time moves in ticks. Two engines decode while the trainer trains; every second optimizer step is
followed by a weight sync that pauses the engines; one group's reward fails and one is too stale.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from grpo_lab import events as ev
from grpo_lab.recorders import ListRecorder

TICK_S = 0.01
STEPS = 20
SYNC_EVERY = 2
GROUPS_PER_STEP = 2
GENERATIONS = 4
MAX_IN_FLIGHT_GROUPS = 6
TRAIN_S = 0.30
HOSTILE = '<script>alert("engine")</script>'
PHASES_S = {
    "pause": 0.02,
    "gather": 0.01,
    "pack": 0.015,
    "wire": 0.04,
    "verify": 0.01,
    "load": 0.02,
    "resume": 0.01,
    "total": 0.12,
}
CHECKED = {
    "violations": 1,
    "rules": [
        {
            "id": "S1",
            "words": "committed version rises by exactly 1",
            "status": "holds",
            "evaluations": 11,
            "violations": [],
            "note": "",
        },
        {
            "id": "S18",
            "words": "staleness at consumption <= bound",
            "status": "violated",
            "evaluations": 40,
            "violations": [{"message": "group <g7> is 5 > 4", "event_ids": ["trainer:90"], "t": 3.2}],
            "note": "",
        },
        {
            "id": "S8",
            "words": "all ranks of an engine switch between the same two steps",
            "status": "n.a.",
            "evaluations": 0,
            "violations": [],
            "note": "engines of one rank",
        },
    ],
}


@dataclass
class Truth:
    """What the run did, counted by the one who did it."""

    dispatched: int = 0
    consumed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    staleness_versions: list[int] = field(default_factory=list)
    staleness_steps: list[int] = field(default_factory=list)
    waited_s: float = 0.0
    committed: int = 0
    first_dispatch_t: float = 0.0
    last_completion_t: float = 0.0
    in_flight: int = 0
    queued: int = 0
    end_t: float = 0.0


@dataclass
class Sample:
    name: str
    group: str
    engine: str
    left_ticks: int
    tokens: int
    version: int = 0
    version_last: int = 0


@dataclass
class Group:
    name: str
    number: int
    samples: list[Sample]
    open: int = GENERATIONS


class Run:
    """``Run(seed).play()`` returns (records, truth). ``cut_t`` stops it like a killed process."""

    def __init__(self, seed: int = 0, engine_names: tuple[str, ...] = ("engine-0", "engine-1")) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.records: list[ev.Record] = []
        self.engines = engine_names
        actors = ("trainer", "worker", *engine_names)
        self.by = {name: ListRecorder(name, lambda: self.now, self.records) for name in actors}
        self.truth = Truth()
        self.version = self.steps_done = self.number = 0
        self.steps_at = {}
        self.samples: list[Sample] = []
        self.groups: dict[str, Group] = {}
        self.queue: list[Group] = []
        self.paused = False

    def emit(self, actor: str, event: ev.Event) -> None:
        self.by[actor].emit(event)

    def play(self, cut_t: float = float("inf")) -> tuple[list[ev.Record], Truth]:
        self._declare()
        self._sync()
        while self.steps_done < STEPS and self.now < cut_t:
            self._train(cut_t)
        self.truth.in_flight, self.truth.queued, self.truth.end_t = 0, 0, self.now
        if self.now >= cut_t:
            self.truth.in_flight = len(self.samples)
            alive = [group for group in self.groups.values() if group not in self.queue]
            landed = sum(GENERATIONS - group.open for group in alive)
            self.truth.queued = landed + GENERATIONS * len(self.queue)
        else:
            self._end()
        return self.records, self.truth

    def _declare(self) -> None:
        parameters = {"max_staleness": 4, "weight_sync_steps": SYNC_EVERY, "groups_per_step": GROUPS_PER_STEP}
        capabilities = {name: {"staged": True, "hashes": name == self.engines[0]} for name in self.engines}
        self.emit("trainer", ev.RunDeclared(seed=7, parameters=parameters, capabilities=capabilities))
        self.emit("trainer", ev.TermBegan(term=1, base_version=0, optimizer_step=0))
        self._evaluate(0.25)

    def _evaluate(self, accuracy: float) -> None:
        self.emit(
            "trainer",
            ev.Evaluated(
                split="heldout",
                accuracy=accuracy,
                optimizer_step=self.steps_done,
                version=self.version,
                prompts=64,
            ),
        )

    def _sync(self) -> None:
        version = self.version + 1
        names = {"term": 1, "version": version, "attempt": 1}
        self.steps_at[version] = self.steps_done
        self.emit(
            "trainer",
            ev.SyncBegan(**names, view=1, members=self.engines, optimizer_step=self.steps_done),
        )
        self._state("running", "pausing", version)
        self._tick(2)
        self.paused = True
        for name in self.engines:
            self.emit(name, ev.EnginePaused(engine=name, mode="keep", clear_cache=True))
        self._state("paused", "transferring", version)
        self._tick(7)
        for name in self.engines:
            self.emit(name, ev.WeightsActivated(engine=name, term=1, version=version, first_step=0))
            proof = "hash" if name == self.engines[0] else "structure"
            self.emit("trainer", ev.EngineProved(engine=name, **names, proof=proof, outcome="holds"))
            canary = "holds" if version % 5 else "inconclusive"
            self.emit(
                "trainer", ev.EngineProved(engine=name, **names, proof="canary", outcome=canary, gap=2e-6)
            )
        self._state("transferring", "loaded", version)
        self._tick(2)
        self.version = version
        self.truth.committed += 1
        self.emit("trainer", ev.VersionCommitted(**names, view=1, members=self.engines))
        self._state("loaded", "resuming", version)
        self._tick(1)
        self.paused = False
        for name in self.engines:
            self.emit(name, ev.EngineResumed(engine=name, term=1))
        self._state("resuming", "running", version)
        self.emit(
            "trainer",
            ev.SyncEnded(term=1, version=version, outcome="committed", phases_s=PHASES_S, nbytes=4_000_000),
        )

    def _state(self, before: str, after: str, version: int) -> None:
        self.emit("trainer", ev.StateChanged(term=1, version=version, attempt=1, before=before, after=after))

    def _train(self, cut_t: float) -> None:
        need = {"term": 1, "optimizer_step": self.steps_done + 1}
        waited_from = self.now
        if len(self.queue) < GROUPS_PER_STEP:
            self.emit(
                "trainer",
                ev.TrainerStarved(**need, have_groups=len(self.queue), need_groups=GROUPS_PER_STEP),
            )
        while len(self.queue) < GROUPS_PER_STEP:
            self._tick()
            if self.now >= cut_t:
                return
        self.truth.waited_s += self.now - waited_from
        batch, self.queue = self.queue[:GROUPS_PER_STEP], self.queue[GROUPS_PER_STEP:]
        names = tuple(group.name for group in batch)
        self.emit("trainer", ev.StepPlanned(**need, version=self.version, groups=names))
        for group in batch:
            self._consume(group)
        began = self.now
        self._tick(round(TRAIN_S / TICK_S))
        reward = min(0.95, 0.2 + 0.035 * self.steps_done + self.random.uniform(-0.05, 0.05))
        self.truth.rewards.append(reward)
        self.emit(
            "trainer",
            ev.OptimizerStepApplied(
                **need,
                version=self.version,
                loss=0.1 - 0.004 * self.steps_done,
                reward_mean=reward,
                grad_norm=1.0,
                tokens=sum(sample.tokens for group in batch for sample in group.samples),
                duration_s=self.now - began,
                wait_s=began - waited_from,
            ),
        )
        self.steps_done += 1
        if self.steps_done % SYNC_EVERY == 0:
            self._sync()
            gap = 1e-6 * (1 + self.version % 3)
            self.emit(
                "trainer",
                ev.LogprobGapMeasured(version=self.version, gap_max=gap, gap_mean=gap / 4, tokens=512),
            )
        if self.steps_done % 5 == 0:
            self._evaluate(0.25 + 0.03 * self.steps_done)

    def _consume(self, group: Group) -> None:
        self.emit("trainer", ev.GroupTaken(term=1, group=group.name))
        firsts = tuple(sample.version for sample in group.samples)
        self.emit(
            "trainer",
            ev.GroupConsumed(
                term=1,
                group=group.name,
                number=group.number,
                prompt_index=group.number,
                samples=tuple(sample.name for sample in group.samples),
                versions_first=firsts,
                versions_last=tuple(sample.version_last for sample in group.samples),
                version=self.version,
                optimizer_step=self.steps_done + 1,
                optimizer_step_first=self.steps_at[min(firsts)],
            ),
        )
        self.truth.consumed += len(group.samples)
        self.truth.staleness_versions += [self.version - first for first in firsts]
        self.truth.staleness_steps += [self.steps_done - self.steps_at[first] for first in firsts]
        del self.groups[group.name]

    def _tick(self, ticks: int = 1) -> None:
        for _ in range(ticks):
            self._admit()
            self.now = round(self.now + TICK_S, 6)
            if not self.paused and self.version:
                for name in self.engines:
                    self._decode(name)

    def _admit(self) -> None:
        if not self.version or self.paused:
            return
        while sum(group.open > 0 for group in self.groups.values()) < MAX_IN_FLIGHT_GROUPS:
            if len(self.queue) >= 5:
                return
            name = f"g{self.number}"
            group = Group(name, self.number, [])
            self.number += 1
            for index in range(GENERATIONS):
                tokens = self.random.randint(20, 90)
                engine = self.engines[index % len(self.engines)]
                sample = Sample(f"{name}.{index}", name, engine, tokens, tokens, self.version)
                group.samples.append(sample)
                self.samples.append(sample)
                self.emit(
                    "worker",
                    ev.SampleDispatched(
                        term=1, sample=sample.name, group=name, engine=engine, version=self.version
                    ),
                )
                self.truth.dispatched += 1
                self.truth.first_dispatch_t = self.truth.first_dispatch_t or self.now
            self.groups[name] = group

    def _decode(self, engine: str) -> None:
        running = [sample for sample in self.samples if sample.engine == engine][:10]
        if not running:
            return
        self.emit(
            engine,
            ev.ModelStep(
                engine=engine,
                first_step=0,
                last_step=0,
                version=self.version,
                term=1,
                sequences=len(running),
                prefill_tokens=0,
                decode_tokens=len(running),
                began_seq=0,
                duration_s=TICK_S,
            ),
        )
        for sample in running:
            sample.left_ticks -= 1
            sample.version_last = self.version
            if sample.left_ticks == 0:
                self._complete(sample)

    def _complete(self, sample: Sample) -> None:
        self.samples.remove(sample)
        self.truth.tokens += sample.tokens
        self.truth.last_completion_t = self.now
        self.emit(
            "worker",
            ev.SampleCompleted(
                term=1,
                sample=sample.name,
                group=sample.group,
                engine=sample.engine,
                finish_reason="stop",
                tokens=sample.tokens,
                logprobs=sample.tokens,
                logprobs_finite=True,
                spans=((1, sample.version, 0, sample.tokens),),
            ),
        )
        group = self.groups[sample.group]
        group.open -= 1
        if group.open == 0:
            self._finish(group)

    def _finish(self, group: Group) -> None:
        if group.number in (7, 19):
            self._drop(group, "reward_failed" if group.number == 7 else "stale")
            return
        rewards = tuple(self.random.random() for _ in group.samples)
        self.emit("worker", ev.GroupScored(term=1, group=group.name, rewards=rewards))
        self.queue.append(group)
        self.emit(
            "worker",
            ev.GroupQueued(term=1, group=group.name, number=group.number, depth=len(self.queue)),
        )

    def _drop(self, group: Group, reason: str) -> None:
        names = tuple(sample.name for sample in group.samples)
        self.truth.dropped[reason] = self.truth.dropped.get(reason, 0) + len(names)
        self.emit(
            "worker",
            ev.GroupDropped(
                term=1, group=group.name, prompt_index=group.number, samples=names, reason=reason
            ),
        )
        del self.groups[group.name]

    def _end(self) -> None:
        for group in list(self.groups.values()):
            self._drop(group, "shutdown")
        self.emit("trainer", ev.RunEnded(outcome="clean"))


def synthetic(seed: int = 0, cut_t: float = float("inf")) -> tuple[list[ev.Record], Truth]:
    return Run(seed).play(cut_t)
