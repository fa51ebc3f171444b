"""The engine: requests that come in, and the pauses and weight switches between its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from grpo_lab.engine.bookkeeping import Decode
from grpo_lab.engine.failures import BadRequest, NotInService, StaleTerm
from grpo_lab.engine.request import NO_EXTRAS, Extras, Request, WeightIdentity, sample_key
from grpo_lab.engine.settings import RunState
from grpo_lab.engine.steps import StepLoop
from grpo_lab.engine.tracing import admitted_event
from grpo_lab.engine.validation import request_problem, sequence_problem
from grpo_lab.events import (
    CacheCleared,
    EnginePaused,
    EngineResumed,
    RequestRefused,
    WeightsActivated,
    WeightWriteBegan,
    WeightWriteEnded,
)
from grpo_lab.types import PauseMode, RequestKind, SamplingParams


class EngineCore(StepLoop):
    """Continuous batching over a policy. All methods belong to one event loop.

    A step, a score and a weight switch exclude each other, and a pause waits for the step in progress, so
    nothing that a pause or a switch promises is broken half-way (S7, S16). A request that arrives while the
    engine is paused is held until it resumes.
    """

    # --- requests -----------------------------------------------------------------------------------

    def observe_term(self, term: int, request: str = "") -> None:
        """Raises ``StaleTerm`` for a message of an older term; 0 means that the sender named none."""
        if term and term < self.term:
            detail = (
                f"term {term} is over: this engine has seen term {self.term}. "
                f"A new trainer needs first_term={self.term + 1}; an older one has to end"
            )
            refused = RequestRefused(
                engine=self.config.name, request=request, status=409, detail=detail, term=term
            )
            self.recorder.emit(refused)
            raise StaleTerm(detail)
        self.term = max(self.term, term)

    def _refuse_unsynced(self, request_id: str, term: int) -> None:
        detail = f"{self.config.name} holds no synced weights yet: it is not in service for rollouts"
        self.recorder.emit(
            RequestRefused(engine=self.config.name, request=request_id, status=503, detail=detail, term=term)
        )
        raise NotInService(detail)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        kind: RequestKind = "rollout",
        term: int = 0,
        stop_strings: tuple[str, ...] = (),
        top_logprobs: int = 0,
        extras: Extras = NO_EXTRAS,
    ) -> Request:
        """Puts a request into the waiting queue.

        Raises ``BadRequest``, ``StaleTerm``, ``EngineDead``, or ``NotInService`` for a rollout of a training
        run (one that names its term) while no synced weights are served.
        """
        self.check_alive()
        self.observe_term(term, request_id)
        if kind == "rollout" and term and self.identity.version == 0:
            self._refuse_unsynced(request_id, term)
        prompt = tuple(prompt_token_ids)
        problem = request_problem(self.policy, prompt, sampling)
        if problem:
            self.recorder.emit(
                RequestRefused(
                    engine=self.config.name, request=request_id, status=400, detail=problem, term=term
                )
            )
            raise BadRequest(problem)
        self.counters.prefix_queries += len(prompt)
        room = self.policy.max_model_len - len(prompt)
        loop = asyncio.get_running_loop()
        eos = () if sampling.ignore_eos else self.policy.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)),
            done=loop.create_future(),
            kind=kind,
            sample_key=sample_key(self.config.seed, request_id, sampling.seed),
            top_logprobs=top_logprobs,
            stop_token_ids=frozenset((*eos, *sampling.stop_token_ids)),
            stop_strings=stop_strings,
            arrival_s=loop.time(),
            extras=extras,
        )
        paused = self._state is not RunState.RUNNING
        if not paused and len(self.scheduler.running) < self.config.max_num_seqs:
            self.interrupt()  # the next step may take it in
        (self._held.append if paused else self.scheduler.add)(request)
        self._wake.set()
        self.recorder.emit(admitted_event(self.config.name, request, self.identity, term, paused=paused))
        return request

    async def wait(self, request: Request) -> Request:
        """Waits for the request's end; cancelling the wait aborts the request."""
        try:
            await asyncio.shield(request.done)
        except asyncio.CancelledError:
            self._abort([request])
            raise
        return request

    def cancel(self, requests: list[Request]) -> None:
        """Aborts those of the requests that have not ended: nobody waits for them any more."""
        self._abort(requests)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._held)

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Returns the named requests unfinished, paused or not; unknown ids are ignored."""
        self.check_alive()
        names = set(request_ids)
        known = [request for request in self.live() if request.request_id in names]
        self._abort(known)
        return [request.request_id for request in known]

    async def abort_all(self) -> list[str]:
        """Returns every request unfinished; does not pause."""
        self.check_alive()
        live = [*self.scheduler.in_flight(), *self._held]
        self._abort(live)
        return [request.request_id for request in live]

    def understand(self, decode: Decode) -> None:
        """Stop strings are looked for in what ``decode`` makes of token ids."""
        self._book.decode = decode

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Teacher forcing under the served weights, also while paused (see ``Policy.score``)."""
        self.check_alive()
        for ids in sequences:
            problem = sequence_problem(self.policy, ids)
            if problem:
                raise BadRequest(problem)
        return await self.exclusively(lambda: self.policy.score(sequences))

    # --- pauses -------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self._state is not RunState.RUNNING

    async def pause(self, mode: PauseMode, clear_cache: bool = True, term: int = 0) -> None:
        """Returns when no step runs any more.

        ``abort`` returns every request, with the tokens it has; ``wait`` lets those in flight finish;
        ``keep`` freezes them. ``clear_cache`` empties the prefix cache and makes frozen requests compute
        their KV again after resume; without it KV survives a weight switch, and spans say so.

        A ``wait`` ends early when another pause freezes the engine; after ``keep`` it finds it frozen.
        """
        self.check_alive()
        self.observe_term(term)
        if mode == "wait" and self._state is not RunState.FROZEN:
            await self._drain()
            if self._state is not RunState.DRAINING:
                return  # resumed or frozen by somebody else meanwhile
        # Set before waiting for the step in progress, so that no further one begins.
        self._state = RunState.FROZEN
        self._announce_change()
        async with self.held():
            self.check_alive()
            if self._state is not RunState.FROZEN:
                return
            aborted: list[Request] = []
            if mode == "abort":
                aborted = [*self.scheduler.in_flight(), *self._held]
                self._held.clear()
                self._abort(aborted)
            if clear_cache:
                self._clear_caches()
            self._keep_kv = not clear_cache
            self._announce_pause(mode, clear_cache, term, aborted)

    def _announce_pause(
        self, mode: PauseMode, clear_cache: bool, term: int, aborted: Iterable[Request] = ()
    ) -> None:
        self.recorder.emit(
            EnginePaused(
                engine=self.config.name,
                mode=mode,
                clear_cache=clear_cache,
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting) + len(self._held),
                aborted=tuple(request.request_id for request in aborted),
                term=term,
            )
        )

    async def resume(self, term: int = 0) -> None:
        self.check_alive()
        self.observe_term(term)
        if self._state is RunState.RUNNING:
            return
        self._state = RunState.RUNNING
        self._keep_kv = False
        self.interrupt()
        for request in self._held:
            self.scheduler.add(request)
        self._held.clear()
        self.recorder.emit(EngineResumed(engine=self.config.name, term=term))
        self._wake.set()

    async def _drain(self) -> None:
        """Waits until the requests now in flight have ended, or the engine is frozen."""
        self._state = RunState.DRAINING
        pending = [request.done for request in self.scheduler.in_flight()]
        while self._state is not RunState.FROZEN and not all(done.done() for done in pending):
            change = asyncio.get_running_loop().create_future()
            self._changes.append(change)
            await change
        self.check_alive()

    def _clear_caches(self) -> None:
        self._settle()
        used = self.scheduler.pool.num_used
        self.scheduler.preempt_all()
        kept = self.scheduler.pool.num_used
        self.recorder.emit(
            CacheCleared(engine=self.config.name, cache="kv", cleared_blocks=used - kept, kept_blocks=kept)
        )
        self.flush_prefix_cache()

    def flush_prefix_cache(self) -> None:
        cleared = self.scheduler.pool.flush()
        self.recorder.emit(CacheCleared(engine=self.config.name, cache="prefix", cleared_blocks=cleared))

    # --- weights ------------------------------------------------------------------------------------

    async def switch_weights(
        self, identity: WeightIdentity, weights_hash: str, loaded: Callable[[], None]
    ) -> None:
        """Makes the policy's staged weights the served ones, between two steps.

        ``loaded`` runs once they are in place, before they are announced as active. KV of older weights
        is dropped and computed again, unless the pause that holds asked to keep it.
        """
        async with self.held():
            self.check_alive()
            await self._write_weights(identity)
            self.identity = identity
            loaded()
            if not self._keep_kv and self.scheduler.running:
                self._clear_caches()
            elif self.config.prefix_policy == "flush":
                self.flush_prefix_cache()
            for rank in range(self.config.ranks):
                self._announce_switch(rank, weights_hash)

    async def _write_weights(self, identity: WeightIdentity) -> None:
        """All ranks write at the same time; no step runs until the last of them has."""
        name, (term, version) = self.config.name, identity.weights
        ranks = range(self.config.ranks)
        for rank in ranks:
            self.recorder.emit(WeightWriteBegan(engine=name, term=term, version=version, shard=rank))
        complete = False
        try:
            await self.runner.run(self.policy.activate)
            complete = True
        except BaseException as error:  # also a cancellation: nobody knows what was written
            self._fail(error)
            raise
        finally:
            for rank in ranks:
                self.recorder.emit(
                    WeightWriteEnded(engine=name, term=term, version=version, shard=rank, complete=complete)
                )

    def _announce_switch(self, rank: int, weights_hash: str) -> None:
        term, version = self.identity.weights
        self.recorder.emit(
            WeightsActivated(
                engine=self.config.name,
                term=term,
                version=version,
                first_step=self._next_step,
                shard=rank,
                weights_hash=weights_hash,
            )
        )
