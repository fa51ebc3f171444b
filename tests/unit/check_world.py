"""Whole valid runs, written event by event in several shapes, to be checked as they are or after an edit.

Written from what the rules say, not from how the checker or the protocol does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from grpo_lab import events as ev
from grpo_lab.check import CheckResult, check_records
from grpo_lab.events import Event, Record
from grpo_lab.recorders import ListRecorder

PARAMETERS: dict[str, Any] = {
    "max_staleness": 1,
    "max_staleness_steps": None,
    "weight_sync_steps": 1,
    "staleness_policy": "admission",
    "window": 1,
    "groups_per_step": 2,
    "num_generations": 2,
    "queue_capacity": 8,
    "ring_slots": 2,
    "max_inflight_tasks": 16,
    "pause_mode": "keep",
    "clear_cache": True,
    "scope": "global",
    "min_engines": 1,
    "sync_attempts": 3,
    "logprob_tolerance": 1e-4,
    "batch_invariant": False,
    "heartbeat_stale_after_s": 60.0,
    "liveness_bound_s": 120.0,
    "initial_version": 1,
    "final_sync": False,
}
ABLE = dict.fromkeys(
    ("staged", "hashes", "token_versions", "term_fencing", "score_while_paused", "events"), True
)
STOCK = {**dict.fromkeys(ABLE, False), "token_versions": True}
NBYTES = (1000, 600)
TOKENS = 8


@dataclasses.dataclass
class Engine:
    name: str
    events: bool
    version: tuple[int, int] = (0, 0)
    step: int = 1
    fenced: bool = False


class World:
    """Its methods each emit what one thing that happens looks like; ``records`` is the trace."""

    def __init__(self, engines: int = 2, stock: bool = False, **parameters: Any) -> None:
        self.now = 0.0
        self.records: list[Record] = []
        self.by: dict[str, ListRecorder] = {}
        self.engines = [Engine(f"engine-{index}", events=not stock) for index in range(engines)]
        self.stock = stock
        self.parameters = {**PARAMETERS, **parameters}
        self.term = self.version = self.steps = self.number = self.prompt = self.view = 0
        self.admitted_in_term = 0
        self.ready: list[dict[str, Any]] = []
        self.prompts_done: set[int] = set()
        self.others: list[str] = []  # members that the run must stop besides engines and worker
        able = STOCK if stock else ABLE
        capabilities = {engine.name: dict(able) for engine in self.engines}
        self.emit("run", ev.RunDeclared(world="sim", parameters=self.parameters, capabilities=capabilities))
        for engine in self.engines:
            self.emit("run", ev.MemberStarted(member=engine.name, role="engine"))

    # -- recording -----------------------------------------------------------------------------------

    def emit(self, actor: str, event: Event, after: str = "") -> str:
        """``after`` names an actor whose newest event this actor has just heard of."""
        recorder = self.by.setdefault(actor, ListRecorder(actor, lambda: self.now, self.records))
        if after and after in self.by:
            recorder.observe(self.by[after].last_id)
        self.now = round(self.now + 0.01, 6)
        return recorder.emit(event)

    @property
    def live(self) -> list[Engine]:
        return [engine for engine in self.engines if not engine.fenced]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(engine.name for engine in self.live)

    # -- terms and syncs -------------------------------------------------------------------------------

    def begin_term(self, checkpoint: dict[str, Any] | None = None) -> None:
        self.term += 1
        self.admitted_in_term = 0
        if checkpoint is not None:
            self.version, self.steps = checkpoint["version"], checkpoint["optimizer_step"]
            low, done = checkpoint["prompt_low_water"], checkpoint["prompts_done"]
            self.prompts_done = set(range(low)) | set(done)
        self.number = 0
        low, done = self.cursor()
        self.prompt = low
        self.emit(
            "trainer",
            ev.TermBegan(
                term=self.term,
                base_version=self.version,
                optimizer_step=self.steps,
                prompt_low_water=low,
                prompts_done=done,
                checkpoint=checkpoint["checkpoint"] if checkpoint else "",
                restored_weights_hash=checkpoint["weights_hash"] if checkpoint else "",
            ),
            after="run",
        )
        self.declare_view()
        self.emit("trainer", ev.ResourceOpened(resource=f"ring-{self.term}", nbytes=2000))
        for engine in self.live:
            self.emit("trainer", ev.HandshakeCompared(engine=engine.name, ours="plan", theirs="plan"))
        self.state("disconnected", "running")

    def declare_view(self) -> None:
        self.view += 1
        self.emit("trainer", ev.ViewChanged(view=self.view, members=self.names))

    def state(self, before: str, after: str, attempt: int = 0) -> None:
        self.emit(
            "trainer",
            ev.StateChanged(
                term=self.term, version=self.version, attempt=attempt, before=before, after=after
            ),
        )

    def sync(self, failures: int = 0, fence: str = "") -> None:
        """``failures`` attempts fail at engine-1's second bucket; ``fence`` is given up after them."""
        version = self.version + 1
        mode = self.parameters["pause_mode"]
        self.emit(
            "trainer",
            ev.SyncBegan(
                term=self.term,
                version=version,
                attempt=1,
                view=self.view,
                members=self.names,
                scope=self.parameters["scope"],
                pause_mode=mode,
                optimizer_step=self.steps,
            ),
        )
        self.state("running", "pausing")
        for engine in self.live:
            self.pause(engine, mode)
        self.state("pausing", "paused")
        for attempt in range(1, failures + 1):
            self.attempt(version, attempt, fails=True)
        if fence:
            next(engine for engine in self.engines if engine.name == fence).fenced = True
            self.emit("trainer", ev.EngineFenced(engine=fence, reason="refuses", term=self.term))
            self.declare_view()
        self.attempt(version, failures + 1)
        self.commit(version, failures + 1)
        self.state("loaded", "resuming")
        for engine in self.live:
            self.resume(engine)
        self.state("resuming", "running")
        self.sync_ended(version, "committed")

    def commit(self, version: int, attempt: int) -> None:
        self.version = version
        self.emit(
            "trainer",
            ev.VersionCommitted(
                term=self.term,
                version=version,
                attempt=attempt,
                view=self.view,
                members=self.names,
                optimizer_step=self.steps,
            ),
        )

    def sync_ended(self, version: int, outcome: str) -> None:
        phases_s = {"pause": 0.01 * (version % 3 + 1), "wire": 0.02, "resume": 0.003 * (version % 4 + 1)}
        phases_s["total"] = sum(phases_s.values()) + 0.001 * (version % 5)
        self.emit(
            "trainer", ev.SyncEnded(term=self.term, version=version, outcome=outcome, phases_s=phases_s)
        )
        for engine in self.live:
            self.emit("trainer", ev.MemoryMeasured(member=engine.name, resident_bytes=10**8 + version % 7))

    def acknowledged(self, engine: Engine, call: str, version: int, attempt: int) -> None:
        self.emit(
            "trainer",
            ev.EngineAcknowledged(
                engine=engine.name, call=call, term=self.term, version=version, attempt=attempt
            ),
            after=engine.name,
        )

    def pause(self, engine: Engine, mode: str = "keep") -> None:
        if engine.events:
            self.emit(engine.name, ev.CacheCleared(engine=engine.name, cache="kv"), after="trainer")
            self.emit(
                engine.name,
                ev.EnginePaused(engine=engine.name, mode=mode, clear_cache=True, term=self.term),
            )
        self.acknowledged(engine, "pause", self.version + 1, 1)

    def resume(self, engine: Engine) -> None:
        if engine.events:
            self.emit(engine.name, ev.EngineResumed(engine=engine.name, term=self.term), after="trainer")
        self.acknowledged(engine, "resume", self.version, 1)

    def attempt(self, version: int, attempt: int, fails: bool = False) -> None:
        place = {"term": self.term, "version": version, "attempt": attempt}
        hashes = tuple(1000 * self.term + 10 * version + bucket for bucket in range(len(NBYTES)))
        self.state("paused", "transferring", attempt)
        for engine in self.live:
            if engine.events:
                self.emit(engine.name, ev.UpdateStarted(engine=engine.name, **place), after="trainer")
            self.acknowledged(engine, "start", version, attempt)
        for bucket, nbytes in enumerate(NBYTES):
            slot = {"bucket": bucket, "slot": bucket % 2}
            self.emit("trainer", ev.GatherBegan(**place, bucket=bucket))
            self.emit("trainer", ev.GatherEnded(**place, bucket=bucket))
            self.emit("trainer", ev.BucketPackBegan(**place, **slot))
            self.emit("trainer", ev.BucketPacked(**place, **slot, nbytes=nbytes, hash64=hashes[bucket]))
        self.emit(
            "trainer",
            ev.WeightsPublished(
                **place, plan_digest="plan", tensors=9, bucket_nbytes=NBYTES, bucket_hashes=hashes
            ),
        )
        for engine in self.live:
            self.receive(engine, place, hashes, damaged=fails and engine is self.live[-1])
        for bucket in range(len(NBYTES)):
            self.emit("trainer", ev.SlotReleased(slot=bucket % 2, bucket=bucket), after=self.live[-1].name)
        if fails:
            self.emit("trainer", ev.SyncAborted(**place, reason="bucket 1 is corrupt"))
            self.state("transferring", "paused", attempt)
            for engine in self.live[:-1]:
                self.abandon(engine, place)
            return
        for engine in self.live:
            self.load(engine, place)
        for engine in self.live:
            self.prove(engine, place)
        self.state("transferring", "loaded", attempt)

    def abandon(self, engine: Engine, place: dict[str, int]) -> None:
        if engine.events:
            failed = ev.UpdateFailed(engine=engine.name, **place, reason="abandoned")
            self.emit(engine.name, failed, after="trainer")

    def receive(
        self, engine: Engine, place: dict[str, int], hashes: Sequence[int], damaged: bool = False
    ) -> None:
        if not engine.events:
            self.acknowledged(engine, "update", place["version"], place["attempt"])
            return
        for bucket, nbytes in enumerate(NBYTES):
            broken = damaged and bucket == 1
            self.emit(
                engine.name,
                ev.BucketReceived(
                    engine=engine.name,
                    **place,
                    bucket=bucket,
                    nbytes=nbytes,
                    hash64=hashes[bucket] ^ broken,
                    expected_hash64=hashes[bucket],
                    accepted=not broken,
                ),
                after="trainer",
            )
        if damaged:
            self.emit(engine.name, ev.UpdateFailed(engine=engine.name, **place, reason="corrupt"))
            self.emit(
                "trainer",
                ev.EngineFailed(engine=engine.name, call="update", detail="corrupt", status=500),
                after=engine.name,
            )
        else:
            self.acknowledged(engine, "update", place["version"], place["attempt"])

    def load(self, engine: Engine, place: dict[str, int]) -> None:
        if engine.events:
            weights = {"engine": engine.name, "term": place["term"], "version": place["version"]}
            digest = f"weights-{place['term']}-{place['version']}"
            self.emit(engine.name, ev.WeightWriteBegan(**weights), after="trainer")
            self.emit(engine.name, ev.WeightWriteEnded(**weights))
            self.emit(
                engine.name,
                ev.WeightsLoaded(
                    **weights,
                    attempt=place["attempt"],
                    hashes_verified=True,
                    buckets=len(NBYTES),
                    weights_hash=digest,
                ),
            )
            self.emit(
                engine.name, ev.WeightsActivated(**weights, first_step=engine.step, weights_hash=digest)
            )
        engine.version = (place["term"], place["version"])
        self.acknowledged(engine, "finish", place["version"], place["attempt"])

    def prove(self, engine: Engine, place: dict[str, int]) -> None:
        proof = "structure" if self.stock else "hash"
        self.emit("trainer", ev.EngineProved(engine=engine.name, **place, proof=proof, outcome="holds"))
        self.emit(
            "trainer",
            ev.EngineProved(
                engine=engine.name,
                **place,
                proof="canary",
                outcome="holds",
                gap=1e-6,
                separation=0.1,
                tolerance=1e-3,
            ),
        )

    # -- rollouts ----------------------------------------------------------------------------------------

    def group(self, engine: Engine | None = None, queued: bool = True) -> dict[str, Any]:
        """One group from admission to the queue."""
        engine = engine or self.live[self.number % len(self.live)]
        group = self.admit()
        for sample in group["samples"]:
            self.dispatch(group, sample, engine)
        for sample in group["samples"]:
            self.generate(group, sample, engine)
        rewards = (0.0, 1.0)
        self.emit("worker", ev.GroupScored(term=self.term, group=group["group"], rewards=rewards))
        if queued:
            self.ready.append(group)
            self.emit(
                "worker",
                ev.GroupQueued(
                    term=self.term, group=group["group"], number=group["number"], depth=len(self.ready)
                ),
            )
        return group

    def admit(self) -> dict[str, Any]:
        while self.prompt in self.prompts_done:
            self.prompt += 1
        name = f"t{self.term}.g{self.number}"
        samples = tuple(f"{name}.s{index}" for index in range(2))
        group = {"group": name, "number": self.number, "prompt_index": self.prompt, "samples": samples}
        self.number += 1
        self.prompt += 1
        self.admitted_in_term += 1
        self.emit(
            "worker",
            ev.GroupAdmitted(
                term=self.term, **group, version=self.version, admitted=self.admitted_in_term, running=1
            ),
            after="trainer",
        )
        return group

    def dispatch(self, group: dict[str, Any], sample: str, engine: Engine) -> None:
        self.emit(
            "worker",
            ev.SampleDispatched(
                term=self.term,
                sample=sample,
                group=group["group"],
                engine=engine.name,
                version=self.version,
                request=sample,
            ),
        )
        if engine.events:
            self.request_admitted(sample, engine)

    def request_admitted(self, request: str, engine: Engine, kind: str = "rollout") -> None:
        self.emit(
            engine.name,
            ev.RequestAdmitted(
                engine=engine.name,
                request=request,
                request_kind=kind,
                prompt_tokens=5,
                weight_version=engine.version[1],
                term=engine.version[0],
                request_term=self.term,
            ),
            after="worker",
        )

    def generate(self, group: dict[str, Any], sample: str, engine: Engine) -> None:
        """All tokens under the active version."""
        group.setdefault("first", {})[sample] = engine.version[1]
        group.setdefault("last", {})[sample] = engine.version[1]
        if engine.events:
            span = self.decode(engine, 0, TOKENS)
            self.request_finished(sample, engine, "stop", TOKENS, (span,))
        self.completed(group, sample, engine, ((*engine.version, 0, TOKENS),))

    def decode(self, engine: Engine, start: int, end: int) -> tuple[int, ...]:
        first, engine.step = engine.step, engine.step + end - start
        recorder = self.by[engine.name]
        began_seq = recorder.next_seq
        self.emit(
            engine.name,
            ev.ModelStep(
                engine=engine.name,
                first_step=first,
                last_step=engine.step - 1,
                version=engine.version[1],
                term=engine.version[0],
                sequences=1,
                prefill_tokens=0,
                decode_tokens=end - start,
                began_seq=began_seq,
            ),
        )
        return (*engine.version, start, end, first, engine.step - 1)

    def request_finished(
        self, request: str, engine: Engine, reason: str, tokens: int, spans: tuple[tuple[int, ...], ...]
    ) -> None:
        kv_version = min((span[1] for span in spans), default=None)
        self.emit(
            engine.name,
            ev.RequestFinished(
                engine=engine.name,
                request=request,
                finish_reason=reason,
                tokens=tokens,
                spans=spans,
                kv_version=kv_version,
            ),
        )

    def completed(
        self, group: dict[str, Any], sample: str, engine: Engine, spans: tuple[tuple[int, ...], ...]
    ) -> None:
        tokens = spans[-1][3]
        self.emit(
            "worker",
            ev.SampleCompleted(
                term=self.term,
                sample=sample,
                group=group["group"],
                engine=engine.name,
                finish_reason="stop",
                tokens=tokens,
                logprobs=tokens,
                logprobs_finite=True,
                spans=spans,
            ),
            after=engine.name,
        )

    def drop(self, group: dict[str, Any], reason: str, actor: str = "worker") -> None:
        if reason not in ("shutdown", "term_ended"):
            self.prompts_done.add(group["prompt_index"])
        names = {key: group[key] for key in ("group", "prompt_index", "samples")}
        self.emit(actor, ev.GroupDropped(term=self.term, **names, reason=reason))

    # -- training ------------------------------------------------------------------------------------------

    def step(self) -> None:
        """An optimizer step over the first two groups of the queue."""
        groups, self.ready = self.ready[:2], self.ready[2:]
        for group in groups:
            self.emit("trainer", ev.GroupTaken(term=self.term, group=group["group"]), after="worker")
        names = tuple(group["group"] for group in groups)
        place = {"term": self.term, "optimizer_step": self.steps, "version": self.version}
        self.emit("trainer", ev.StepPlanned(**place, groups=names))
        for group in groups:
            self.consume(group)
        self.emit("trainer", ev.MicroBatchBegan(**place, rank=0, micro_batch=0, groups=names, samples=4))
        self.emit(
            "trainer", ev.LogprobGapMeasured(version=self.version, gap_max=1e-6, gap_mean=1e-7, tokens=32)
        )
        self.emit("trainer", ev.OptimizerStepApplied(**place, loss=0.1, tokens=32, reward_mean=0.5))
        self.prompts_done |= {group["prompt_index"] for group in groups}
        self.steps += 1

    def consume(self, group: dict[str, Any]) -> None:
        firsts = tuple(group["first"][sample] for sample in group["samples"])
        lasts = tuple(group["last"][sample] for sample in group["samples"])
        self.emit(
            "trainer",
            ev.GroupConsumed(
                term=self.term,
                **{key: group[key] for key in ("group", "number", "prompt_index", "samples")},
                versions_first=firsts,
                versions_last=lasts,
                version=self.version,
                optimizer_step=self.steps,
                correction="tis",
                correction_versions=tuple(sorted({*firsts, *lasts})),
            ),
        )

    def cursor(self) -> tuple[int, tuple[int, ...]]:
        low = 0
        while low in self.prompts_done:
            low += 1
        return low, tuple(sorted(item for item in self.prompts_done if item > low))

    def checkpoint(self) -> dict[str, Any]:
        low, done = self.cursor()
        saved = {
            "checkpoint": f"checkpoint-{self.steps}",
            "version": self.version,
            "optimizer_step": self.steps,
            "prompt_low_water": low,
            "prompts_done": done,
            "weights_hash": f"hash-{self.steps}",
        }
        self.emit("trainer", ev.CheckpointSaved(term=self.term, **saved))
        return saved

    def start_worker(self) -> None:
        self.emit("trainer", ev.MemberStarted(member="worker", role="worker"))
        self.emit("worker", ev.Heartbeat(member="worker", progress=0), after="trainer")

    def stop_worker(self) -> None:
        for group in self.ready:
            self.drop(group, "shutdown", "trainer")
        self.ready = []
        self.emit("trainer", ev.MemberStopped(member="worker"), after="worker")
        self.emit("trainer", ev.ResourceClosed(resource=f"ring-{self.term}"))
        self.state("running", "disconnected")

    def end(self) -> None:
        self.emit("worker", ev.Heartbeat(member="worker", progress=self.number))
        self.stop_worker()
        for member in (*(engine.name for engine in self.engines), *self.others):
            self.emit("run", ev.MemberStopped(member=member), after="trainer")
        self.emit("run", ev.RunEnded(outcome="clean"))

    def rounds(self, count: int, **first_sync: Any) -> None:
        """Groups, a step and a sync, ``count`` times; the first sync takes the options."""
        for number in range(count):
            self.emit("worker", ev.Heartbeat(member="worker", progress=self.number))
            self.group()
            self.group()
            self.step()
            self.sync(**(first_sync if number == 0 else {}))


