"""The syncs of a valid run, written event by event, as whoever takes part in them tells of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import trace_builder

from grpo_lab import events as ev
from grpo_lab.events import Event, Record
from grpo_lab.recorders import ListRecorder

PARAMETERS: dict[str, Any] = {
    **trace_builder.PARAMETERS,
    "staleness_policy": "admission",
    "groups_per_step": 2,
    "queue_capacity": 8,
    "max_inflight_tasks": 16,
}
ABLE = trace_builder.CAPABILITIES
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


class Syncs:
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
