"""``/inference/v1/generate``: token ids in, token ids out, with the weight version of every token."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.generation import Order, generate, request_id_of, sampling_of
from grpo_lab.engine.request import Request
from grpo_lab.engine.wire import ApiError, Fields, answer, read_body

DEFAULT_MAX_TOKENS = 16


class TokenRoutes:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.table = {("POST", "/inference/v1/generate"): self.generate}

    async def generate(self, http: HttpRequest) -> Response:
        body = await read_body(http)
        prompt = body.token_ids("token_ids")
        params = Fields(body.object("sampling_params", {}), "body.sampling_params")
        if params.integer("n", 1) != 1:
            raise ApiError(400, "n > 1 is not supported by this route; send one request per sample")
        if body.flag("stream"):
            raise ApiError(400, "stream is not supported by this engine; leave it out")
        wanted = params.integer("logprobs", None)
        request_id = body.text("request_id", None) or request_id_of(http)
        order = Order(
            prompts=(prompt,),
            sampling=sampling_of(params, DEFAULT_MAX_TOKENS),
            request_ids=(request_id,),
            top_logprobs=max(wanted or 0, 0),
        )
        (request,) = await generate(self._core, http, order)
        return answer(
            {
                "request_id": f"generate-tokens-{request_id}",
                "usage": usage_of([request]),
                "output_mode": "tokens",
                "choices": [_choice(request, wanted is not None)],
            }
        )


def usage_of(requests: list[Request]) -> dict[str, Any]:
    """Token counts; a prompt with several samples is counted once per sample's request."""
    prompt = sum(request.num_prompt_tokens for request in requests)
    completion = sum(request.num_output_tokens for request in requests)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _choice(request: Request, logprobs: bool) -> dict[str, Any]:
    tokens = request.output_token_ids
    return {
        "index": 0,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "token_ids": tokens,
        "routed_experts": None,
        "sampling_mask": None,
        # vLLM's three fields, and what KV the tokens attended to.
        "weight_versions": [
            {
                "version": span.identity.label,
                "start": span.start,
                "end": span.end,
                "kv_version": span.kv[1],
            }
            for span in request.spans
        ],
        "logprobs": {"content": _content(request, tokens)} if logprobs else None,
    }


def _content(request: Request, tokens: list[int]) -> list[dict[str, Any]]:
    content = []
    for index, (token, logprob) in enumerate(zip(tokens, request.logprobs, strict=True)):
        top = request.top[index] if request.top else [(token, logprob)]
        content.append(
            {
                "token_id": token,
                "logprob": logprob,
                "top_logprobs": [{"token_id": other, "logprob": value} for other, value in top],
            }
        )
    return content
