"""Books the tokens of a step: spans, logprobs, the end of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_lab.engine.policy import Policy
from grpo_lab.engine.request import FinishReason, Request, Span, StepOutput, WeightIdentity
from grpo_lab.engine.scheduler import Scheduler, StepPlan
from grpo_lab.engine.settings import Counters

Decode = Callable[[Sequence[int]], str]


class TokenBook:
    """``decode`` turns token ids into text, for stop strings; without it they never match."""

    def __init__(
        self, policy: Policy, scheduler: Scheduler, counters: Counters, decode: Decode | None
    ) -> None:
        self._policy, self._scheduler, self._counters = policy, scheduler, counters
        self.decode = decode

    def apply(
        self, plan: StepPlan, output: StepOutput, identity: WeightIdentity, step: int, now_s: float
    ) -> list[Request]:
        """Books step number ``step``, which ran under ``identity``; returns the requests that it ended."""
        finished: list[Request] = []
        row = 0
        for item in plan.scheduled:
            request, samples = item.request, item.samples
            if request.finish_reason is None:  # else it was aborted during the step
                self._computed(request, item.count, identity)
                if samples:
                    self._append(request, output, row, identity, step, now_s)
                    request.finish_reason = self.ending(request)
                    if request.finish_reason is not None:
                        finished.append(request)
                    elif request.extras.on_token is not None:
                        request.extras.on_token()
            row += samples
        self._counters.steps += 1
        return finished

    def apply_decodes(
        self,
        request: Request,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        identity: WeightIdentity,
        step: int,
        now_s: float,
    ) -> None:
        """Books tokens that ``request`` drew one a step up to number ``step``, continuing its newest span."""
        request.token_ids += token_ids
        request.logprobs += logprobs
        request.last_token_s = now_s
        span = request.spans[-1]
        span.end, span.last_step = span.end + len(token_ids), step
        self._counters.generation_tokens += len(token_ids)
        pure = request.kv_weights == identity.weights
        self._scheduler.commit(request, len(token_ids), identity.weights, reusable=pure)
        if request.extras.on_token is not None:
            request.extras.on_token()

    def _computed(self, request: Request, count: int, identity: WeightIdentity) -> None:
        if request.kv_weights is None:
            request.kv_weights = identity.weights
        if request.num_output_tokens == 0:
            self._counters.prompt_tokens += count
        pure = request.kv_weights == identity.weights
        self._scheduler.commit(request, count, identity.weights, reusable=pure)

    def _append(
        self,
        request: Request,
        output: StepOutput,
        row: int,
        identity: WeightIdentity,
        step: int,
        now_s: float,
    ) -> None:
        position = request.num_output_tokens
        request.token_ids.append(output.token_ids[row])
        request.logprobs.append(output.logprobs[row])
        if request.top_logprobs:
            request.top.append(output.top.get(row, []))
        if request.extras.ranks:
            request.ranks.append(output.ranks.get(row, 1))
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        self._counters.generation_tokens += 1
        kv = request.kv_weights or identity.weights
        last = request.spans[-1] if request.spans else None
        if last is not None and last.identity == identity and last.kv == kv:
            last.end, last.last_step = position + 1, step
        else:
            request.spans.append(Span(identity, position, position + 1, step, step, kv))

    def ending(self, request: Request) -> FinishReason | None:
        """Why the newest token ends ``request``, if it does."""
        token, sampling = request.token_ids[-1], request.sampling
        if request.num_output_tokens >= sampling.min_tokens:
            if token in request.stop_token_ids:
                request.stop_reason = None if token in self._policy.eos_token_ids else token
                return "stop"
            if request.stop_strings and self.decode is not None and self._cut(request, self.decode):
                return "stop"
        return "length" if request.num_output_tokens >= sampling.max_tokens else None

    @staticmethod
    def _cut(request: Request, decode: Decode) -> bool:
        """Ends the text before the first stop string in it; token ids stay whole, as in vLLM."""
        text = decode(request.output_token_ids)
        places = [(text.find(stop), stop) for stop in request.stop_strings if stop in text]
        if not places:
            return False
        place, request.stop_reason = min(places)
        request.text = text[:place]
        return True
