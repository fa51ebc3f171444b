"""``/v1/chat/completions`` as vLLM serves it, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
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
from grpo_lab.engine.parameters import Streaming, check_context, count, parameters_of, truncated
from grpo_lab.engine.request import Request
from grpo_lab.engine.transcript import Scribe, Transcript
from grpo_lab.engine.wire import Fields, answer, invalid, read_body, refused, require_json
from grpo_lab.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Chat:
    order: Order
    streaming: Streaming | None
    with_ids: bool
    logprobs: bool
    as_ids: bool
    role: str
    echo: str
    prompt_text: str | None


class ChatRoutes:
    def __init__(self, context: Context) -> None:
        self._context = context
        self.table = {("POST", "/v1/chat/completions"): self.chat}

    async def chat(self, http: HttpRequest) -> Response:
        require_json(http)
        body = await read_body(http)
        chat = self._read(body, http)
        name = chat.order.names[0]
        if chat.streaming is not None:
            progress = Progress()
            requests = submit(self._context, http, chat.order, progress.note)
            events = self._stream(name, chat, requests, progress, chat.streaming)
            return EventStream(self._context, http, requests, events)
        requests = await complete(self._context, http, chat.order)
        return answer(self._whole(name, chat, requests))

    def _read(self, body: Fields, http: HttpRequest) -> _Chat:
        context, policy = self._context, self._context.core.policy
        streaming = Streaming.of(body)
        prompt_top, wanted = count(body, "prompt_logprobs"), count(body, "top_logprobs") or 0
        logprobs = body.flag("logprobs")
        if streaming and prompt_top not in (None, 0):
            raise refused("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if wanted and not logprobs:
            raise refused("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        _refuse_tools(body)
        messages = body.data.get("messages")
        if messages is None:
            raise invalid("missing", "body.messages", "Field required", body.data)
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
        context.check_model(body)
        rendered = self._render(messages, body)
        prompt = truncated(context.encode(rendered, body.flag("add_special_tokens")), body, policy)
        named = "max_completion_tokens"
        limit = body.integer(named, None)
        if limit is None:
            named, limit = "max_tokens", body.integer("max_tokens", None)
        check_context(policy, limit or 0, named)
        room = max(policy.max_model_len - len(prompt), 1)
        parameters = parameters_of(
            body,
            room if limit is None else limit,
            vocab_size=policy.vocab_size,
            top=wanted if logprobs else None,
            prompt_top=prompt_top,
        )
        name = f"chatcmpl-{request_id_of(http, body.text('request_id', None))}"
        role = "assistant" if body.flag("add_generation_prompt", True) else messages[-1].get("role", "")
        same_role = bool(messages) and messages[-1].get("role") == role
        return _Chat(
            order=Order((prompt,), (name,), parameters, ranks=prompt_top is not None),
            streaming=streaming,
            with_ids=body.flag("return_token_ids"),
            logprobs=logprobs,
            as_ids=body.flag("return_tokens_as_token_ids"),
            role=role,
            echo=str(messages[-1].get("content") or "") if body.flag("echo") and same_role else "",
            prompt_text=rendered if body.flag("return_prompt_text") else None,
        )

    def _render(self, messages: list[Any], body: Fields) -> str:
        if body.data.get("chat_template"):
            raise refused(
                "Chat template is passed with request, but --trust-request-chat-template is not set. "
                "Refused request with untrusted chat template."
            )
        if body.flag("continue_final_message"):
            raise refused("This engine does not offer continue_final_message", "continue_final_message")
        variables = {
            "add_generation_prompt": body.flag("add_generation_prompt", True),
            "tools": body.data.get("tools"),
            "documents": body.data.get("documents"),
            **body.object("chat_template_kwargs", {}),
        }
        try:
            return self._context.tokenizer().render_chat(_as_text(messages), **variables)
        except (ValueError, ModelError) as error:
            raise refused(str(error)) from error

    # --- one answer -----------------------------------------------------------------------------------

    def _whole(self, name: str, chat: _Chat, requests: list[Request]) -> dict[str, Any]:
        context, parameters = self._context, chat.order.parameters
        scribe = Scribe(context.text, chat.as_ids)
        choices = []
        for index, request in enumerate(requests):
            script = Transcript(request, context.text, parameters)
            places = script.take()
            logprobs = scribe.chat(request, places, parameters.top or 0) if chat.logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": _message(chat.role, chat.echo + script.text),
                    "logprobs": logprobs,
                    "finish_reason": request.finish_reason or "stop",
                    "stop_reason": request.stop_reason,
                    "token_ids": request.output_token_ids if chat.with_ids else None,
                    "routed_experts": None,
                }
            )
        return {
            **context.head(name, "chat.completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": context.fingerprint,
            "usage": full_usage(requests, parameters.n),
            "prompt_logprobs": scribe.prompt(requests[0], parameters.prompt_top),
            "prompt_token_ids": list(chat.order.prompts[0]) if chat.with_ids else None,
            "prompt_text": chat.prompt_text,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    # --- a stream -------------------------------------------------------------------------------------

    async def _stream(
        self,
        name: str,
        chat: _Chat,
        requests: list[Request],
        progress: Progress,
        streaming: Streaming,
    ) -> AsyncIterator[dict[str, Any]]:
        context, parameters = self._context, chat.order.parameters
        head = context.head(name, "chat.completion.chunk")
        prompt = chat.order.prompts[0]
        scripts = [Transcript(request, context.text, parameters) for request in requests]
        scribe = Scribe(context.text, chat.as_ids)
        begun = False
        async for news in progress_of(requests, progress):
            if not begun:
                begun = True
                for chunk in self._opening(head, chat, len(requests), streaming):
                    yield chunk
            for place in news:
                choice = self._choice(place, scripts[place], chat, scribe, streaming.interval)
                if choice is None:
                    continue
                chunk = {**head, "choices": [choice]}
                if streaming.running_usage:
                    chunk["usage"] = usage(len(prompt), scripts[place].taken)
                if choice["finish_reason"] is not None and not streaming.usage:
                    chunk["system_fingerprint"] = context.fingerprint
                yield chunk
        if streaming.usage:
            counts = usage(len(prompt), sum(request.num_output_tokens for request in requests))
            yield {**head, "choices": [], "usage": counts, "system_fingerprint": context.fingerprint}

    @staticmethod
    def _opening(head: dict[str, Any], chat: _Chat, n: int, streaming: Streaming) -> list[dict[str, Any]]:
        """The role of every choice, and what is echoed."""
        prompt = chat.order.prompts[0]
        chunks = []
        for content in ("", chat.echo) if chat.echo else ("",):
            for index in range(n):
                delta = {"role": chat.role, "content": ""} if content == "" else {"content": content}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                chunk = {**head, "choices": [choice]}
                if content == "":
                    chunk["prompt_token_ids"] = list(prompt) if chat.with_ids else None
                    chunk["prompt_text"] = chat.prompt_text
                if streaming.running_usage:
                    chunk["usage"] = usage(len(prompt), 0)
                chunks.append(chunk)
        return chunks

    @staticmethod
    def _choice(
        index: int, script: Transcript, chat: _Chat, scribe: Scribe, interval: int
    ) -> dict[str, Any] | None:
        request, taken = script.request, script.taken
        if taken and request.finish_reason is None and request.num_output_tokens - taken < interval:
            return None
        places = script.take()
        text = script.delta()
        if not places and not text and not taken:
            return None
        logprobs = scribe.chat(request, places, chat.order.parameters.top or 0) if chat.logprobs else None
        output = request.output_token_ids
        choice = {
            "index": index,
            "delta": {"content": text},
            "logprobs": logprobs,
            "finish_reason": request.finish_reason,
        }
        if request.finish_reason is not None:
            choice["stop_reason"] = request.stop_reason
        choice["token_ids"] = output[places.start : places.stop] if chat.with_ids else None
        return choice


def _message(role: str, content: str) -> dict[str, Any]:
    return {
        "role": role,
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }


def _as_text(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages whose content is text. OpenAI's lists of text parts are joined by newlines, as in vLLM."""
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
                raise refused("This engine serves text only", "messages")
            content = "\n".join(str(part.get("text", "")) for part in content)
        plain.append({**message, "content": content})
    return plain


def _refuse_tools(body: Fields) -> None:
    """A vLLM that was started without a tool parser refuses what would need one."""
    if body.data.get("tools") == []:
        message = (
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        )
        raise refused(message, "tools")
    if body.data.get("tools") and body.data.get("tool_choice", "auto") != "none":
        raise refused(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    if body.data.get("tool_choice") not in (None, "none") and not body.data.get("tools"):
        raise refused("When using `tool_choice`, `tools` must be set.", "tool_choice")