# -- shapes ------------------------------------------------------------------------------------------------


def fresh_run(**options: Any) -> World:
    world = World(**options)
    world.begin_term()
    world.sync()
    world.start_worker()
    world.rounds(3)
    return world


def finished(world: World) -> World:
    world.end()
    return world


def resumed_run() -> World:
    """The trainer dies two steps after a checkpoint; the next term goes back to it."""
    world = World()
    world.begin_term()
    world.sync()
    world.start_worker()
    world.rounds(2)
    saved = world.checkpoint()
    world.rounds(1)
    lost = world.group()
    world.ready.remove(lost)
    world.drop(lost, "shutdown")
    world.emit("run", ev.MemberDied(member="trainer", detail="killed"), after="trainer")
    world.emit("run", ev.MemberStopped(member="worker"), after="worker")
    world.emit("run", ev.MemberStarted(member="trainer", role="trainer", incarnation=2))
    world.others.append("trainer")
    world.begin_term(saved)
    world.sync()
    world.start_worker()
    world.rounds(2)
    return world


def trained_twice() -> World:
    world = World()
    for _ in range(2):
        world.begin_term()
        world.sync()
        world.start_worker()
        world.rounds(2)
        world.stop_worker()
    world.begin_term()
    world.sync()
    world.start_worker()
    return world


