"""``/tokenize`` and ``/detokenize`` as vLLM serves them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from grpo_lab.engine.context import Context
from grpo_lab.engine.wire import Fields, answer, invalid, read_body, refused, require_json
from grpo_lab.errors import ModelError


class TextRoutes:
    def __init__(self, context: Context) -> None:
        self._context = context
        self.table = {
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
        }

    async def tokenize(self, http: HttpRequest) -> Response:
        require_json(http)
        body = await read_body(http)
        if "messages" in body.data:
            ids = self._chat_ids(body)
        else:
            special = body.flag("add_special_tokens", True)
            self._context.check_model(body)
            ids = self._context.encode(body.text("prompt"), special)
        strings = body.flag("return_token_strs")
        return answer(
            {
                "count": len(ids),
                "max_model_len": self._context.core.policy.max_model_len,
                "tokens": list(ids),
                "token_strs": self._context.tokenizer().token_strings(ids) if strings else None,
            }
        )

    def _chat_ids(self, body: Fields) -> tuple[int, ...]:
        messages: Any = body.data["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
        generation = body.flag("add_generation_prompt", True)
        if body.flag("continue_final_message"):
            raise refused("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        special = body.flag("add_special_tokens")
        self._context.check_model(body)
        variables = {"tools": body.data.get("tools"), **body.object("chat_template_kwargs", {})}
        try:
            text = self._context.tokenizer().render_chat(
                messages, add_generation_prompt=generation, **variables
            )
        except (ValueError, ModelError) as error:
            raise refused(str(error)) from error
        return self._context.encode(text, special)

    async def detokenize(self, http: HttpRequest) -> Response:
        require_json(http)
        body = await read_body(http)
        ids = body.token_ids("tokens")
        wrong = [token for token in ids if not 0 <= token < 1 << 63]
        if wrong:
            message, bound = "Input should be greater than or equal to 0", "'ge': 0"
            place = list(ids).index(wrong[0])
            raise invalid("greater_than_equal", f"body.tokens.{place}", message, wrong[0], bound)
        self._context.check_model(body)
        size = self._context.core.policy.vocab_size
        too_large = [token for token in ids if token >= size]
        if too_large:
            raise refused(f"Token id {max(too_large)} is out of vocabulary")
        try:
            return answer({"prompt": self._context.tokenizer().decode(ids, skip_special_tokens=False)})
        except ModelError as error:
            raise refused(str(error)) from error
