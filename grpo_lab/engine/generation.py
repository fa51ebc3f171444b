"""From an HTTP request to sequences in the engine, and to the end of all of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.request import Request
from grpo_lab.engine.wire import KIND_HEADER, REQUEST_ID_HEADER, ApiError, Fields, choice, term_of
from grpo_lab.types import RequestKind, SamplingParams

T = TypeVar("T")
MAX_CHOICES = 1024
KINDS = ("rollout", "canary", "evaluation")


@dataclass(frozen=True, slots=True)
class Order:
    """What one HTTP request wants: ``n`` sequences of each prompt."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    request_ids: tuple[str, ...]
    n: int = 1
    stop_strings: tuple[str, ...] = ()
    top_logprobs: int = 0


def request_id_of(http: HttpRequest) -> str:
    """The client's own id, or a fresh one."""
    return http.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex


def sampling_of(fields: Fields, default_max_tokens: int, max_tokens: int | None = None) -> SamplingParams:
    """vLLM's names and defaults; ``top_k`` -1 and 0 are both "off"."""
    top_k = fields.integer("top_k", 0)
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens", default_max_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=0 if top_k == -1 else top_k,
        min_tokens=fields.integer("min_tokens", 0),
        stop_token_ids=fields.token_ids("stop_token_ids", ()),
        ignore_eos=fields.flag("ignore_eos"),
        seed=fields.integer("seed", None),
    )


def count_of(fields: Fields) -> int:
    n = fields.integer("n", 1)
    if not 1 <= n <= MAX_CHOICES:
        raise ApiError(400, f"n={n}: must be from 1 to {MAX_CHOICES}", "n")
    return int(n)


async def generate(core: EngineCore, http: HttpRequest, order: Order) -> list[Request]:
    """All sequences of an order, finished. A client that goes away frees them.

    Raises ``ApiError``, ``BadRequest``, ``StaleTerm``, ``EngineDead`` or ``ClientDisconnect``.
    """
    kind = cast(RequestKind, choice(http.headers.get(KIND_HEADER, "rollout"), KIND_HEADER, KINDS))
    term = term_of(http)
    requests: list[Request] = []
    try:
        for index, request_id in enumerate(order.request_ids):
            sampling = order.sampling
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + index % order.n)
            prompt = order.prompts[index // order.n]
            requests.append(
                core.submit(prompt, sampling, request_id, kind, term, order.stop_strings, order.top_logprobs)
            )
        await _unless_gone(http, _wait_for(core, requests))
    finally:
        core.cancel(requests)  # those that are still running, when anything above was cut short
    return requests


async def _wait_for(core: EngineCore, requests: Sequence[Request]) -> None:
    for request in requests:
        await core.wait(request)


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client disconnects (``ClientDisconnect``)."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    watcher = loop.create_task(_cancel_when_gone(http, task))
    try:
        return await task
    except asyncio.CancelledError:
        if watcher.done() and not watcher.cancelled():
            raise ClientDisconnect from None
        raise
    finally:
        task.cancel()
        watcher.cancel()


async def _cancel_when_gone(http: HttpRequest, task: asyncio.Task[Any]) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    task.cancel()
