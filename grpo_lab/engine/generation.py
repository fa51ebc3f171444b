"""From an HTTP request to sequences in the engine, and to the end of all of them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from grpo_lab.engine.context import Context
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.failures import EngineDead
from grpo_lab.engine.parameters import Parameters
from grpo_lab.engine.request import Extras, Request
from grpo_lab.engine.wire import KIND_HEADER, REQUEST_ID_HEADER, ApiError, choice, dumps, term_of
from grpo_lab.types import RequestKind

T = TypeVar("T")
KINDS = ("rollout", "canary", "evaluation")
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass(frozen=True, slots=True)
class Order:
    """What one HTTP request wants: ``n`` sequences of each prompt, named ``names[prompt]``."""

    prompts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    parameters: Parameters
    ranks: bool = False

    def request_ids(self) -> list[str]:
        """vLLM's names: the prompt's own, or ``<index>_<name>`` for each of several samples."""
        n = self.parameters.n
        return [name if n == 1 else f"{index}_{name}" for name in self.names for index in range(n)]


class Progress:
    """Wakes the one reader of all sequences of an HTTP request; any number of notes is one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def note(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()


def request_id_of(http: HttpRequest, default: str | None = None) -> str:
    """The header's, else the body's, else a fresh one."""
    return http.headers.get(REQUEST_ID_HEADER) or default or uuid.uuid4().hex


def submit(
    context: Context, http: HttpRequest, order: Order, on_token: Callable[[], None] | None = None
) -> list[Request]:
    """Puts all sequences of an order into the engine, or none.

    Raises ``ApiError``, ``BadRequest``, ``StaleTerm``, ``NotInService`` or ``EngineDead``.
    """
    core, wanted = context.core, order.parameters
    kind = cast(RequestKind, choice(http.headers.get(KIND_HEADER, "rollout"), KIND_HEADER, KINDS))
    term = 0 if context.faithful else term_of(http)
    extras = Extras(
        rules=wanted.rules,
        cache_salt=wanted.salt,
        prompt_logprobs=wanted.prompt_top,
        raw_logprobs=context.raw_logprobs,
        ranks=order.ranks,
        on_token=on_token,
    )
    top = core.policy.vocab_size if wanted.top == -1 else wanted.top or 0
    requests: list[Request] = []
    try:
        for index, request_id in enumerate(order.request_ids()):
            sampling = wanted.sampling
            prompt = order.prompts[index // wanted.n]
            room = core.policy.max_model_len - len(prompt)
            if 0 < room < sampling.max_tokens:
                sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + index % wanted.n)
            requests.append(core.submit(prompt, sampling, request_id, kind, term, wanted.stops, top, extras))
    except BaseException:
        core.cancel(requests)
        raise
    return requests


async def complete(context: Context, http: HttpRequest, order: Order) -> list[Request]:
    """All sequences of an order, finished. A client that goes away frees them.

    Raises what ``submit`` does, ``EngineDead`` or ``ClientDisconnect``.
    """
    requests = submit(context, http, order)
    try:
        await _unless_gone(http, _wait_for(context.core, requests))
    finally:
        context.core.cancel(requests)  # those still running, when anything above was cut short
    return requests


async def _wait_for(core: EngineCore, requests: Sequence[Request]) -> None:
    for request in requests:
        await core.wait(request)


class EventStream(Response):
    """Server-sent events about ``requests``, the headers at once and each event as it is made.

    A client that goes away frees the requests; an engine that dies is one last event, as HTTP's status is
    gone by then. ``events`` yields what is sent as JSON; ``[DONE]`` closes the stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self, context: Context, http: HttpRequest, requests: list[Request], events: AsyncIterator[Any]
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._context, self._http, self._requests, self._events = context, http, requests, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _unless_gone(self._http, self._tell(send))
        except ClientDisconnect:
            return
        finally:
            self._context.core.cancel(self._requests)

    async def _tell(self, send: Send) -> None:
        async def say(text: str, more: bool = True) -> None:
            body = f"data: {text}\n\n".encode("utf-8", "replace")
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async for event in self._events:
                await say(_stream_json(event))
        except EngineDead as error:
            message = DEAD if self._context.faithful else str(error)
            await say(json.dumps(ApiError(500, message).body))
        await say("[DONE]", more=False)


async def progress_of(requests: Sequence[Request], progress: Progress) -> AsyncIterator[list[int]]:
    """Places of the requests that have something new, until all have ended. Raises ``EngineDead``."""
    seen = [-1] * len(requests)
    open_places = list(range(len(requests)))
    while open_places:
        news = []
        for place in list(open_places):
            request = requests[place]
            if request.done.done():
                request.done.result()
                open_places.remove(place)
                news.append(place)
            elif request.finish_reason is None and request.num_output_tokens > max(seen[place], 0):
                news.append(place)
            seen[place] = request.num_output_tokens
        if news:
            yield news
        else:
            await progress.wait()


def _stream_json(data: Any) -> str:
    """JSON of an event; a NaN is null in a stream, as in vLLM."""
    try:
        return dumps(data)
    except ValueError:
        return dumps(_without_nan(data))


def _without_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_nan(value) for value in data]
    if isinstance(data, float) and (data != data or abs(data) == float("inf")):  # noqa: PLR0124 - NaN
        return None
    return data


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
