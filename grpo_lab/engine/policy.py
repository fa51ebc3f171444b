"""Where tokens come from: the seam between the engine and a model, and a source without any maths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from grpo_lab.engine.request import PromptScore, Request, Scheduled, StepOutput
from grpo_lab.engine.sampling import uniforms


class Policy(Protocol):
    """A tokens' source. Sync; the engine never calls two methods that touch served weights at once.

    Weights are double-buffered: ``staging`` gives named tensors to write a new set into while the old
    one is served, ``activate`` swaps the two, which is the only moment at which served weights change.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def tied(self) -> Mapping[str, str]:
        """Names that share another parameter's memory, and whose."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """The served weights by Hugging Face name (read only)."""
        ...

    def step(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        """Computes the scheduled tokens; draws one token for each item with ``samples``."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability at temperature 1 of every token but the first of each sequence."""
        ...

    def staging(self) -> Mapping[str, Tensor]: ...
    def activate(self) -> None: ...


def load(policy: Policy, state: Mapping[str, Tensor]) -> None:
    """Replaces the whole set of weights at once. Raises ``ValueError`` naming what does not fit."""
    target = policy.staging()
    given = {name: tensor for name, tensor in state.items() if name not in policy.tied}
    missing, extra = sorted(target.keys() - given), sorted(given.keys() - target.keys())
    if missing or extra:
        raise ValueError(f"weights do not fit the model: missing {missing[:5]}, extra {extra[:5]}")
    for name, tensor in given.items():
        if tensor.shape != target[name].shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {tuple(target[name].shape)}")
        target[name].copy_(tensor.detach())
    policy.activate()


class SyntheticPolicy:
    """Tokens and lengths drawn from the sample's key alone, without a model.

    Lengths are geometric with mean ``mean_tokens`` (the end token has the same chance at each place);
    every other token is uniform. ``shapes`` are the parameters that it pretends to have.
    """

    tied: Mapping[str, str] = {}

    def __init__(
        self,
        vocab_size: int = 256,
        mean_tokens: float = 64.0,
        max_model_len: int = 4096,
        num_blocks: int = 4096,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        if vocab_size < 2 or mean_tokens < 1:
            raise ValueError(f"vocab_size={vocab_size}, mean_tokens={mean_tokens}: need at least 2 and 1")
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.eos_token_ids = (vocab_size - 1,)
        self._stop = 1.0 / mean_tokens
        names = shapes if shapes is not None else {"weight": (1,)}
        self._served = {name: torch.zeros(shape) for name, shape in names.items()}
        self._staging = {name: torch.zeros(shape) for name, shape in names.items()}

    def parameters(self) -> Mapping[str, Tensor]:
        return self._served

    def step(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        requests = [item.request for item in scheduled if item.samples]
        draws = uniforms([r.sample_key for r in requests], [len(r.token_ids) for r in requests])
        tokens, logprobs = [], []
        for request, u in zip(requests, draws.tolist(), strict=True):
            may_stop = request.num_output_tokens >= request.sampling.min_tokens
            stop = self._stop if may_stop else 0.0
            tokens.append(self._token(u, stop))
            chance = stop if tokens[-1] == self.vocab_size - 1 else (1 - stop) / (self.vocab_size - 1)
            logprobs.append(math.log(chance))
            if request.extras.prompt_logprobs is not None and request.prompt_scores is None:
                scores = self.score([request.prompt_token_ids])[0]
                request.prompt_scores = [PromptScore(score, 1, []) for score in scores]
        return StepOutput(tokens, logprobs)

    def outputs(self, request: Request, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Output tokens from ``start`` on and their logprobs, each [count], as ``step`` draws them."""
        places, first = np.arange(start, start + count), request.num_prompt_tokens + start
        u = uniforms([request.sample_key] * count, range(first, first + count))
        stop = np.where(places >= request.sampling.min_tokens, self._stop, 0.0)
        others = self.vocab_size - 1
        drawn = np.minimum(((u - stop) / (1 - stop) * others).astype(np.int64), others - 1)
        ends = u < stop
        with np.errstate(divide="ignore"):  # of an end that cannot be drawn
            logprobs = np.where(ends, np.log(stop), np.log((1 - stop) / others))
        return np.where(ends, others, drawn), logprobs

    def begin(self, request: Request) -> None:
        """``request`` has been taken in, and nothing of it computed."""

    def draw(self, request: Request, count: int) -> tuple[Sequence[int], Sequence[float]]:
        """The next ``count`` tokens of ``request`` and their logprobs."""
        tokens, logprobs = self.outputs(request, request.num_output_tokens, count)
        return tokens.tolist(), logprobs.tolist()

    def final_tokens(self, request: Request) -> int:
        """How many output tokens ``request`` will have: to its first stop token, or ``max_tokens``."""
        most, start, count = request.sampling.max_tokens, request.num_output_tokens, 64
        stops = sorted(request.stop_token_ids)
        while stops and start < most:
            count = min(count, most - start)
            found = np.flatnonzero(np.isin(self.outputs(request, start, count)[0], stops)) + start + 1
            found = found[found >= request.sampling.min_tokens]
            if found.size:
                return int(found[0])
            start, count = start + count, 2 * count
        return most

    def _token(self, u: float, stop: float) -> int:
        if u < stop:
            return self.vocab_size - 1
        return min(int((u - stop) / (1 - stop) * (self.vocab_size - 1)), self.vocab_size - 2)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        other = math.log((1 - self._stop) / (self.vocab_size - 1))
        end = math.log(self._stop)
        return [[end if token in self.eos_token_ids else other for token in ids[1:]] for ids in sequences]

    def staging(self) -> Mapping[str, Tensor]:
        return self._staging

    def activate(self) -> None:
        self._served, self._staging = self._staging, self._served