def retried_sync() -> World:
    world = World()
    world.begin_term()
    world.sync(failures=2)
    world.start_worker()
    world.rounds(2, failures=1)
    return world


def fenced_engine() -> World:
    world = World(engines=3)
    world.begin_term()
    world.sync()
    world.start_worker()
    world.rounds(3, failures=2, fence="engine-2")
    return world


def aborted_sync() -> World:
    """Every attempt fails: all run on with the previous version, and the next sync takes the same number."""
    world = fresh_run()
    version = world.version + 1
    world.emit(
        "trainer",
        ev.SyncBegan(
            term=1, version=version, attempt=1, view=1, members=world.names, optimizer_step=world.steps
        ),
    )
    world.state("running", "pausing")
    for engine in world.live:
        world.pause(engine)
    world.state("pausing", "paused")
    world.attempt(version, 1, fails=True)
    place = {"term": 1, "version": version, "attempt": 1}
    world.emit("trainer", ev.SyncAborted(**place, reason="corrupt", final=True), after="engine-0")
    world.state("paused", "aborting")
    world.state("aborting", "resuming")
    for engine in world.live:
        world.resume(engine)
    world.state("resuming", "running")
    world.sync_ended(version, "aborted")
    world.rounds(2)
    return world


def pause_in_the_middle() -> World:
    """Requests frozen by keep decode on under the new version: two spans a sample."""
    world = fresh_run()
    group = world.admit()
    engine = world.engines[0]
    spans: dict[str, list[tuple[int, ...]]] = {}
    for sample in group["samples"]:
        world.dispatch(group, sample, engine)
    for sample in group["samples"]:
        group.setdefault("first", {})[sample] = engine.version[1]
        spans[sample] = [world.decode(engine, 0, 3)]
    held = len(group["samples"])
    world.group(world.engines[1])
    other = world.group(world.engines[1])
    assert other["number"] > group["number"]
    with_counts(world, engine, running=held)
    for sample in group["samples"]:
        group.setdefault("last", {})[sample] = engine.version[1]
        spans[sample].append(world.decode(engine, 3, TOKENS))
        rows = tuple(spans[sample])
        world.request_finished(sample, engine, "stop", TOKENS, rows)
        world.completed(group, sample, engine, tuple(row[:4] for row in rows))
    world.emit("worker", ev.GroupScored(term=1, group=group["group"], rewards=(0.0, 1.0)))
    world.ready.insert(0, group)
    world.emit("worker", ev.GroupQueued(term=1, group=group["group"], number=group["number"], depth=3))
    world.step()
    world.sync()
    return world


