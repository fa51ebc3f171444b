"""What all routes of one engine share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.request import Request
from grpo_lab.engine.text import Text
from grpo_lab.engine.wire import ApiError, Fields, refused
from grpo_lab.errors import ModelError

VERSION = "0.32.0"  # of the vLLM whose answers these routes were recorded from


@dataclass(frozen=True, slots=True)
class Context:
    """One engine as its routes see it.

    Attributes:
        model: the name that it is served under.
        text: the tokenizer; None for an engine of token ids only.
        faithful: answer as a stock vLLM even where that is a defect, and without any lab addition.
        raw_logprobs: report the model's own logprobs, as vLLM does, not those of the sampled distribution.
    """

    core: EngineCore
    model: str
    text: Text | None
    faithful: bool = False
    raw_logprobs: bool = False

    @property
    def fingerprint(self) -> str:
        return f"vllm-{VERSION}-grpo_lab"

    @property
    def created(self) -> int:
        """Seconds of the epoch by the loop's clock."""
        return int(asyncio.get_running_loop().time() - time.monotonic() + time.time())

    def head(self, name: str, kind: str) -> dict[str, Any]:
        """The first fields of an answer, and of every chunk of a stream."""
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def check_model(self, body: Fields) -> None:
        """Raises a 404 for another model than the served one; none named is fine."""
        name = body.text("model", None)
        if name and name != self.model:
            message = f"The model `{name}` does not exist. Valid aliases: {self.model}."
            raise ApiError(404, message, "model")

    def tokenizer(self) -> Text:
        if self.text is None:
            raise refused("this engine has no tokenizer; send token ids")
        return self.text

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Raises a 400 for a text that cannot be tokenized, or is too long for any context."""
        limit = self.core.policy.max_model_len
        try:
            most = limit * self.tokenizer().max_characters_per_token
            if len(text) > most:
                raise refused(
                    f"This model's maximum context length is {limit} tokens. However, your prompt contains "
                    f"{len(text)} characters (more than {most} characters, which is the upper bound for "
                    f"{limit} input tokens). Please reduce the length of the input prompt.",
                    "input_text",
                    len(text),
                )
            return tuple(self.tokenizer().encode(text, add_special_tokens))
        except (ModelError, ValueError) as error:
            raise refused(str(error)) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Best effort: token ids are the answer, and a model without a tokenizer has no text."""
        if self.text is None:
            return ""
        try:
            return self.text.decode(token_ids, skip_special_tokens)
        except ModelError:
            return ""


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def full_usage(requests: Sequence[Request], n: int) -> dict[str, Any]:
    """Token counts of all sequences; a prompt is counted once, whatever ``n`` is."""
    prompt = sum(request.num_prompt_tokens for request in requests[::n])
    counts = usage(prompt, sum(request.num_output_tokens for request in requests))
    return {**counts, "prompt_tokens_details": None, "completion_tokens_details": None}
