"""vLLM's JSON, out and in: sampling parameters, version spans, headers, error bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from grpo_lab.errors import EngineError
from grpo_lab.transport.lab_wire import SYNC_HEADER, TERM_HEADER
from grpo_lab.types import JsonDict, SamplingParams, SyncId, VersionSpan

UNSYNCED = "default"  # the version of weights from disk


def sampling_json(sampling: SamplingParams) -> JsonDict:
    """As both generation routes take them; the sampled token's logprob is asked for."""
    params: JsonDict = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return params


def version_spans(rows: Sequence[Any]) -> tuple[VersionSpan, ...]:
    """Spans whose version is one of ours; the weights from disk ("default") are version 0 of term 0."""
    spans = []
    for row in rows:
        label, start, end = row["version"], int(row["start"]), int(row["end"])
        sync = None if label == UNSYNCED else SyncId.parse(label)
        term, version = sync.weights if sync is not None else (0, 0)
        spans.append(VersionSpan(term, version, start, end, row.get("kv_version")))
    return tuple(spans)


def term_header(term: int) -> dict[str, str]:
    """Nothing for term 0: no trainer speaks."""
    return {TERM_HEADER: str(term)} if term else {}


def sync_headers(sync: SyncId) -> dict[str, str]:
    """Which sync a call belongs to, and its term."""
    return {SYNC_HEADER: str(sync), **term_header(sync.term)}


def typed_field(body: JsonDict, name: str, kind: type) -> Any:
    """Raises ``EngineError`` for an answer without it."""
    value = body.get(name)
    if not isinstance(value, kind):
        raise EngineError(f"the answer has no {kind.__name__} {name!r}: {str(body)[:200]}")
    return value


def error_words(response: httpx.Response) -> str:
    """The server's message, from vLLM's nested or flat error body, or the text."""
    try:
        error = response.json().get("error", response.text)
    except (ValueError, AttributeError):
        error = response.text
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:1000]