def with_counts(world: World, engine: Engine, running: int) -> None:
    """A sync during which ``engine`` holds ``running`` requests."""
    place = len(world.records)
    world.sync()
    for index in range(place, len(world.records)):
        record = world.records[index]
        if isinstance(record.event, ev.EnginePaused) and record.event.engine == engine.name:
            event = dataclasses.replace(record.event, running=running)
            world.records[index] = dataclasses.replace(record, event=event)


def aborted_and_continued() -> World:
    """pause(abort) returns requests with their partial tokens; the worker takes them up again."""
    world = fresh_run(pause_mode="abort")
    group = world.admit()
    engine = world.engines[0]
    for sample in group["samples"]:
        world.dispatch(group, sample, engine)
    parts: dict[str, list[tuple[int, ...]]] = {}
    for sample in group["samples"]:
        group.setdefault("first", {})[sample] = engine.version[1]
        parts[sample] = [world.decode(engine, 0, 3)]
    place = len(world.records)
    world.sync()
    pause = next(
        index
        for index in range(place, len(world.records))
        if isinstance(world.records[index].event, ev.EnginePaused)
        and world.records[index].event.engine == engine.name
    )
    insert_aborts(world, pause, engine, group, parts)
    for sample in group["samples"]:
        request = f"{sample}.c1"
        world.request_admitted(request, engine)
        row = world.decode(engine, 0, 5)
        world.request_finished(request, engine, "stop", 5, (row,))
        group.setdefault("last", {})[sample] = engine.version[1]
        first = parts[sample][0]
        world.completed(group, sample, engine, (first[:4], (row[0], row[1], 3, TOKENS)))
    world.emit("worker", ev.GroupScored(term=1, group=group["group"], rewards=(0.0, 1.0)))
    world.ready.append(group)
    world.emit("worker", ev.GroupQueued(term=1, group=group["group"], number=group["number"], depth=1))
    world.group()
    world.step()
    world.sync()
    return world


