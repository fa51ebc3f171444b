"""What a configuration value may be, as data: each rule says its range in words and tells if a value fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit


class Rule(Protocol):
    """``str(rule)`` completes "expected ..."."""

    def allows(self, value: object) -> bool: ...


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number in [low, high]; True and 1.0 are not."""

    low: int
    high: int | None = None

    def allows(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return value >= self.low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        return f"an integer of at least {self.low}" + (
            "" if self.high is None else f" and at most {self.high}"
        )


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in [low, high], or in (low, high] when ``open_low``."""

    low: float
    high: float = math.inf
    open_low: bool = False

    def allows(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return (value > self.low if self.open_low else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        lower = f"above {self.low:g}" if self.open_low else f"of at least {self.low:g}"
        return f"a finite number {lower}" + ("" if math.isinf(self.high) else f" and at most {self.high:g}")


class Choice:
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def allows(self, value: object) -> bool:
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class Flag:
    """True or False, nothing that only looks like it."""

    def allows(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Urls:
    """One http(s) address or several: a comma-separated string or a list."""

    def allows(self, value: object) -> bool:
        addresses = split_urls(value)
        return bool(addresses) and len(set(addresses)) == len(addresses) and all(map(_is_url, addresses))

    def __str__(self) -> str:
        return "different http:// or https:// addresses with a host, for example http://localhost:8000"


@dataclass(frozen=True, slots=True)
class Text:
    """A string that is not empty."""

    def allows(self, value: object) -> bool:
        return isinstance(value, str) and bool(value.strip())

    def __str__(self) -> str:
        return "a non-empty string"


@dataclass(frozen=True, slots=True)
class Mapping:
    """A dictionary with string keys."""

    def allows(self, value: object) -> bool:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)

    def __str__(self) -> str:
        return "a dictionary with string keys"


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list, not empty, whose items all obey ``item``."""

    item: Rule

    def allows(self, value: object) -> bool:
        return isinstance(value, list | tuple) and bool(value) and all(map(self.item.allows, value))

    def __str__(self) -> str:
        return f"a list, each item {self.item}"


@dataclass(frozen=True, slots=True)
class Optional:
    """None, or what ``rule`` allows."""

    rule: Rule

    def allows(self, value: object) -> bool:
        return value is None or self.rule.allows(value)

    def __str__(self) -> str:
        return f"None or {self.rule}"


@dataclass(frozen=True, slots=True)
class Exactly:
    """One value only, because this trainer gives the field no other meaning; ``why`` is said."""

    values: tuple[object, ...]
    why: str

    def allows(self, value: object) -> bool:
        return any(value == one and type(value) is type(one) for one in self.values)

    def __str__(self) -> str:
        return f"{' or '.join(map(repr, self.values))} ({self.why})"


@dataclass(frozen=True, slots=True)
class Either:
    """What at least one of two rules allows."""

    first: Rule
    second: Rule

    def allows(self, value: object) -> bool:
        return self.first.allows(value) or self.second.allows(value)

    def __str__(self) -> str:
        return f"{self.first}, or {self.second}"


def setting(default: Any, rule: Rule, help: str) -> Any:
    """A dataclass field with its rule and its help text."""
    metadata = {"help": help, "rule": rule}
    if isinstance(default, list | dict):
        factory: Callable[[], Any] = default.copy
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def split_urls(value: object) -> tuple[str, ...]:
    """The addresses in a comma-separated string or a list, without trailing slashes; () for other types."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        return ()
    return tuple(part.strip().rstrip("/") for part in value)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and " " not in text
