"""Rank 0's conversation with the engines about one set of weights: join, move, finish, prove."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

from grpo_lab.errors import GrpoLabError, HandshakeError, SyncError, TransportError
from grpo_lab.events import EngineProved, HandshakeCompared, WeightsPublished
from grpo_lab.ports import Engine, Recorder, WeightSource, WeightTransport
from grpo_lab.protocol.canary import Canary, Scores, judge
from grpo_lab.protocol.engine_set import EngineCall, EngineSet
from grpo_lab.protocol.nursery import Nursery, run_all
from grpo_lab.protocol.phase_times import PhaseTimes
from grpo_lab.protocol.timeouts import Timeouts, bounded
from grpo_lab.types import Bucket, SyncId

ENGINES_OWN_WORDS_S = 1.0  # after a failed send: until an update that failed too has been answered


class Delivery:
    """Moves the source's weights to the engines whose turn it is, and knows which of all have loaded.

    ``started`` holds the names of the engines that the version under way has touched. ``loaded`` holds
    those that may hold it: asked to finish, and not known to hold anything else; any of them could
    serve it once resumed. ``proved`` holds those that also proved it in the newest attempt of their turn;
    ``let_go`` those that were asked to resume since it began, answered or not. ``nbytes`` is the size of the
    version, 0 until it has been packed.
    """

    def __init__(
        self,
        engines: EngineSet,
        transport: WeightTransport,
        source: WeightSource,
        recorder: Recorder,
        canary: Canary | None,
        timeouts: Timeouts,
    ) -> None:
        self._set = engines
        self._transport = transport
        self._source = source
        self._recorder = recorder
        self._canary = canary
        self._limits = timeouts
        self._scores: Scores | None = None  # the trainer's, of the version under way
        self._scores_before: Scores | None = None
        self.started: set[str] = set()
        self.loaded: set[str] = set()
        self.proved: set[str] = set()
        self.let_go: set[str] = set()
        self.failures: Counter[str] = Counter()
        self.nbytes = 0
        self._joined: tuple[str, ...] = ()

    async def begin_version(self) -> None:
        """A new version is under way. On every rank: the canary's own scores are a collective matter."""
        self.started = set()
        self.loaded = set()
        self.proved = set()
        self.let_go = set()
        self.failures.clear()
        self.nbytes = 0
        if self._canary is not None:
            self._scores_before = self._scores
            score = self._source.score(self._canary.sequences)
            self._scores = await bounded(score, self._limits.score_s, "the trainer's own canary")

    @property
    def is_joined(self) -> bool:
        """Whether the transport's members are exactly the engines whose turn it is.

        It waits for each of its members, so one that was fenced must leave it before the next transfer.
        """
        return self._joined == self._set.turn_names

    def forget_members(self) -> None:
        """Some engine restarted, and is in the transfer no more."""
        self._joined = ()

    async def handshake(self, sync: SyncId) -> dict[str, GrpoLabError]:
        """Opens the transport and joins every engine of the turn to it; returns the failures by engine.

        Raises what the transport itself raised when no engine is to blame.
        """
        limit_s = self._limits.handshake_s
        self._joined = ()
        names = self._set.turn_names
        await bounded(self._transport.open(names, self._source.plan), limit_s, "opening the transport")
        accepting: list[GrpoLabError] = []

        async def accept() -> None:
            try:
                await self._transport.accept()
            except GrpoLabError as error:
                accepting.append(error)  # the engines' own words are better

        async with Nursery("handshake", limit_s) as nursery:
            nursery.start(accept(), name="accept")
            failures = await self._set.failures_of(self._set.turn, lambda engine: self._join(engine, sync))
            if failures:
                nursery.cancel()
        if accepting and not failures:
            raise accepting[0]
        if not failures:
            self._joined = names
        return failures

    async def close(self) -> None:
        self._joined = ()
        await bounded(self._transport.close(), self._limits.close_s, "closing the transport")

    async def attempt(self, sync: SyncId, times: PhaseTimes) -> None:
        """Start, move and verify, finish, prove. Raises the first failure; any engine may be behind it."""
        self.started.update(self._set.turn_names)
        self.proved.difference_update(self._set.turn_names)
        joined, self._joined = self._joined, ()  # a transport that failed is closed
        async with gathered_to_the_end(self._source):
            try:
                await bounded(self._source.begin(sync), self._limits.transfer_s, "the first gather")
                with times.measure("start"):
                    await self._demand("start", lambda engine: engine.start_update(sync), sync)
                await self._move(sync, times)
            except BaseException:
                with suppress(GrpoLabError):
                    await self.close()  # the source only gathers from now on: a slot may still be read
                raise
        self._joined = joined
        with times.measure("load"):
            failures = await self._finish(sync)
        with times.measure("verify"):
            failures += await self._prove(sync)
        if failures:
            raise failures[0]

    async def probation(self, sync: SyncId) -> None:
        """The canary for engines that cannot score while paused. They are resumed for it, and serve
        nobody else; one that fails is paused again and fenced.
        """
        on_trial = [engine for engine in self._set.turn if not engine.capabilities.score_while_paused]
        failures = await self._set.failures_of(on_trial, lambda engine: self._resume_and_score(sync, engine))
        for name, error in failures.items():
            self._set.fence(name, f"probation: {error}", sync)
        failed = [engine for engine in on_trial if engine.name in failures]
        await self._set.pause(failed, "abort", True, self._limits.pause_s, sync)
        self._set.require_enough()

    @property
    def needs_probation(self) -> bool:
        return self._canary is not None and any(
            not engine.capabilities.score_while_paused for engine in self._set.turn
        )

    async def _join(self, engine: Engine, sync: SyncId) -> None:
        info = self._transport.init_info(engine.name)
        limit_s = self._limits.handshake_s
        ours, theirs, difference = self._source.plan_digest, "", ""
        try:
            theirs = await self._set.one(
                "init_transfer", lambda member: member.init_transfer(info, sync.term), engine, limit_s, sync
            )
            if theirs and theirs != ours:
                raise HandshakeError(f"{engine.name} joined with plan {theirs}, but {ours} was offered")
        except GrpoLabError as error:
            difference = str(error)[:1000]
            raise
        finally:
            self._recorder.emit(
                HandshakeCompared(engine=engine.name, ours=ours, theirs=theirs, difference=difference)
            )

    async def _move(self, sync: SyncId, times: PhaseTimes) -> None:
        info = self._transport.update_info(sync)
        limit_s = self._limits.transfer_s
        clock = asyncio.get_running_loop().time
        sent_at_s = clock()

        async def send() -> None:
            nonlocal sent_at_s
            # Closed here, also when the send fails: not whenever the generator happens to be collected.
            try:
                async with aclosing(self._published(sync)) as buckets:
                    times.add("wire", await self._transport.send(sync, buckets))
            except TransportError:
                # An engine that refuses a bucket leaves the transfer and then says why, in better words.
                await asyncio.sleep(ENGINES_OWN_WORDS_S)
                raise
            sent_at_s = clock()

        async def update(engine: Engine) -> None:
            try:
                await self._set.one("update", lambda one: one.update(sync, info), engine, limit_s, sync)
            except GrpoLabError:
                self.failures[engine.name] += 1
                raise

        updates = [(f"update of {engine.name}", update(engine)) for engine in self._set.turn]
        await run_all(f"move {sync}", [("send", send()), *updates], limit_s)
        times.add("verify", clock() - sent_at_s)

    async def _published(self, sync: SyncId) -> AsyncGenerator[Bucket, None]:
        """The source's buckets; when the last has been packed, the manifest is complete."""
        sizes: list[int] = []
        hashes: list[int] = []
        while (bucket := await self._source.next()) is not None:
            sizes.append(bucket.nbytes)
            hashes.append(bucket.hash64)
            if len(sizes) == self._source.num_buckets:
                self.nbytes = sum(sizes)
                # Before the last bucket leaves, so that no engine can hold what was never published.
                self._recorder.emit(
                    WeightsPublished(
                        term=sync.term,
                        version=sync.version,
                        attempt=sync.attempt,
                        plan_digest=self._source.plan_digest,
                        tensors=self._source.num_tensors,
                        bucket_nbytes=tuple(sizes),
                        bucket_hashes=tuple(hashes),
                    )
                )
            yield bucket

    async def _finish(self, sync: SyncId) -> list[GrpoLabError]:
        # From here on any of them may hold the version, also if its reply is lost or this is cancelled.
        self.loaded.update(self._set.turn_names)
        answers = await self._set.each(
            "finish", lambda engine: engine.finish_update(sync), self._limits.finish_s, sync
        )
        failures: list[GrpoLabError] = []
        asked = [engine for engine in self._set.turn if engine.name in answers]
        held_by = await asyncio.gather(*map(self.held_by, asked))
        self.proved.update(name for name in self._set.turn_names if name not in answers)
        for engine, held in zip(asked, held_by, strict=True):
            error = answers[engine.name]
            if held == str(sync):
                self.proved.add(engine.name)
                continue
            self.failures[engine.name] += 1
            failures.append(error)
            if held is not None and not held.startswith(f"t{sync.term}.v{sync.version}."):
                # It says itself that it holds something else; a finish that comes later fails its abandon.
                self.loaded.discard(engine.name)
        return failures

    async def held_by(self, engine: Engine) -> str | None:
        """What the engine says it holds; None when it does not say. Decides after a lost reply."""
        try:
            return await bounded(engine.weight_info(), self._limits.resume_s, f"weight_info of {engine.name}")
        except GrpoLabError:
            return None

    async def _prove(self, sync: SyncId) -> list[GrpoLabError]:
        """Hash or structure for who has loaded, then the canary where it can be asked for now."""
        loaded = [engine for engine in self._set.turn if engine.name in self.proved]
        for engine in loaded:
            self._emit_proof(
                sync, engine.name, "hash" if engine.capabilities.hashes else "structure", "holds"
            )
        if self._canary is None:
            return []
        scored = [engine for engine in loaded if engine.capabilities.score_while_paused]
        failures = await self._set.failures_of(scored, lambda engine: self._score(sync, engine))
        self.proved.difference_update(failures)
        return list(failures.values())

    async def _score(self, sync: SyncId, engine: Engine) -> None:
        canary, ours = self._canary, self._scores
        assert canary is not None
        assert ours is not None, "the trainer's scores come first"
        theirs = await self._set.one(
            "score", lambda member: member.score(canary.sequences), engine, self._limits.score_s, sync
        )
        result = judge(theirs, ours, self._scores_before, canary.tolerance)
        self._emit_proof(
            sync,
            engine.name,
            "canary",
            result.outcome,
            gap=result.gap,
            separation=result.separation,
            tolerance=canary.tolerance,
        )
        if result.outcome == "fails":
            raise SyncError(
                f"canary of {engine.name}: logprobs differ by {result.gap:.3g}, tolerance "
                f"{canary.tolerance:g}: the engine does not hold the published weights"
            )

    async def _resume_and_score(self, sync: SyncId, engine: Engine) -> None:
        self.let_go.add(engine.name)
        await self._set.one("resume", lambda one: one.resume(sync.term), engine, self._limits.resume_s, sync)
        await self._score(sync, engine)

    async def _demand(self, call: str, function: EngineCall, sync: SyncId) -> None:
        failures = await self._set.each(call, function, self._limits.transfer_s, sync)
        self.failures.update(failures.keys())
        if failures:
            raise next(iter(failures.values()))

    def _emit_proof(
        self,
        sync: SyncId,
        engine: str,
        proof: str,
        outcome: str,
        *,
        gap: float | None = None,
        separation: float | None = None,
        tolerance: float | None = None,
    ) -> None:
        self._recorder.emit(
            EngineProved(
                engine=engine,
                term=sync.term,
                version=sync.version,
                attempt=sync.attempt,
                proof=proof,
                outcome=outcome,
                gap=gap,
                separation=separation,
                tolerance=tolerance,
            )
        )


@asynccontextmanager
async def gathered_to_the_end(source: WeightSource) -> AsyncIterator[None]:
    """A rank that fails goes on taking part: the others would hang in a collective that it left."""
    try:
        yield
    except BaseException as error:
        try:
            await drain(source)
        except Exception as another:  # the first failure must win, above all a cancellation
            error.add_note(f"then the rest of the gathers failed: {another}")
        raise


async def drain(source: WeightSource) -> None:
    """Takes part in the rest of the gathers of this attempt."""
    while await source.next() is not None:
        pass
