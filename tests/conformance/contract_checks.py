"""Is an answer what a step of the contract expects? Each check says what it found instead."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import httpx
from contract_client import Generation

Step = Mapping[str, Any]


def check(step: Step, response: httpx.Response) -> None:
    """An answer: ``status`` (200), ``body`` (exact JSON), ``has`` (a part of it), ``message`` (a pattern, in
    the error's text), ``text`` (a pattern, in the body), ``absent`` (a pattern that must not be there).
    """
    text = response.text
    assert response.status_code == step.get("status", 200), f"{response.status_code}: {text[:600]}"
    if "body" in step:
        found = response.json() if text else ""
        assert found == _nulls(step["body"]), f"{text[:800]}\nis not\n{json.dumps(step['body'])}"
    if "has" in step:
        problem = lacks(response.json(), step["has"])
        assert not problem, f"{problem}\nin {text[:800]}"
    if "message" in step:
        error = response.json().get("error", {})
        words = error if isinstance(error, str) else error.get("message", "")
        assert re.search(step["message"], words), f"{words!r} does not match {step['message']!r}"
    if "text" in step:
        assert re.search(step["text"], text, re.MULTILINE), f"{text[:1500]!r} has no {step['text']!r}"
    if "absent" in step:
        assert not re.search(step["absent"], text), f"{text[:800]!r} has {step['absent']!r}"


def _nulls(wanted: Any) -> Any:
    """TOML has no null: rows say "null" for it."""
    if isinstance(wanted, dict):
        return {key: _nulls(value) for key, value in wanted.items()}
    return None if wanted == "null" else wanted


def lacks(found: Any, wanted: Any, where: str = "body") -> str:
    """What of ``wanted`` is not in ``found``, or nothing. Objects may have more fields than wanted.

    Of the wanted texts, "*" is anything, "null" is null, and "~x" a pattern.
    """
    if isinstance(wanted, dict):
        return _object_lacks(found, wanted, where)
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return f"{where} is {found!r}, not a list of {len(wanted)}"
        problems = (lacks(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(found, wanted, strict=True)))
        return next(filter(None, problems), "")
    if isinstance(wanted, str) and wanted.startswith("~"):
        fits = re.search(wanted[1:], str(found)) is not None
    else:
        fits = wanted == "*" or (type(found) is type(_nulls(wanted)) and found == _nulls(wanted))
    return "" if fits else f"{where} is {found!r}, not {wanted!r}"


def _object_lacks(found: Any, wanted: Mapping[str, Any], where: str) -> str:
    if not isinstance(found, dict):
        return f"{where} is {found!r}, not an object"
    missing = [key for key in wanted if key not in found]
    if missing:
        return f"{where}.{missing[0]} is missing"
    problems = (lacks(found[key], value, f"{where}.{key}") for key, value in wanted.items())
    return next(filter(None, problems), "")


def check_end(step: Step, generation: Generation, sync: str) -> None:
    """The end of a generation: ``status``, ``finish_reason`` ("none" for none), ``count``, ``below`` and
    ``at_least`` of tokens, ``usage`` (there, and right), ``has``, ``message``; of a stream ``done``,
    ``chunks``, ``first_chunk``, ``last_chunk``, ``error_event``; ``weight_versions`` (labels, in order).
    """
    count = len(generation.token_ids)
    assert generation.status == step.get("status", 200), f"{generation.status}: {generation.text[:500]}"
    if "finish_reason" in step:
        wanted = None if step["finish_reason"] == "none" else step["finish_reason"]
        assert generation.finish_reason == wanted, f"finish_reason {generation.finish_reason}, {count} tokens"
    low, high = (
        step.get("count", step.get("at_least", 0)),
        step.get("count", step.get("below", count + 1) - 1),
    )
    assert low <= count <= high, f"{count} tokens, not {low} to {high}"
    if generation.route != "chat" and not step.get("error_event") and generation.status == 200:
        assert len(generation.logprobs) in (count, 0), f"{len(generation.logprobs)} logprobs, {count} tokens"
    if step.get("usage"):
        assert generation.usage is not None, "no usage"
        assert generation.usage["completion_tokens"] == count, f"{generation.usage} for {count} tokens"
    if "has" in step:
        problem = lacks(generation.body, step["has"])
        assert not problem, f"{problem} in {generation.text[:800]}"
    if "message" in step:
        assert re.search(step["message"], generation.text), generation.text[:500]
    _check_stream(step, generation)
    if "weight_versions" in step:
        _check_versions([name.replace("$sync", sync) for name in step["weight_versions"]], generation)


def _check_stream(step: Step, generation: Generation) -> None:
    if "done" in step:
        assert generation.done_seen == step["done"], f"[DONE] seen: {generation.done_seen}"
    if "chunks" in step:
        few = f"{len(generation.chunks)} data events: {generation.chunks[:3]}"
        assert len(generation.chunks) == step["chunks"], few
    for key, index in (("first_chunk", 0), ("last_chunk", -1)):
        if key in step:
            problem = lacks(generation.chunks[index], step[key])
            assert not problem, f"{problem} in {generation.chunks[index]}"
    if "error_event" in step:
        assert generation.errors, f"no error event among {len(generation.chunks)}"
        assert re.search(step["error_event"], str(generation.errors)), generation.errors


def _check_versions(wanted: list[str], generation: Generation) -> None:
    spans = generation.weight_versions
    assert not lacks([span["version"] for span in spans], wanted), f"{spans}, not {wanted}"
    assert spans[0]["start"] == 0, spans
    assert spans[-1]["end"] == len(generation.token_ids), spans
    assert all(left["end"] == right["start"] for left, right in itertools.pairwise(spans)), spans


def largest_gap(ours: list[float], theirs: list[float], start: int) -> float:
    """max |logprob - logprob| from token ``start`` on; no number (null) is far from all."""
    assert len(ours) == len(theirs), f"{len(theirs)} logprobs for {len(ours)} tokens"
    pairs = list(zip(ours, theirs, strict=True))[start:]
    assert pairs, f"no token from {start} on"
    return max(abs(left - right) if right is not None else 1e9 for left, right in pairs)


def metric_of(text: str, name: str) -> float:
    """The sum of a metric's lines in the text of /metrics."""
    values = re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    assert values, f"/metrics has no vllm:{name}"
    return sum(map(float, values))
