"""OpenAI's routes as vLLM serves them: completions, chat completions, models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.generation import Order, count_of, generate, request_id_of, sampling_of
from grpo_lab.engine.request import Request
from grpo_lab.engine.routes_tokens import usage_of
from grpo_lab.engine.text import Text
from grpo_lab.engine.wire import ApiError, Fields, answer, invalid, read_body
from grpo_lab.errors import ModelError

DEFAULT_MAX_TOKENS = 16
MAX_TOP_LOGPROBS = 20
MAX_CHARACTERS_PER_TOKEN = 256  # no vocabulary's tokens are that long: such a text needs no tokenizer


class OpenAiRoutes:
    """``text`` may be None for an engine without a tokenizer: then prompts are token ids only."""

    def __init__(self, core: EngineCore, model: str, text: Text | None) -> None:
        self._core, self._model, self._text = core, model, text
        self.table = {
            ("GET", "/v1/models"): self.models,
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/v1/chat/completions"): self.chat,
        }

    async def models(self, http: HttpRequest) -> Response:
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "grpo_lab",
            "root": self._model,
            "parent": None,
            "max_model_len": self._core.policy.max_model_len,
        }
        return answer({"object": "list", "data": [model]})

    async def completions(self, http: HttpRequest) -> Response:
        body = await self._body(http)
        prompts = self._prompts(body.data.get("prompt"))
        n, name = count_of(body), f"cmpl-{request_id_of(http)}"
        wanted = body.integer("logprobs", None)
        order = Order(
            prompts=prompts,
            sampling=sampling_of(body, DEFAULT_MAX_TOKENS),
            request_ids=tuple(f"{name}-{index}" for index in range(len(prompts) * n)),
            n=n,
            stop_strings=self._stops(body),
            top_logprobs=_top(wanted),
        )
        requests = await generate(self._core, http, order)
        with_ids = body.flag("return_token_ids")
        choices = []
        for index, request in enumerate(requests):
            row = self._common(request, index, with_ids)
            row["text"] = self._output(request)
            row["logprobs"] = self._completion_logprobs(request) if wanted is not None else None
            row["prompt_logprobs"] = None
            row["prompt_token_ids"] = list(request.prompt_token_ids) if with_ids else None
            choices.append(row)
        usage = _usage(requests, n)
        return answer(self._envelope(name, "text_completion", choices, usage))

    async def chat(self, http: HttpRequest) -> Response:
        body = await self._body(http)
        prompt = self._chat_prompt(body)
        n, name = count_of(body), f"chatcmpl-{request_id_of(http)}"
        with_logprobs = body.flag("logprobs")
        limit = body.integer("max_completion_tokens", None) or body.integer("max_tokens", None)
        room = max(self._core.policy.max_model_len - len(prompt), 1)
        order = Order(
            prompts=(prompt,),
            sampling=sampling_of(body, room, room if limit is None else limit),
            request_ids=(name,) if n == 1 else tuple(f"{name}-{index}" for index in range(n)),
            n=n,
            stop_strings=self._stops(body),
            top_logprobs=_top(body.integer("top_logprobs", 0)) if with_logprobs else 0,
        )
        requests = await generate(self._core, http, order)
        with_ids = body.flag("return_token_ids")
        choices = []
        for index, request in enumerate(requests):
            row = self._common(request, index, with_ids)
            row["message"] = {"role": "assistant", "content": self._output(request), "tool_calls": []}
            row["logprobs"] = {"content": self._chat_logprobs(request)} if with_logprobs else None
            choices.append(row)
        envelope = self._envelope(name, "chat.completion", choices, _usage(requests, n))
        envelope["prompt_logprobs"] = None
        envelope["prompt_token_ids"] = list(prompt) if with_ids else None
        return answer(envelope)

    # --- requests -------------------------------------------------------------------------------------

    async def _body(self, http: HttpRequest) -> Fields:
        body = await read_body(http)
        model = body.text("model", self._model)
        if model != self._model:
            raise ApiError(404, f"The model `{model}` does not exist.", "model")
        if body.flag("stream"):
            raise ApiError(400, "stream is not supported by this engine; leave it out", "stream")
        return body

    def _prompts(self, prompt: Any) -> tuple[tuple[int, ...], ...]:
        """Text, token ids, or a list of either."""
        if isinstance(prompt, str):
            return (self._encode(prompt),)
        if isinstance(prompt, list) and prompt:
            if all(type(token) is int for token in prompt):
                return (tuple(prompt),)
            if all(isinstance(item, str | list) and item for item in prompt):
                return tuple(ids for item in prompt for ids in self._prompts(item))
        if prompt is None:
            raise invalid("missing", "body.prompt", "Field required", None)
        raise invalid("list_type", "body.prompt", "Input should be text or a list of token ids", prompt)

    def _chat_prompt(self, body: Fields) -> tuple[int, ...]:
        messages = body.data.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
        variables = {
            "add_generation_prompt": body.flag("add_generation_prompt", True),
            "tools": body.data.get("tools"),
            **body.object("chat_template_kwargs", {}),
        }
        try:
            rendered = self._known_text().render_chat(messages, **variables)
        except (ValueError, ModelError) as error:
            raise ApiError(400, str(error), "messages") from error
        return self._encode(rendered, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        limit = self._core.policy.max_model_len
        if len(text) > MAX_CHARACTERS_PER_TOKEN * limit:
            message = f"The prompt has {len(text)} characters; a context of {limit} tokens leaves no room"
            raise ApiError(400, message, "prompt")
        try:
            return tuple(self._known_text().encode(text, add_special_tokens))
        except (ModelError, ValueError) as error:
            raise ApiError(400, str(error)) from error

    def _known_text(self) -> Text:
        if self._text is None:
            raise ApiError(400, "this engine has no tokenizer; send token ids")
        return self._text

    def _stops(self, body: Fields) -> tuple[str, ...]:
        stops = body.texts("stop")
        if "" in stops:
            raise ApiError(400, "stop cannot contain an empty string.", "stop")
        if stops:
            self._known_text()
        return stops

    # --- answers --------------------------------------------------------------------------------------

    def _output(self, request: Request) -> str:
        return request.text if request.text is not None else self._decode(request.output_token_ids)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Best effort: token ids are the answer, and a model without a tokenizer has no text."""
        if self._text is None:
            return ""
        try:
            return self._text.decode(token_ids, skip_special_tokens)
        except ModelError:
            return ""

    def _common(self, request: Request, index: int, with_ids: bool) -> dict[str, Any]:
        return {
            "index": index,
            "finish_reason": request.finish_reason,
            "stop_reason": request.stop_reason,
            "token_ids": request.output_token_ids if with_ids else None,
            "routed_experts": None,
        }

    def _envelope(self, name: str, kind: str, choices: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": name,
            "object": kind,
            "created": int(asyncio.get_running_loop().time() - time.monotonic() + time.time()),
            "model": self._model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage,
            "kv_transfer_params": None,
        }

    def _completion_logprobs(self, request: Request) -> dict[str, Any]:
        tokens = [self._decode([token], False) for token in request.output_token_ids]
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        top = []
        for index, logprob in enumerate(request.logprobs):
            row = {self._decode([t], False): p for t, p in (request.top[index] if request.top else [])}
            row.setdefault(tokens[index], logprob)  # the sampled token is always among them
            top.append(row)
        return {
            "text_offset": offsets,
            "token_logprobs": list(request.logprobs),
            "tokens": tokens,
            "top_logprobs": top,
        }

    def _chat_logprobs(self, request: Request) -> list[dict[str, Any]]:
        rows = []
        for index, (token, logprob) in enumerate(
            zip(request.output_token_ids, request.logprobs, strict=True)
        ):
            row = self._chat_token(token, logprob)
            row["top_logprobs"] = [
                self._chat_token(*pair) for pair in (request.top[index : index + 1] or [[]])[0]
            ]
            rows.append(row)
        return rows

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token], False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(requests: list[Request], n: int) -> dict[str, Any]:
    usage = usage_of(requests)
    usage["prompt_tokens"] //= n  # OpenAI counts a prompt once, whatever n is
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return usage


def _top(wanted: int | None) -> int:
    if wanted is not None and not 0 <= wanted <= MAX_TOP_LOGPROBS:
        raise ApiError(400, f"logprobs={wanted}: must be from 0 to {MAX_TOP_LOGPROBS}", "logprobs")
    return wanted or 0
