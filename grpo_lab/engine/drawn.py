"""Policies that know a sample's length when it begins, so that many steps can be run as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Protocol, cast, runtime_checkable

from grpo_lab.engine.policy import Policy, SyntheticPolicy
from grpo_lab.engine.request import Request, Scheduled, StepOutput
from grpo_lab.engine.runs import Runs

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@runtime_checkable
class DrawnPolicy(Policy, Protocol):
    """Says in one call what ``step`` would say in many."""

    def final_tokens(self, request: Request) -> int:
        """How many output tokens a request that has not ended will have, unless it is aborted."""
        ...

    def begin(self, request: Request) -> None:
        """``request`` has been taken in, and nothing of it computed."""

    def draw(self, request: Request, count: int) -> tuple[Sequence[int], Sequence[float]]:
        """The next ``count`` tokens of ``request`` and their logprobs."""
        ...


def uniform(key: int, position: int) -> float:
    """``sampling.uniforms`` of one key and position, without arrays."""
    state = (key + position * _GOLDEN) & _MASK
    for _ in range(2):
        state = (state + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


class RepeatPolicy(SyntheticPolicy):
    """Every sample repeats a token of its own, as often as ``quantile`` says: lengths without words.

    ``quantile`` is the inverse distribution function of the length in tokens, the end token included. A
    sample's draw depends on its key alone; nothing is drawn per token, which is what makes it fast.
    """

    def __init__(
        self,
        quantile: Callable[[float], float],
        vocab_size: int = 256,
        max_model_len: int = 4096,
        num_blocks: int = 4096,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(vocab_size, float(vocab_size), max_model_len, num_blocks, shapes)
        self._quantile = quantile
        self._logprob = -math.log(vocab_size)

    def step(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        drawn = [self.draw(item.request, 1) for item in scheduled if item.samples]
        return StepOutput([tokens[0] for tokens, _ in drawn], [logprobs[0] for _, logprobs in drawn])

    def final_tokens(self, request: Request) -> int:
        if self._word(request) in request.stop_token_ids:
            return max(request.num_output_tokens + 1, request.sampling.min_tokens)
        return min(self._length(request), request.sampling.max_tokens)

    def begin(self, request: Request) -> None:
        """What it will say takes no more memory than it is worth."""
        request.token_ids = cast("list[int]", Runs(request.prompt_token_ids))
        request.logprobs = cast("list[float]", Runs())

    def draw(self, request: Request, count: int) -> tuple[Sequence[int], Sequence[float]]:
        ends = request.num_output_tokens + count >= self._length(request)
        tokens = Runs.of(self._word(request), count - ends)
        if ends:
            tokens.append(self.vocab_size - 1)
        return tokens, Runs.of(self._logprob, count)

    def _word(self, request: Request) -> int:
        return request.sample_key % (self.vocab_size - 1)

    def _length(self, request: Request) -> int:
        if self.vocab_size - 1 not in request.stop_token_ids:
            return _MASK
        return max(1, self._drawn_length(request), request.sampling.min_tokens)

    def _drawn_length(self, request: Request) -> int:
        return self._length_of(request.sample_key)

    def _length_of(self, key: int) -> int:
        return math.ceil(self._quantile(uniform(key, 0)))


def lognormal_quantile(median: float, sigma: float) -> Callable[[float], float]:
    """Inverse distribution function of a log-normal length; its mean is ``median * exp(sigma ** 2 / 2)``."""
    inverse = NormalDist().inv_cdf
    return lambda u: median * math.exp(sigma * inverse(min(max(u, 1e-12), 1 - 1e-12)))
