"""The contract as data: the rows of ``contract.toml`` and the known differences of ``differences.toml``.

A row is a list of steps (see ``contract_steps``). If it begins with a call, the row may give its keys itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SERVERS = ("main", "bare", "keyed", "stock", "doomed")
KINDS = ("sim", "sim-http", "vllm")
STRICT = "strict"  # the simulated engine in process, without ``--faithful``
_CALL_KEYS = (
    "call", "json", "raw", "headers", "status", "body", "has", "message", "text", "absent",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the contract.

    Attributes:
        id: its name in reports.
        section: the part of the contract that it belongs to.
        server: which server it needs: ``main`` (our weight transfer), ``bare`` (RL routes without one),
            ``keyed`` (no RL routes, an API key), ``stock`` (a weight transfer like vLLM's own), ``doomed``
            (the same, and it dies).
        dirty: it leaves other weights, or a session, behind.
        core: part of ``make conformance-core``.
        tied: its model's head is its embedding.
        only: the engines that it is about; all by default.
    """

    id: str
    section: str
    steps: tuple[Mapping[str, Any], ...]
    server: str = "main"
    dirty: bool = False
    core: bool = False
    tied: bool = False
    only: tuple[str, ...] = (*KINDS, STRICT)


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that some engines are known to answer in another way, and why."""

    row: str
    engines: tuple[str, ...]
    reason: str
    says: str


def read_rows(path: Path = HERE / "contract.toml") -> tuple[Row, ...]:
    """All rows, in order. Raises ``ValueError`` for a row that says nothing or is there twice."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = tuple(_row(dict(item)) for item in data["row"])
    ids = [row.id for row in rows]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: rows that are there twice: {twice}")
    return rows


def read_differences(path: Path = HERE / "differences.toml") -> tuple[Difference, ...]:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Difference(item["row"], tuple(item["engines"]), item["reason"], item["says"])
        for item in data.get("difference", ())
    )


def read_strict(path: Path = HERE / "strict.toml") -> tuple[Difference, ...]:
    """Of the simulated engine when it is strict, a row each."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Difference(row, (STRICT,), item["reason"], says)
        for item in data["difference"]
        for row, says in item["says"].items()
    )


def _row(item: dict[str, Any]) -> Row:
    single = {key: item.pop(key) for key in _CALL_KEYS if key in item}
    steps = ([single] if single else []) + list(item.pop("steps", ()))
    if not steps:
        raise ValueError(f"row {item.get('id')}: no steps")
    if item.get("server", "main") not in SERVERS:
        raise ValueError(f"row {item['id']}: server {item['server']!r}; one of {SERVERS}")
    if "only" in item:
        item["only"] = tuple(item["only"])
    return Row(steps=tuple(steps), **item)
