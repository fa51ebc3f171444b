"""``/v1/completions`` and ``/v1/models`` as vLLM serves them, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from grpo_lab.engine.context import Context, full_usage, usage
from grpo_lab.engine.generation import (
    EventStream,
    Order,
    Progress,
    complete,
    progress_of,
    request_id_of,
    submit,
)
from grpo_lab.engine.parameters import Parameters, Streaming, check_context, count, parameters_of, truncated
from grpo_lab.engine.request import Request
from grpo_lab.engine.transcript import Scribe, Transcript, output_rows, prompt_rows
from grpo_lab.engine.wire import Fields, answer, invalid, read_body, refused, require_json

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024  # VLLM_MAX_COMPLETION_PROMPTS


@dataclass(frozen=True, slots=True)
class _Wish:
    """One /v1/completions request, read and checked."""

    order: Order
    streaming: Streaming | None
    with_ids: bool
    echo: bool
    echo_only: bool
    as_ids: bool
    prompt_logprobs: bool

    @property
    def parameters(self) -> Parameters:
        return self.order.parameters


class OpenAiRoutes:
    def __init__(self, context: Context) -> None:
        self._context = context
        self.table = {
            ("GET", "/v1/models"): self.models,
            ("POST", "/v1/completions"): self.completions,
        }

    async def models(self, http: HttpRequest) -> Response:
        context = self._context
        created = context.created
        permission = {
            "id": "modelperm-0",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": context.model,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": context.model,
            "parent": None,
            "max_model_len": context.core.policy.max_model_len,
            "permission": [permission],
        }
        return answer({"object": "list", "data": [model]})

    async def completions(self, http: HttpRequest) -> Response:
        require_json(http)
        body = await read_body(http)
        wish = self._wish(body, http)
        name = wish.order.names[0].rpartition("-")[0]
        if wish.streaming is not None:
            progress = Progress()
            requests = submit(self._context, http, wish.order, progress.note)
            events = self._stream(name, wish, requests, progress, wish.streaming)
            return EventStream(self._context, http, requests, events)
        requests = await complete(self._context, http, wish.order)
        scribe = Scribe(self._context.text, wish.as_ids)
        choices = [self._choice(index, request, wish, scribe) for index, request in enumerate(requests)]
        return answer(self._envelope(name, choices, full_usage(requests, wish.parameters.n)))

    # --- requests -------------------------------------------------------------------------------------

    def _wish(self, body: Fields, http: HttpRequest) -> _Wish:
        streaming = Streaming.of(body)
        top, prompt_top = count(body, "logprobs"), count(body, "prompt_logprobs")
        if streaming and prompt_top not in (None, 0):
            raise refused("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        prompt = body.data.get("prompt")
        if prompt is None or prompt == "":
            raise refused("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        limit = body.integer("max_tokens", DEFAULT_MAX_TOKENS)
        self._context.check_model(body)
        check_context(self._context.core.policy, limit, "max_tokens")
        echo = body.flag("echo")
        parameters = parameters_of(
            body,
            1 if echo and limit == 0 else limit,
            vocab_size=self._context.core.policy.vocab_size,
            top=top,
            prompt_top=top if prompt_top is None and echo else prompt_top,
        )
        prompts = tuple(
            truncated(ids, body, self._context.core.policy) for ids in self._prompts(prompt, body)
        )
        if parameters.stops:
            self._context.tokenizer()
        name = f"cmpl-{request_id_of(http, body.text('request_id', None))}"
        order = Order(prompts, tuple(f"{name}-{index}" for index in range(len(prompts))), parameters)
        return _Wish(
            order=replace(order, ranks=parameters.prompt_top is not None),
            streaming=streaming,
            with_ids=body.flag("return_token_ids"),
            echo=echo,
            echo_only=echo and limit == 0,
            as_ids=body.flag("return_tokens_as_token_ids"),
            prompt_logprobs=parameters.prompt_top is not None,
        )

    def _prompts(self, prompt: Any, body: Fields) -> list[tuple[int, ...]]:
        """Text, token ids, or a list of either."""
        special = body.flag("add_special_tokens", True)
        if isinstance(prompt, str):
            return [self._context.encode(prompt, special)]
        if isinstance(prompt, list) and prompt:
            if all(type(token) is int for token in prompt):
                self._not_negative(prompt)
                return [tuple(prompt)]
            if len(prompt) > MAX_PROMPTS:
                message = (
                    f"prompt list length {len(prompt)} exceeds the maximum allowed count of {MAX_PROMPTS}. "
                )
                fix = "To increase this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable."
                raise refused(message + fix, "prompt")
            if all(isinstance(item, str | list) and item for item in prompt):
                return [ids for item in prompt for ids in self._prompts(item, body)]
        raise invalid("list_type", "body.prompt", "Input should be text or a list of token ids", prompt)

    @staticmethod
    def _not_negative(prompt: Sequence[int]) -> None:
        for index, token in enumerate(prompt):
            if token < 0:
                message, context = "Input should be greater than or equal to 0", "'ge': 0"
                raise invalid("greater_than_equal", f"body.prompt.{index}", message, token, context)

    # --- one answer -----------------------------------------------------------------------------------

    def _choice(self, index: int, request: Request, wish: _Wish, scribe: Scribe) -> dict[str, Any]:
        script = Transcript(request, self._context.text, wish.parameters)
        places = script.take()
        top, prompt_top = wish.parameters.top, wish.parameters.prompt_top
        rows: list[Any] = []
        text = script.text
        if top is not None:
            rows = [] if wish.echo_only else list(output_rows(request, places, top))
        if wish.echo:
            text = self._echo(request, wish) + ("" if wish.echo_only else text)
            rows = prompt_rows(request, top) + rows if top is not None else rows
        return {
            "index": index,
            "text": text,
            "logprobs": None if top is None else scribe.completion(rows, top)[0],
            "finish_reason": request.finish_reason,
            "stop_reason": request.stop_reason,
            "token_ids": request.output_token_ids if wish.with_ids else None,
            "prompt_logprobs": scribe.prompt(request, prompt_top),
            "prompt_token_ids": list(request.prompt_token_ids) if wish.with_ids else None,
            "routed_experts": None,
        }

    def _echo(self, request: Request, wish: _Wish) -> str:
        return "" if wish.with_ids else self._context.decode(request.prompt_token_ids, False)

    def _envelope(self, name: str, choices: list[Any], counts: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._context.head(name, "text_completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._context.fingerprint,
            "usage": counts,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    # --- a stream -------------------------------------------------------------------------------------

    async def _stream(
        self,
        name: str,
        wish: _Wish,
        requests: list[Request],
        progress: Progress,
        streaming: Streaming,
    ) -> AsyncIterator[dict[str, Any]]:
        context = self._context
        head = context.head(name, "text_completion")
        tellers = [
            _Teller(index, request, wish, context, streaming.interval)
            for index, request in enumerate(requests)
        ]
        async for news in progress_of(requests, progress):
            for place in news:
                choice = tellers[place].chunk()
                if choice is None:
                    continue
                chunk = {**head, "choices": [choice]}
                request = requests[place]
                if streaming.running_usage:
                    chunk["usage"] = usage(request.num_prompt_tokens, tellers[place].script.taken)
                if request.finish_reason is not None and not streaming.usage:
                    chunk["system_fingerprint"] = context.fingerprint
                yield chunk
        if streaming.usage:
            counts = full_usage(requests, wish.parameters.n)
            shown = {key: value for key, value in counts.items() if value is not None}
            yield {**head, "choices": [], "usage": shown, "system_fingerprint": context.fingerprint}


class _Teller:
    """Chunks of one streamed choice."""

    def __init__(self, index: int, request: Request, wish: _Wish, context: Context, interval: int) -> None:
        self.script = Transcript(request, context.text, wish.parameters)
        self._index, self._request, self._wish, self._context = index, request, wish, context
        self._interval = interval
        self._scribe = Scribe(context.text, wish.as_ids)
        self._offset = 0
        self._begun = False

    def chunk(self) -> dict[str, Any] | None:
        """The next choice, or None where vLLM sends nothing (a sequence that ends before its first token)."""
        request, wish = self._request, self._wish
        waiting = request.num_output_tokens - self.script.taken
        if self._begun and request.finish_reason is None and waiting < self._interval:
            return None
        taken = self.script.taken
        places = self.script.take()
        text = self.script.delta()
        echo = wish.echo and not self._begun
        if not echo and not places and not text and not taken:
            return None
        top = wish.parameters.top
        rows: list[Any] = [] if top is None or wish.echo_only else list(output_rows(request, places, top))
        if echo:
            prompt = "" if wish.with_ids else self._context.decode(request.prompt_token_ids, False)
            text = prompt + ("" if wish.echo_only else text)
            rows = prompt_rows(request, top) + rows if top is not None else rows
        logprobs = None
        if top is not None:
            logprobs, self._offset = self._scribe.completion(rows, top, self._offset)
        told_prompt = (wish.with_ids or wish.echo) and not self._begun
        self._begun = True
        output = request.output_token_ids
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": request.finish_reason,
            "stop_reason": request.stop_reason,
            "prompt_token_ids": list(request.prompt_token_ids) if told_prompt else None,
            "token_ids": output[places.start : places.stop] if wish.with_ids else None,
        }
