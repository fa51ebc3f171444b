"""The engine as one ASGI app: served by uvicorn on the wall clock, mounted in process in a simulation.

Every handler is ``async def`` and the middleware is plain ASGI: nothing here starts a thread.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import grpo_lab
from grpo_lab.engine import metrics
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.failures import BadRequest, EngineDead, NotInService, StaleTerm
from grpo_lab.engine.rl_state import ReceiverFactory, RlState
from grpo_lab.engine.routes_openai import OpenAiRoutes
from grpo_lab.engine.routes_rl import RlRoutes
from grpo_lab.engine.routes_tokens import TokenRoutes
from grpo_lab.engine.runner import StepRunner
from grpo_lab.engine.text import Text
from grpo_lab.engine.wire import CAUSE_HEADER, ApiError, answer
from grpo_lab.ports import Recorder

Handler = Callable[[HttpRequest], Awaitable[Response]]
Routes = Mapping[tuple[str, str], Handler]
OPEN_PATHS = ("/health", "/ping", "/metrics")  # answered without a key
CLIENT_CLOSED_REQUEST = 499


def create_app(
    core: EngineCore,
    *,
    receivers: Mapping[str, ReceiverFactory],
    rl_routes: bool = True,
    api_key: str | None = None,
    model: str = "model",
    text: Text | None = None,
    transfer_runner: StepRunner | None = None,
) -> FastAPI:
    """The app of one engine. Its lifespan starts and closes the engine; without one (an in-process
    transport), call ``core.start()`` before the first request and ``await app.state.close()`` at the end.

    Args:
        receivers: the weight transports that this engine can join, by backend name.
        rl_routes: vLLM's development routes; off, they answer 404.
        api_key: if given, every path but /health and /metrics needs ``Authorization: Bearer <key>``.
        model: the served model's name.
        text: the tokenizer; None serves token ids only.
        transfer_runner: where received buckets are hashed and unpacked; in place by default.
    """
    rl = RlState(core, receivers, transfer_runner)

    async def close() -> None:
        try:
            await rl.close()
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
    app.state.rl, app.state.close = rl, close
    tables: list[Routes] = [
        _server_routes(core, model),
        OpenAiRoutes(core, model, text).table,
        TokenRoutes(core).table,
    ]
    if rl_routes:
        tables.append(RlRoutes(core, rl).table)
    for table in tables:
        for (method, path), handler in table.items():
            app.router.add_route(path, handler, methods=[method])
    _add_error_answers(app)
    app.add_middleware(_TraceAndKey, recorder=core.recorder, api_key=api_key)
    return app


def _server_routes(core: EngineCore, model: str) -> Routes:
    async def health(_: HttpRequest) -> Response:
        try:
            core.check_alive()
        except EngineDead:
            return Response(status_code=503)
        return Response(status_code=200)

    async def show_metrics(_: HttpRequest) -> Response:
        return Response(metrics.render(core, model), media_type="text/plain; version=0.0.4")

    async def version(_: HttpRequest) -> Response:
        return answer({"version": f"grpo_lab-{grpo_lab.__version__}"})

    return {
        ("GET", "/health"): health,
        ("GET", "/ping"): health,
        ("GET", "/metrics"): show_metrics,
        ("GET", "/version"): version,
    }


def _add_error_answers(app: FastAPI) -> None:
    async def api_error(_: HttpRequest, error: Any) -> Response:
        return error.response()  # type: ignore[no-any-return]

    def as_status(status: int) -> Callable[[HttpRequest, Any], Awaitable[Response]]:
        async def respond(_: HttpRequest, error: Any) -> Response:
            return ApiError(status, str(error)).response()

        return respond

    async def client_gone(_: HttpRequest, __: Any) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(BadRequest, as_status(400))
    app.add_exception_handler(StaleTerm, as_status(409))
    app.add_exception_handler(NotInService, as_status(503))
    app.add_exception_handler(EngineDead, as_status(500))
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(Exception, as_status(500))


class _TraceAndKey:
    """Carries event ids in and out of every request (happens-before), and checks the key."""

    def __init__(self, app: ASGIApp, recorder: Recorder, api_key: str | None) -> None:
        self._app, self._recorder = app, recorder
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._allowed(scope["path"], headers):
            await answer({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        self._observe(headers.get(CAUSE_HEADER.encode()))

        async def send_with_cause(message: Message) -> None:
            if message["type"] == "http.response.start":
                cause = (CAUSE_HEADER.encode(), self._recorder.last_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), cause]}
            await send(message)

        await self._app(scope, receive, send_with_cause)

    def _allowed(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        if self._authorization is None or path in OPEN_PATHS:
            return True
        return hmac.compare_digest(headers.get(b"authorization", b""), self._authorization)

    def _observe(self, cause: bytes | None) -> None:
        """A header that is no event id comes from somebody else's client and says nothing."""
        if cause:
            try:
                self._recorder.observe(cause.decode("ascii"))
            except ValueError:
                return
