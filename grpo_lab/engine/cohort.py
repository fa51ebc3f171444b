"""Sequences that decode one token a step each, advanced together and looked at only when they leave."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from grpo_lab.engine.block_pool import BLOCK_TOKENS
from grpo_lab.engine.bookkeeping import TokenBook
from grpo_lab.engine.drawn import DrawnPolicy
from grpo_lab.engine.request import Request, WeightIdentity
from grpo_lab.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True, order=True)
class _Member:
    """Ends at step ``ends`` of the cohort's count, at which it ``joined``. Ties keep the running order."""

    ends: int
    number: int
    joined: int


class Cohort:
    """The first ``len(self)`` running requests, each with its newest token not computed yet.

    Per step every member takes in one token, needs a further block when its KV entries fill the last one,
    and draws a token. So what a number of steps costs follows from how many members stand at each of the 16
    places in a block, and no member is touched. Blocks are reserved in the pool as they are needed; they are
    taken by name, and tokens, spans and prefix cache entries are written, when a member leaves.
    """

    def __init__(self, policy: DrawnPolicy, scheduler: Scheduler, book: TokenBook) -> None:
        self._policy, self._scheduler, self._book = policy, scheduler, book
        self._steps = 0
        self._covered = 0
        self._numbers = itertools.count()
        self._heap: list[tuple[_Member, Request]] = []
        self._places = [0] * BLOCK_TOKENS  # members by KV entries less steps, modulo a block
        self.context_tokens = 0

    def __len__(self) -> int:
        return len(self._heap)

    def join(self, request: Request) -> None:
        """``request``, the next in running order, has just drawn a token that does not end it."""
        if not request.final_tokens:
            request.final_tokens = self._policy.final_tokens(request)
        ends = self._steps + request.final_tokens - request.num_output_tokens
        member = _Member(ends, next(self._numbers), self._steps)
        heapq.heappush(self._heap, (member, request))
        self._places[(request.num_computed_tokens - self._steps) % BLOCK_TOKENS] += 1
        self.context_tokens += request.num_computed_tokens

    def steps_to_next_end(self) -> int:
        return self._heap[0][0].ends - self._steps

    def steps_within(self, most: int, blocks: int) -> int:
        """How many steps beyond the covered ones, up to ``most``, need no more than ``blocks`` blocks."""
        steps, members = 0, len(self)
        if members:  # any 16 steps in a row need a block each
            rounds = min(most // BLOCK_TOKENS, blocks // members)
            steps, blocks = rounds * BLOCK_TOKENS, blocks - rounds * members
        while steps < most:
            blocks -= self._needed_at(self._covered + steps)
            if blocks < 0:
                break
            steps += 1
        return steps

    def cover(self, steps: int) -> None:
        """Reserves the blocks of the next ``steps`` steps, as far as they are not reserved yet."""
        rounds, rest = divmod(steps - self._covered, BLOCK_TOKENS)
        if rounds < 0:
            return
        blocks = rounds * len(self) + sum(self._needed_at(self._covered + step) for step in range(rest))
        self._scheduler.pool.reserve(blocks)
        self._covered = steps

    def _needed_at(self, steps: int) -> int:
        """Blocks that the step needs before which ``steps`` others run."""
        return self._places[-(self._steps + steps) % BLOCK_TOKENS]

    def advance(self, steps: int) -> None:
        """``steps`` covered steps have run; at most until the next end."""
        assert steps <= self._covered
        self._covered -= steps
        self._steps += steps
        self.context_tokens += steps * len(self)

    def take_finished(self, identity: WeightIdentity, step: int, now_s: float) -> list[Request]:
        """Those that end with step number ``step`` of the engine, just run, leave; in running order."""
        finished = []
        while self._heap and self._heap[0][0].ends == self._steps:
            member, request = heapq.heappop(self._heap)
            self._leave(member, request, identity, step, now_s, for_good=True)
            finished.append(request)
        return finished

    def dissolve(self, identity: WeightIdentity, step: int, now_s: float) -> list[Request]:
        """All leave, in running order; ``step`` was the engine's last one. A step that is covered keeps its
        blocks, as it is under way.
        """
        members = sorted(self._heap, key=lambda row: row[0].number)
        self._heap.clear()
        covered, self._covered = self._covered, 0
        for member, request in members:
            self._leave(member, request, identity, step, now_s, covered)
        return [request for _, request in members]

    def _leave(
        self,
        member: _Member,
        request: Request,
        identity: WeightIdentity,
        step: int,
        now_s: float,
        covered: int = 0,
        *,
        for_good: bool = False,
    ) -> None:
        steps = self._steps - member.joined
        self._places[(request.num_computed_tokens - member.joined) % BLOCK_TOKENS] -= 1
        self.context_tokens -= request.num_computed_tokens + steps
        entries = request.num_computed_tokens + steps + covered
        blocks = -(-entries // BLOCK_TOKENS) - len(request.block_table)
        if for_good and not self._scheduler.cache_outputs:
            self._scheduler.pool.give_back(blocks)  # the end frees the others
        else:
            request.block_table += self._scheduler.pool.allocate(blocks, reserved=True)
        if steps:
            tokens, logprobs = self._policy.draw(request, steps)
            self._book.apply_decodes(request, tokens, logprobs, identity, step, now_s)
