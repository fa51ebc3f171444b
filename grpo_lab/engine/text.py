"""Text to tokens and back, from a Hugging Face directory, without importing transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from grpo_lab.errors import ModelError

_REPLACEMENT = "\ufffd"
MAX_CONTEXT_TOKENS = 4  # no character has more bytes


class Text:
    """The tokenizer of a model directory (``tokenizer.json``) and its chat template.

    Raises ``ModelError`` for a directory without them, at the first use.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ``ValueError`` for what JSON can escape and is no text: half a surrogate pair."""
        if not text.isascii():
            text.encode()
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def stream(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> Callable[[int], str]:
        """A function from the next output token to the text that is certain now ("" within a character).

        The prompt is the context in which the first tokens are decoded, as in vLLM.
        """
        tokenizer, reader = self._tokenizer, DecodeStream(list(prompt_token_ids), skip_special_tokens)

        def read(token: int) -> str:
            nonlocal reader
            try:
                return reader.step(tokenizer, token) or ""
            except Exception:  # the library's own; the stream lost its place among bytes that are no text
                reader = DecodeStream([], skip_special_tokens)
                return reader.step(tokenizer, token) or ""

        return read

    def piece(self, token: int, before: Sequence[int]) -> str:
        """One token's own text; a token that completes a character has it whole, one inside has ""."""
        alone = self.decode([token], skip_special_tokens=False)
        if not alone.endswith(_REPLACEMENT):
            return alone
        for width in range(1, min(len(before), MAX_CONTEXT_TOKENS) + 1):
            context = list(before[-width:])
            whole = self.decode([*context, token], skip_special_tokens=False)
            if whole.endswith(_REPLACEMENT):
                continue
            while context and self.decode(context[-1:], skip_special_tokens=False).endswith(_REPLACEMENT):
                context.pop()
            prefix = self.decode(context, skip_special_tokens=False) if context else ""
            return whole.removeprefix(prefix)
        return ""

    @cached_property
    def max_characters_per_token(self) -> int:
        return max((len(piece) for piece in self._tokenizer.get_vocab()), default=1)

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own entries, undecoded."""
        return [self._tokenizer.id_to_token(token) for token in token_ids]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The chat template's text. Raises ``ValueError`` with the template's own complaint."""
        defaults = {"add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return str(self._template.render(messages=messages, **{**self._special, **defaults, **variables}))
        except TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        path = self._directory / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"{path}: no such file; text needs a tokenizer, token ids do not")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path}: cannot be read: {error}") from error

    @cached_property
    def _settings(self) -> dict[str, Any]:
        path = self._directory / "tokenizer_config.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @cached_property
    def _special(self) -> dict[str, str]:
        """bos_token, eos_token, ... as templates name them."""
        found = {}
        for name, value in self._settings.items():
            if name.endswith("_token") and value is not None and not isinstance(value, bool):
                found[name] = value["content"] if isinstance(value, dict) else str(value)
        return found

    @cached_property
    def _template(self) -> Any:
        source = self._settings.get("chat_template")
        path = self._directory / "chat_template.jinja"
        if path.exists():
            source = path.read_text(encoding="utf-8")
        if not isinstance(source, str):
            raise ModelError(f"{self._directory}: no chat template; add one, or send token ids")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        return environment.from_string(source)


def _refuse(message: str) -> str:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