def insert_aborts(
    world: World, pause: int, engine: Engine, group: dict[str, Any], parts: dict[str, list[tuple[int, ...]]]
) -> None:
    """The engine's answers to the aborted requests, just before its pause is told."""
    told = world.records[pause]
    inserted = [
        Record(
            told.t,
            engine.name,
            0,
            (),
            ev.RequestFinished(
                engine=engine.name,
                request=sample,
                finish_reason="abort",
                tokens=3,
                spans=(parts[sample][0],),
                kv_version=parts[sample][0][1],
            ),
        )
        for sample in group["samples"]
    ]
    event = dataclasses.replace(told.event, aborted=tuple(group["samples"]))  # type: ignore[arg-type]
    world.records[pause] = dataclasses.replace(told, event=event)
    world.records[pause:pause] = inserted
    renumber(world, engine.name)


def renumber(world: World, actor: str) -> None:
    """Gives the actor's records their numbers again, and everything that refers to them follows."""
    new: dict[int, int] = {}
    seq = 0
    for index, record in enumerate(world.records):
        if record.actor == actor:
            if record.cause or record.seq or not new:
                new.setdefault(record.seq, seq)
            world.records[index] = dataclasses.replace(record, seq=seq)
            seq += 1
    shift = sorted(new.items())

    def moved(old: int) -> int:
        return max((after for before, after in shift if before <= old), default=old)

    for index, record in enumerate(world.records):
        cause = tuple(
            f"{actor}:{moved(int(item.rpartition(':')[2]))}" if item.rpartition(":")[0] == actor else item
            for item in record.cause
        )
        event = record.event
        if isinstance(event, ev.ModelStep) and record.actor == actor:
            event = dataclasses.replace(event, began_seq=record.seq)
        world.records[index] = dataclasses.replace(record, cause=cause, event=event)
    recorder = world.by[actor]
    recorder._next_seq = seq


