"""Text to tokens and back, from a Hugging Face directory, without importing transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from grpo_lab.errors import ModelError


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
