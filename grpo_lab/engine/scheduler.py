"""Which tokens the next step computes: continuous batching, chunked prefill, preemption by recompute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from grpo_lab.engine.block_pool import BLOCK_TOKENS, BlockPool
from grpo_lab.engine.request import Request, Scheduled


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batch of one step. ``hits`` are (request, cached tokens, oldest content version) rows.

    ``sequences``, ``prefill_tokens``, ``decode_tokens`` and ``context_tokens`` (with a KV entry before the
    step) count the whole batch, also those sequences that ``schedule`` was told to leave alone.
    """

    scheduled: list[Scheduled]
    prefill_tokens: int
    decode_tokens: int
    sequences: int
    context_tokens: int
    hits: list[tuple[Request, int, tuple[int, int]]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Waiting and running queues over a block pool, in the manner of vLLM's V1 scheduler.

    Prefill and decode are one thing: a request is behind by ``len(token_ids) - num_computed_tokens``
    tokens, and a step lets it catch up within ``max_batched_tokens``. Running requests come first, in
    order of arrival; waiting ones are admitted while a place, the budget and blocks are left. When
    blocks run out, the youngest running request is preempted: its blocks are freed and its tokens,
    prompt and output, are computed again later. No decoded token is ever lost.

    ``cache_outputs=False`` keeps completions out of the prefix cache: prompts alone are found again.
    """

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_batched_tokens: int, *, cache_outputs: bool = True
    ) -> None:
        if max_num_seqs < 1 or max_batched_tokens < 1:
            raise ValueError(
                f"max_num_seqs={max_num_seqs}, max_batched_tokens={max_batched_tokens}: need at least 1"
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.cache_outputs = cache_outputs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def in_flight(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, version: tuple[int, int], steady: int = 0, steady_context_tokens: int = 0) -> StepPlan:
        """The next step's batch under weights ``version``; empty when nothing can run.

        The first ``steady`` running requests decode one token each and have their blocks: they take their
        part of the budget and are not in ``scheduled``.
        """
        budget = self.max_batched_tokens - steady
        scheduled: list[Scheduled] = []
        preempted: list[Request] = []
        index = steady
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(len(request.token_ids) - request.num_computed_tokens, budget)
            if not self._make_room(request, count, preempted):
                break  # it was the youngest itself
            scheduled.append(Scheduled(request, request.num_computed_tokens, count))
            budget -= count
            index += 1
        hits: list[tuple[Request, int, tuple[int, int]]] = []
        if not preempted:
            self._admit(scheduled, hits, budget, version)
        prefill = sum(item.count for item in scheduled if not _is_decode(item))
        decode = sum(item.count for item in scheduled) - prefill + steady
        context = sum(item.start for item in scheduled) + steady_context_tokens
        return StepPlan(scheduled, prefill, decode, len(scheduled) + steady, context, hits, preempted)

    def _make_room(self, request: Request, count: int, preempted: list[Request]) -> bool:
        needed = _blocks_for(request.num_computed_tokens + count) - len(request.block_table)
        while needed > self.pool.num_free:
            victim = self.running[-1]
            self.preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        if needed > 0:
            request.block_table += self.pool.allocate(needed)
        return True

    def _admit(
        self,
        scheduled: list[Scheduled],
        hits: list[tuple[Request, int, tuple[int, int]]],
        budget: int,
        version: tuple[int, int],
    ) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            words = request.token_ids if request.num_output_tokens else request.prompt_token_ids
            cached, parent = self.pool.match(words, version, request.extras.cache_salt)
            start = len(cached) * BLOCK_TOKENS
            count = min(len(request.token_ids) - start, budget)
            needed = _blocks_for(start + count) - len(cached)
            if needed > self.pool.num_free_without(cached):
                break
            self.waiting.popleft()
            self.pool.reference(cached)
            request.block_table = cached + self.pool.allocate(needed)
            request.num_computed_tokens = start
            request.num_cached_blocks, request.parent_hash = len(cached), parent
            request.num_cached_tokens = start
            if cached:
                request.kv_weights = min(self.pool.version_of(index) for index in cached)
                hits.append((request, start, request.kv_weights))
            self.running.append(request)
            scheduled.append(Scheduled(request, start, count))
            budget -= count

    def commit(self, request: Request, count: int, version: tuple[int, int], reusable: bool) -> None:
        """``count`` more tokens of ``request`` have KV entries; full blocks enter the prefix cache.

        ``reusable`` is False for a sequence whose KV mixes weight versions: its blocks are nobody else's.
        """
        request.num_computed_tokens += count
        if not reusable or not self.pool.caching:
            return
        full = self.num_cacheable_blocks(request)
        for index in range(request.num_cached_blocks, full):
            start, end = index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS
            words = request.prompt_token_ids if end <= request.num_prompt_tokens else request.token_ids
            tokens = words[start:end]
            request.parent_hash = self.pool.key(request.parent_hash, tokens, version)
            self.pool.remember(request.block_table[index], request.parent_hash, version)
        request.num_cached_blocks = max(full, request.num_cached_blocks)

    def num_cacheable_blocks(self, request: Request) -> int:
        """Full blocks of ``request`` that belong into the prefix cache by now."""
        tokens = request.num_computed_tokens
        return (tokens if self.cache_outputs else min(tokens, request.num_prompt_tokens)) // BLOCK_TOKENS

    def preempt(self, request: Request) -> None:
        """Frees a running request's blocks and puts it back at the head of the waiting queue."""
        self.running.remove(request)
        request.recomputed_tokens += request.num_computed_tokens
        self._release(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def preempt_all(self) -> int:
        """Makes every running request recompute its KV; returns the number of KV tokens given up."""
        lost = sum(request.num_computed_tokens for request in self.running)
        for request in reversed(list(self.running)):
            self.preempt(request)
        return lost

    def remove(self, requests: Iterable[Request]) -> None:
        """Takes finished or aborted requests out and frees their blocks."""
        gone = list(requests)
        leaving = {id(request) for request in gone}
        if len(gone) == 1 and gone[0] in self.running:
            self.running.remove(gone[0])
        else:
            self.running = [request for request in self.running if id(request) not in leaving]
        if any(request in self.waiting for request in gone):
            self.waiting = deque(request for request in self.waiting if id(request) not in leaving)
        for request in gone:
            self._release(request)

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0
        request.num_cached_blocks, request.parent_hash = 0, b""
        request.kv_weights = None


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _is_decode(item: Scheduled) -> bool:
    return item.count == 1 and item.request.num_output_tokens > 0