def rolling_run() -> World:
    """Engine by engine: while one takes the new version, the other serves the old one."""
    world = World(scope="rolling")
    world.begin_term()
    world.sync()
    world.start_worker()
    world.rounds(1)
    world.group()
    world.group()
    world.step()
    version = world.version + 1
    world.emit(
        "trainer",
        ev.SyncBegan(
            term=1, version=version, attempt=1, view=1, members=world.names, scope="rolling", optimizer_step=2
        ),
    )
    place = {"term": 1, "version": version, "attempt": 1}
    hashes = tuple(1000 + 10 * version + bucket for bucket in range(2))
    for engine in world.engines:
        world.pause(engine)
        world.emit(engine.name, ev.UpdateStarted(engine=engine.name, **place), after="trainer")
        if engine is world.engines[0]:
            for bucket, nbytes in enumerate(NBYTES):
                slot = {"bucket": bucket, "slot": bucket}
                world.emit("trainer", ev.BucketPackBegan(**place, **slot))
                packed = ev.BucketPacked(**place, **slot, nbytes=nbytes, hash64=hashes[bucket])
                world.emit("trainer", packed)
            world.emit(
                "trainer",
                ev.WeightsPublished(
                    **place, plan_digest="plan", tensors=9, bucket_nbytes=NBYTES, bucket_hashes=hashes
                ),
            )
        world.receive(engine, place, hashes)
        world.load(engine, place)
        world.prove(engine, place)
        world.resume(engine)
    for bucket in range(2):
        world.emit("trainer", ev.SlotReleased(slot=bucket, bucket=bucket))
    world.commit(version, 1)
    world.sync_ended(version, "committed")
    return world


