"""The engine as one ASGI app: served by uvicorn on the wall clock, mounted in process in a simulation.

Every handler is ``async def`` and the middleware is plain ASGI: nothing here starts a thread.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_lab.engine.context import Context
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.failures import BadRequest, EngineDead, NotInService, StaleTerm
from grpo_lab.engine.generation import DEAD
from grpo_lab.engine.metrics import Metrics
from grpo_lab.engine.rl_state import ReceiverFactory
from grpo_lab.engine.routes_chat import ChatRoutes
from grpo_lab.engine.routes_memory import MemoryRoutes
from grpo_lab.engine.routes_openai import OpenAiRoutes
from grpo_lab.engine.routes_rl import RlRoutes
from grpo_lab.engine.routes_server import ServerRoutes
from grpo_lab.engine.routes_text import TextRoutes
from grpo_lab.engine.routes_tokens import TokenRoutes
from grpo_lab.engine.runner import StepRunner
from grpo_lab.engine.text import Text
from grpo_lab.engine.updates import StockFactory, Updates
from grpo_lab.engine.wire import CAUSE_HEADER, ApiError, answer, refused
from grpo_lab.ports import Recorder

Handler = Callable[[HttpRequest], Awaitable[Response]]
Routes = Mapping[tuple[str, str], Handler]
GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # what vLLM's key protects
OPEN_PATHS = ("/health", "/ping", "/metrics")  # answered without a key, in every mode
CLIENT_CLOSED_REQUEST = 499


def create_app(
    core: EngineCore,
    *,
    receivers: Mapping[str, ReceiverFactory],
    stock: StockFactory | None = None,
    rl_routes: bool = True,
    token_route: bool = True,
    api_key: str | None = None,
    model: str = "model",
    text: Text | None = None,
    transfer_runner: StepRunner | None = None,
    faithful: bool = False,
    raw_logprobs: bool | None = None,
) -> FastAPI:
    """The app of one engine. Its lifespan starts and closes the engine; without one (an in-process
    transport), call ``core.start()`` before the first request and ``await app.state.close()`` at the end.

    Args:
        receivers: the weight transports of ours that this engine can join, by backend name.
        stock: makes the receiving end of a stock vLLM's wire format; None without one.
        rl_routes: vLLM's development routes; off, they answer 404.
        token_route: ``/inference/v1/generate``, which a vLLM has with ``--enable-scale-out``.
        api_key: if given, ``Authorization: Bearer <key>`` is needed: on every path but /health, /ping and
            /metrics, or (faithful) on the paths that a vLLM protects, which leaves the RL routes open.
        model: the served model's name.
        text: the tokenizer; None serves token ids only.
        transfer_runner: where received buckets are hashed and unpacked; in place by default.
        faithful: answer as a stock vLLM does even where that is a defect (see ``stock`` and docs/serve.md).
        raw_logprobs: report the model's own logprobs; by default if ``faithful``.
    """
    raw = faithful if raw_logprobs is None else raw_logprobs
    if text is not None:
        core.understand(text.decode)
    context = Context(core, model, text, faithful, raw)
    updates = Updates(core, receivers, stock, faithful=faithful, runner=transfer_runner)
    memory = MemoryRoutes(core)
    metrics = Metrics(core, model, memory.level)

    async def close() -> None:
        try:
            await updates.close()
        finally:
            await core.close()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        core.start()
        try:
            yield
        finally:
            await close()

    app = FastAPI(title="grpo_lab engine", lifespan=lifespan, openapi_url=None, docs_url=None)
    app.state.rl, app.state.close, app.state.core = updates.lab, close, core
    tables: list[Routes] = [
        ServerRoutes(context, metrics).table,
        OpenAiRoutes(context).table,
        ChatRoutes(context).table,
        TextRoutes(context).table,
    ]
    if token_route:
        tables.append(TokenRoutes(context).table)
    if rl_routes:
        tables += [RlRoutes(context, updates, metrics).table, memory.table]
    _add_routes(app, tables)
    _add_error_answers(app, faithful)
    app.add_middleware(_TraceAndKey, recorder=core.recorder, api_key=api_key, faithful=faithful)
    return app


def _add_routes(app: FastAPI, tables: list[Routes]) -> None:
    for table in tables:
        for (method, path), handler in table.items():
            app.router.add_route(path, handler, methods=[method])


def _add_error_answers(app: FastAPI, faithful: bool) -> None:
    async def api_error(_: HttpRequest, error: Any) -> Response:
        return error.response()  # type: ignore[no-any-return]

    def as_status(status: int) -> Callable[[HttpRequest, Any], Awaitable[Response]]:
        async def respond(_: HttpRequest, error: Any) -> Response:
            return ApiError(status, str(error)).response()

        return respond

    async def bad_request(_: HttpRequest, error: Any) -> Response:
        return refused(str(error)).response()

    async def dead(_: HttpRequest, error: Any) -> Response:
        return ApiError(500, DEAD if faithful else str(error)).response()

    async def client_gone(_: HttpRequest, __: Any) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(BadRequest, bad_request)
    app.add_exception_handler(StaleTerm, as_status(409))
    app.add_exception_handler(NotInService, as_status(503))
    app.add_exception_handler(EngineDead, dead)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(Exception, as_status(500))


class _TraceAndKey:
    """Carries event ids in and out of every request (happens-before), and checks the key."""

    def __init__(self, app: ASGIApp, recorder: Recorder, api_key: str | None, faithful: bool) -> None:
        self._app, self._recorder, self._faithful = app, recorder, faithful
        self._key = None if api_key is None else hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["method"] != "OPTIONS" and not self._allowed(scope["path"], headers):
            await answer({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        if self._faithful:
            await self._app(scope, receive, send)
            return
        self._observe(headers.get(CAUSE_HEADER.encode()))

        async def send_with_cause(message: Message) -> None:
            if message["type"] == "http.response.start":
                cause = (CAUSE_HEADER.encode(), self._recorder.last_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), cause]}
            await send(message)

        await self._app(scope, receive, send_with_cause)

    def _allowed(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        guarded = path.startswith(GUARDED) if self._faithful else path not in OPEN_PATHS
        if self._key is None or not guarded:
            return True
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(token).digest()
        return secrets.compare_digest(given, self._key) and scheme.lower() == b"bearer"

    def _observe(self, cause: bytes | None) -> None:
        """A header that is no event id comes from somebody else's client and says nothing."""
        if cause:
            try:
                self._recorder.observe(cause.decode("ascii"))
            except ValueError:
                return
