"""``/inference/v1/generate``: token ids in, token ids out, with the weight version of every token."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
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
from grpo_lab.engine.parameters import Parameters, Streaming, count, parameters_of, salt_of
from grpo_lab.engine.request import Request
from grpo_lab.engine.transcript import FLOOR, Entry, Scribe, Transcript, entries
from grpo_lab.engine.wire import Fields, answer, choice, invalid, read_body, refused, require_json

PREFIX = "generate-tokens-"


@dataclass(frozen=True, slots=True)
class _Wish:
    order: Order
    streaming: Streaming | None
    as_text: bool
    with_prompt: bool


class TokenRoutes:
    def __init__(self, context: Context) -> None:
        self._context = context
        self.table = {
            ("POST", "/inference/v1/generate"): self.generate,
            ("POST", "/inference/v1/abort_requests"): self.abort,
        }

    async def abort(self, http: HttpRequest) -> Response:
        body = await read_body(http)
        ids = body.data.get("request_ids")
        if not isinstance(ids, list):
            raise refused("Missing 'request_ids' in request body")
        await self._context.core.abort([str(name).removeprefix(PREFIX) for name in ids])
        return Response(status_code=200)

    async def generate(self, http: HttpRequest) -> Response:
        require_json(http)
        body = await read_body(http)
        wish, name = self._read(body, http)
        if wish.streaming is not None:
            progress = Progress()
            requests = submit(self._context, http, wish.order, progress.note)
            events = self._stream(name, wish, requests, progress, wish.streaming)
            return EventStream(self._context, http, requests, events)
        requests = await complete(self._context, http, wish.order)
        return answer(self._whole(name, wish, requests))

    def _read(self, body: Fields, http: HttpRequest) -> tuple[_Wish, str]:
        context, policy = self._context, self._context.core.policy
        prompt = body.token_ids("token_ids")
        if not prompt:
            message = "List should have at least 1 item after validation, not 0"
            ctx = "'field_type': 'List', 'min_length': 1, 'actual_length': 0"
            raise invalid("too_short", "body.token_ids", message, [], ctx)
        if min(prompt) < 0:
            message = "Value error, token_ids must not contain negative values"
            raise invalid("value_error", "body.token_ids", message, list(prompt))
        if "sampling_params" not in body.data:
            raise invalid("missing", "body.sampling_params", "Field required", body.data)
        params = Fields(body.object("sampling_params"), "body.sampling_params")
        mode = choice(body.text("output_mode", "tokens"), "body.output_mode", ("tokens", "text"))
        context.check_model(body)
        top = count(params, "logprobs", raw=False)
        limit = params.integer("max_tokens", None)
        parameters = parameters_of(
            params,
            max(policy.max_model_len - len(prompt), 1) if limit is None else limit,
            vocab_size=policy.vocab_size,
            top=top,
            prompt_top=count(params, "prompt_logprobs", raw=False),
        )
        parameters = _salted(parameters, body)
        if parameters.n > context.core.config.max_num_seqs:
            limit_seqs = context.core.config.max_num_seqs
            raise refused(
                f"sampling_params.n must be at most the server's max_num_seqs ({limit_seqs}), "
                f"got {parameters.n}."
            )
        if mode == "text" or parameters.stops:
            context.tokenizer()
        name = request_id_of(http, body.text("request_id", None))
        order = Order((prompt,), (name,), parameters, ranks=top is not None)
        wish = _Wish(order, Streaming.of(body), mode == "text", body.flag("return_token_ids"))
        return wish, PREFIX + name

    # --- one answer -----------------------------------------------------------------------------------

    def _whole(self, name: str, wish: _Wish, requests: list[Request]) -> dict[str, Any]:
        context, parameters = self._context, wish.order.parameters
        choices = []
        for index, request in enumerate(requests):
            script = Transcript(request, context.text if wish.as_text else None, parameters)
            places = script.take()
            text = script.text if wish.as_text else None
            row = self._choice(index, request, places, wish, text)
            row["finish_reason"] = row["finish_reason"] or "stop"
            choices.append(row)
        return {
            "request_id": name,
            "model": context.model,
            "created": context.created,
            "usage": full_usage(requests, parameters.n),
            "prompt_logprobs": Scribe(context.text).prompt(requests[0], parameters.prompt_top),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": list(wish.order.prompts[0]) if wish.with_prompt else None,
            "mm_placeholders": {} if wish.with_prompt else None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "text" if wish.as_text else "tokens",
            "choices": choices,
        }

    def _choice(
        self, index: int, request: Request, places: range, wish: _Wish, text: str | None
    ) -> dict[str, Any]:
        top = wish.order.parameters.top
        logprobs: dict[str, Any] | None = None
        if top is not None and wish.as_text:
            logprobs = Scribe(self._context.text).chat(request, places, top if top < 0 else max(top, 1))
        elif top is not None:
            logprobs = {"content": [self._content(request, place, top) for place in places]}
        output = request.output_token_ids
        return {
            "index": index,
            "finish_reason": request.finish_reason,
            "stop_reason": request.stop_reason,
            "token_ids": output[places.start : places.stop],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": self._versions(request) if request.finish_reason is not None else None,
            **({} if text is None else {"text": text}),
            "logprobs": logprobs,
        }

    def _versions(self, request: Request) -> list[dict[str, Any]]:
        """vLLM's three fields of every span; unless faithful, also what KV the tokens attended to."""
        rows: list[dict[str, Any]] = []
        for span in request.spans:
            row = {"version": span.identity.label, "start": span.start, "end": span.end}
            if not self._context.faithful:
                row["kv_version"] = span.kv[1]
            elif rows and rows[-1]["version"] == row["version"]:
                rows[-1]["end"] = span.end
                continue
            rows.append(row)
        return rows

    def _content(self, request: Request, place: int, top: int) -> dict[str, Any]:
        found = entries(request, place, top)
        shown = found if top < 0 else found[: max(top, 1)]
        return {**self._numbers(found[0]), "top_logprobs": [self._numbers(entry) for entry in shown]}

    def _numbers(self, entry: Entry) -> dict[str, Any]:
        """Integer ids. A NaN is vLLM's floor without a rank; strictly it stays, and the answer is a 400."""
        token, logprob, rank = entry
        if math.isnan(logprob):
            return {"token_id": token, "logprob": FLOOR if self._context.faithful else logprob, "rank": None}
        return {"token_id": token, "logprob": max(logprob, FLOOR), "rank": rank}

    # --- a stream -------------------------------------------------------------------------------------

    async def _stream(
        self,
        name: str,
        wish: _Wish,
        requests: list[Request],
        progress: Progress,
        streaming: Streaming,
    ) -> AsyncIterator[dict[str, Any]]:
        mode = "text" if wish.as_text else "tokens"
        prompt = wish.order.prompts[0]
        text_of = self._context.text if wish.as_text else None
        scripts = [Transcript(request, text_of, wish.order.parameters) for request in requests]
        told = False
        async for news in progress_of(requests, progress):
            for place in news:
                script, request = scripts[place], requests[place]
                waiting = request.num_output_tokens - script.taken
                if script.taken and request.finish_reason is None and waiting < streaming.interval:
                    continue
                places = script.take()
                text = script.delta() if wish.as_text else None
                counts = usage(len(prompt), script.taken) if streaming.running_usage else None
                chunk: dict[str, Any] = {"request_id": name, "usage": counts}
                if wish.with_prompt and not told:
                    told = True
                    chunk |= {"prompt_token_ids": list(prompt), "mm_placeholders": {}}
                choices = [self._choice(place, request, places, wish, text)]
                yield {**chunk, "output_mode": mode, "choices": choices}
        if streaming.usage:
            counts = usage(len(prompt), sum(request.num_output_tokens for request in requests))
            yield {"request_id": name, "usage": counts, "output_mode": mode, "choices": []}


def _salted(parameters: Parameters, body: Fields) -> Parameters:
    """The salt is a field of the request here, not of its sampling parameters."""
    return replace(parameters, salt=salt_of(body))