def restarted_engine() -> World:
    world = fresh_run()
    engine = world.engines[1]
    world.emit("run", ev.MemberDied(member=engine.name, detail="killed"))
    world.emit("trainer", ev.EngineFenced(engine=engine.name, reason="dead", term=1), after="run")
    engine.fenced = True
    world.declare_view()
    world.rounds(1)
    world.emit("run", ev.MemberStarted(member=engine.name, role="engine", incarnation=2))
    engine.fenced, engine.version, engine.step = False, (0, 0), 1
    world.declare_view()
    world.emit("trainer", ev.HandshakeCompared(engine=engine.name, ours="plan", theirs="plan"))
    world.group(world.engines[0])
    world.group(world.engines[0])
    world.step()
    world.sync()
    world.rounds(1)
    return world


def stock_engines() -> World:
    """Engines that write no events: only what their clients saw of them is in the trace."""
    return fresh_run(stock=True)


def foreign_trainer() -> list[Record]:
    """Another trainer's log: no parameters, no engines' events, commits and consumption only."""
    records = [
        Record(
            0.0, "log", 0, (), ev.RunDeclared(world="real", engine="other", parameters={"max_staleness": 2})
        )
    ]
    place = {"term": 1, "attempt": 1, "view": 1, "members": ("http://engine",)}
    for version in range(1, 4):
        records.append(
            Record(float(version), "log", len(records), (), ev.VersionCommitted(version=version, **place))
        )
        records.append(
            Record(
                version + 0.5,
                "log",
                len(records),
                (),
                ev.GroupConsumed(
                    term=1,
                    group=f"g{version}",
                    number=version,
                    prompt_index=version,
                    samples=(f"s{version}",),
                    versions_first=(max(1, version - 1),),
                    versions_last=(version,),
                    version=version,
                    optimizer_step=version,
                ),
            )
        )
    return records


