"""A clean run of one trainer and its engines, sync by sync; tests leave out, repeat or change a part."""

from __future__ import annotations

from typing import Any

from trace_builder import Trace, declared

from grpo_lab import events as ev

BUCKETS = 2
NBYTES = (64, 32)


def hashes(version: int) -> tuple[int, ...]:
    return tuple(version * 1000 + bucket for bucket in range(BUCKETS))


class SyncTrace(Trace):
    """Term 1, begun and connected. ``sync(version)`` is a whole sync; its parts are methods of their own."""

    def __init__(
        self, engines: tuple[str, ...] = ("engine-0",), without: tuple[str, ...] = (), **parameters: Any
    ):
        super().__init__(declared(engines=engines, without=without, **parameters))
        self.engines = engines
        self.has_events = "events" not in without
        self.term = 1
        self.view = 0
        self.attempt = 1
        self.step_of = dict.fromkeys(engines, 1)
        self.active = dict.fromkeys(engines, (0, 0))
        for engine in engines:
            self.emit("run", ev.MemberStarted(member=engine, role="engine"))
        self.begin_term(1, base_version=0)

    def of(self, version: int) -> dict[str, int]:
        return {"term": self.term, "version": version, "attempt": self.attempt}

    def engine_emit(self, engine: str, event: ev.Event) -> str:
        return self.emit(engine, event) if self.has_events else ""

    # -- the trainer ---------------------------------------------------------------------------------

    def begin_term(self, term: int, base_version: int, optimizer_step: int = 0, checkpoint: str = "") -> None:
        self.term = term
        self.emit(
            "trainer",
            ev.TermBegan(
                term=term, base_version=base_version, optimizer_step=optimizer_step, checkpoint=checkpoint
            ),
        )
        self.change_view(self.engines)
        for engine in self.engines:
            self.handshake(engine)

    def change_view(self, members: tuple[str, ...]) -> None:
        self.view += 1
        self.engines = members
        self.emit("trainer", ev.ViewChanged(view=self.view, members=members))

    def handshake(self, engine: str, difference: str = "", theirs: str = "plan") -> None:
        event = ev.HandshakeCompared(engine=engine, ours="plan", theirs=theirs, difference=difference)
        self.emit("trainer", event)

    def begin(self, version: int, **fields: Any) -> str:
        event = ev.SyncBegan(**self.of(version), view=self.view, members=self.engines, **fields)
        return self.emit("trainer", event)

    def pack(self, version: int, *, first: int = 0, release: bool = True) -> None:
        for bucket in range(first, BUCKETS):
            place = {**self.of(version), "bucket": bucket, "slot": bucket % 2}
            self.emit("trainer", ev.BucketPackBegan(**place))
            packed = ev.BucketPacked(**place, nbytes=NBYTES[bucket], hash64=hashes(version)[bucket])
            self.emit("trainer", packed)
            if release:
                self.emit("trainer", ev.SlotReleased(slot=bucket % 2, bucket=bucket))

    def publish(self, version: int, bucket_hashes: tuple[int, ...] | None = None) -> None:
        self.emit(
            "trainer",
            ev.WeightsPublished(
                **self.of(version),
                plan_digest="plan",
                tensors=3,
                bucket_nbytes=NBYTES,
                bucket_hashes=bucket_hashes or hashes(version),
            ),
        )

    def prove(
        self, engine: str, version: int, proof: str = "hash", outcome: str = "holds", **fields: Any
    ) -> None:
        event = ev.EngineProved(engine=engine, **self.of(version), proof=proof, outcome=outcome, **fields)
        self.emit("trainer", event)

    def commit(self, version: int, **fields: Any) -> None:
        fields = {"members": self.engines, "view": self.view, **fields}
        self.emit("trainer", ev.VersionCommitted(**self.of(version), **fields))

    def abort(self, version: int, final: bool = True) -> None:
        self.emit("trainer", ev.SyncAborted(**self.of(version), reason="planned", final=final))

    def end(self, version: int, outcome: str = "committed") -> None:
        self.emit("trainer", ev.SyncEnded(term=self.term, version=version, outcome=outcome))

    def acknowledge(self, engine: str, call: str, version: int) -> None:
        self.emit("trainer", ev.EngineAcknowledged(engine=engine, call=call, **self.of(version)))

    def fence(self, engine: str) -> None:
        self.emit("trainer", ev.EngineFenced(engine=engine, reason="planned", term=self.term))
        self.change_view(tuple(name for name in self.engines if name != engine))

    # -- an engine -----------------------------------------------------------------------------------

    def pause(self, engine: str, version: int, mode: str = "keep", running: int = 0, **fields: Any) -> None:
        event = ev.EnginePaused(
            engine=engine, mode=mode, clear_cache=True, running=running, waiting=0, term=self.term, **fields
        )
        self.engine_emit(engine, event)
        self.acknowledge(engine, "pause", version)

    def start(self, engine: str, version: int) -> None:
        self.engine_emit(engine, ev.UpdateStarted(engine=engine, **self.of(version)))

    def receive(self, engine: str, version: int, bucket: int, **fields: Any) -> None:
        found = hashes(version)[bucket] if bucket < BUCKETS else 7
        fields = {
            **self.of(version),
            "nbytes": NBYTES[bucket] if bucket < BUCKETS else 8,
            "hash64": found,
            "expected_hash64": found,
            **fields,
        }
        self.engine_emit(engine, ev.BucketReceived(engine=engine, bucket=bucket, **fields))

    def load(self, engine: str, version: int, weights_hash: str = "") -> None:
        self.engine_emit(
            engine,
            ev.WeightsLoaded(
                engine=engine,
                **self.of(version),
                hashes_verified=True,
                buckets=BUCKETS,
                weights_hash=weights_hash or f"weights {version}",
            ),
        )
        self.acknowledge(engine, "finish", version)

    def activate(self, engine: str, version: int, **fields: Any) -> str:
        self.active[engine] = (self.term, version)
        fields = {"term": self.term, "version": version, "first_step": self.step_of[engine], **fields}
        return self.engine_emit(engine, ev.WeightsActivated(engine=engine, **fields))

    def write(self, engine: str, version: int, **fields: Any) -> None:
        place: dict[str, Any] = {"engine": engine, "term": self.term, "version": version}
        self.engine_emit(engine, ev.WeightWriteBegan(**place))
        self.engine_emit(engine, ev.WeightWriteEnded(**place, **fields))

    def update(self, engine: str, version: int) -> None:
        """From the first bucket to the switch."""
        self.start(engine, version)
        for bucket in range(BUCKETS):
            self.receive(engine, version, bucket)
        self.write(engine, version)
        self.load(engine, version)
        self.activate(engine, version)

    def resume(self, engine: str, version: int) -> None:
        self.engine_emit(engine, ev.EngineResumed(engine=engine, term=self.term))
        self.acknowledge(engine, "resume", version)

    def step(self, engine: str = "engine-0", shard: int = 0, **fields: Any) -> str:
        term, version = self.active[engine]
        step = self.step_of[engine]
        fields = {"term": term, "version": version, "began_seq": self.next_seq(engine), **fields}
        fields = {"first_step": step, "last_step": step, **fields}
        self.step_of[engine] = step + 1
        return self.engine_emit(
            engine,
            ev.ModelStep(
                engine=engine, shard=shard, sequences=1, prefill_tokens=0, decode_tokens=1, **fields
            ),
        )

    def admit(self, request: str, engine: str = "engine-0", **fields: Any) -> str:
        fields = {"request_kind": "canary", **fields}
        return self.emit(
            engine,
            ev.RequestAdmitted(
                engine=engine,
                request=request,
                prompt_tokens=3,
                weight_version=self.active[engine][1],
                term=self.active[engine][0],
                **fields,
            ),
        )

    def finish(
        self, request: str, spans: tuple[tuple[int, ...], ...], engine: str = "engine-0", **fields: Any
    ) -> str:
        fields = {"request_kind": "canary", "tokens": spans[-1][3] if spans else 0, **fields}
        fields = {"finish_reason": "stop", **fields}
        return self.emit(engine, ev.RequestFinished(engine=engine, request=request, spans=spans, **fields))

    # -- all of it -----------------------------------------------------------------------------------

    def transfer(self, version: int) -> None:
        self.pack(version)
        self.publish(version)
        for engine in self.engines:
            self.update(engine, version)
            self.prove(engine, version)

    def sync(self, version: int) -> None:
        self.begin(version)
        for engine in self.engines:
            self.pause(engine, version)
        self.transfer(version)
        self.commit(version)
        for engine in self.engines:
            self.resume(engine, version)
        self.end(version)

    def run_ended(self, outcome: str = "clean") -> None:
        for engine in self.engines:
            self.emit("run", ev.MemberStopped(member=engine))
        self.emit("run", ev.RunEnded(outcome=outcome))