SHAPES: dict[str, Callable[[], World]] = {
    "fresh run": fresh_run,
    "one engine": lambda: fresh_run(engines=1),
    "resumed with a higher term": resumed_run,
    "trained twice": trained_twice,
    "retried sync": retried_sync,
    "fenced engine": fenced_engine,
    "aborted sync": aborted_sync,
    "pause in the middle": pause_in_the_middle,
    "aborted and continued": aborted_and_continued,
    "rolling scope": rolling_run,
    "restarted engine": restarted_engine,
    "stock engines": stock_engines,
}


# -- edits -------------------------------------------------------------------------------------------------


def edited(world: World, kind: type[Event], nth: int = 0, **changes: Any) -> list[Record]:
    """The trace with fields of the nth event of a kind changed (negative: from the end)."""
    places = [index for index, record in enumerate(world.records) if isinstance(record.event, kind)]
    records = list(world.records)
    record = records[places[nth]]
    records[places[nth]] = dataclasses.replace(record, event=dataclasses.replace(record.event, **changes))
    return records


def without(world: World, kind: type[Event], nth: int | None = None) -> list[Record]:
    """The trace without the nth event of a kind, or without all of them."""
    places = [index for index, record in enumerate(world.records) if isinstance(record.event, kind)]
    gone = set(places if nth is None else [places[nth]])
    return [record for index, record in enumerate(world.records) if index not in gone]


def repeated(world: World, kind: type[Event], nth: int = 0) -> list[Record]:
    """The trace with the nth event of a kind twice."""
    places = [index for index, record in enumerate(world.records) if isinstance(record.event, kind)]
    records = list(world.records)
    records.insert(places[nth], records[places[nth]])
    return records


def violated(records: Iterable[Record]) -> set[str]:
    return set(result(records).violated_ids)


class Checked:
    """A result with the ids of violated rules at hand."""

    def __init__(self, checked: CheckResult) -> None:
        self.checked = checked
        self.violated_ids = [rule.id for rule in checked.rules if rule.violation_count]

    def words(self) -> str:
        return "\n".join(
            f"{rule.id} x{rule.violation_count}: {rule.violations[0].message} {rule.violations[0].event_ids}"
            for rule in self.checked.rules
            if rule.violations
        )


def result(records: Iterable[Record]) -> Checked:
    return Checked(check_records(records))
