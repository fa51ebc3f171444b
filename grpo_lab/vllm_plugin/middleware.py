"""The lab's headers and routes in front of a real vLLM: a plain ASGI middleware.

It knows what vLLM's own routes do not: which term a request belongs to (an older one is refused, S12), which
sync a weight update is for (a newer one supersedes one that its sender gave up), and that a trainer which
paused the engine and died will never resume it (the lease). vLLM's own routes stay as they are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from typing import Any

from grpo_lab.transport.lab_wire import (
    ABANDON_PATH,
    CAPABILITIES_PATH,
    LEASE_HEADER,
    PLAN_HEADER,
    SYNC_HEADER,
    TERM_HEADER,
)
from grpo_lab.types import EngineCapabilities, SyncId
from grpo_lab.vllm_plugin.words import ABANDON_KEY, ABANDONED, TORN

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN_ROUTE = "/inference/v1/generate"  # noqa: S105 - a path
FENCED_PATHS = frozenset(
    {
        "/pause",
        "/resume",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/abort_requests",
        ABANDON_PATH,
    }
)
GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", TOKEN_ROUTE})
MAX_LEASE_S = 86_400.0
# A call to an engine core that was killed under it is never answered (vLLM 0.32), and nothing tells a
# middleware of the death but this flag. The server's own end waits for that call.
LOOK_EVERY_S = 0.5


class Refused(Exception):
    """Answered with this status and vLLM's error body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LabMiddleware:
    """One per API server: knows the newest term, the open update, whether the weights are torn, the lease."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.start_id = uuid.uuid4().hex[:16]
        self.term = 0
        self.active = False  # a weight update is open
        self.open: SyncId | None = None  # whose; None: its client did not say
        self.torn = ""
        self.loaded: SyncId | None = None  # by the last finish
        self._finishing = asyncio.Lock()
        self._lease_s = 0.0
        self._busy = 0
        self._timer: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        known = path in FENCED_PATHS or path in GENERATING_PATHS or path == CAPABILITIES_PATH
        if scope["type"] != "http" or not known:
            await self._app(scope, receive, send)
            return
        try:
            await self._serve(path, scope, receive, send)
        except Refused as refusal:
            await _answer(send, refusal.status, _error(refusal.status, str(refusal)))

    async def _serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._observe_term(headers)
        if path == CAPABILITIES_PATH:
            await _answer(send, 200, self._capabilities(scope["app"]))
        elif path in GENERATING_PATHS:
            self._refuse_torn()
            await self._app(scope, receive, send)
        else:
            with self._holding_lease(scope["app"].state):
                await self._control(path, headers, scope, receive, send)

    async def _control(
        self, path: str, headers: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        client, sync = scope["app"].state.engine_client, _sync_of(headers)
        if path == ABANDON_PATH:
            async with self._finishing:
                if sync is not None and self.loaded is not None and self.loaded.weights == sync.weights:
                    # Whoever gave it up must not take this engine for one with the previous version.
                    raise Refused(500, f"abandon of {sync}, but {self.loaded} is loaded already")
                await self._abandon(client, sync)
            await _answer(send, 200, {"message": "Weight update abandoned"})
            return
        if path == "/start_weight_update" and self.active and sync is not None:
            if sync == self.open:
                await _answer(send, 200, {"message": "Weight update started"})
                return
            if self.open is None or sync > self.open:
                await self._abandon(client, sync)
        if path == "/resume":
            self._refuse_torn()
        if path == "/init_weight_transfer_engine":
            receive, plan = await _peek_plan(receive)
            status, _ = await self._forward(scope, receive, send, ((PLAN_HEADER, plan),) if plan else ())
            return
        async with self._finishing if path == "/finish_weight_update" else nullcontext():
            try:
                status, body = await self._forward(scope, receive, send)
            except Exception as error:  # vLLM makes its 500 of it, outside of all middleware
                await self._note(path, 500, str(error), sync, headers, client)
                raise
            await self._note(path, status, body, sync, headers, client)

    async def _note(
        self, path: str, status: int, body: str, sync: SyncId | None, headers: dict[str, str], client: Any
    ) -> None:
        """What vLLM's answer to a control call means for the state here."""
        ok = status == 200
        if path == "/pause" and ok:
            self._lease_s = _lease_of(headers)
        elif path == "/resume" and ok:
            self._lease_s = 0.0
        elif path == "/start_weight_update" and ok:
            self.active, self.open = True, sync
        elif path == "/update_weights" and not ok:
            self.active, self.open = False, None
        elif path == "/finish_weight_update":
            if ok:
                self.active, self.open, self.torn = False, None, ""
                self.loaded = sync
            elif TORN in body:
                self.torn = f"{sync or 'an update'} failed while it was loaded"
                # Never the old version's name again: whoever asks must not take these weights for it.
                await client.update_weight_version(f"{sync or 'update'}.torn")

    async def _forward(
        self, scope: Scope, receive: Receive, send: Send, extra: tuple[tuple[str, str], ...] = ()
    ) -> tuple[int, str]:
        """vLLM's answer goes out as it is, with ``extra`` headers if it is a 200; also returned.

        Raises ``Refused`` when the engine dies and vLLM says nothing.
        """
        status, body = 0, bytearray()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 200:
                    added = [(name.encode(), value.encode()) for name, value in extra]
                    message = {**message, "headers": [*message.get("headers", ()), *added]}
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
            await send(message)

        client = scope["app"].state.engine_client
        answering = asyncio.ensure_future(self._app(scope, receive, watch))
        try:
            while not answering.done():
                dead = client.errored
                await asyncio.wait({answering}, timeout=LOOK_EVERY_S)
                if dead and not answering.done() and not status:
                    raise Refused(500, f"{scope['path']}: the engine core has died")
            await answering
        finally:
            answering.cancel()
        return status, body.decode("utf-8", "replace")

    async def _abandon(self, client: Any, sync: SyncId | None) -> None:
        """Drops the open update, if it is that of ``sync`` or older. vLLM has no call for that: an update
        that fails closes its session, and ours fails on request.
        """
        if self.open is not None and sync is not None and sync < self.open:
            raise Refused(500, f"abandon of {sync}, but the open weight update is {self.open}")
        if not self.active:
            return
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # noqa: PLC0415

        try:
            await client.update_weights(WeightTransferUpdateRequest(update_info={ABANDON_KEY: True}))
        except Exception as error:
            if ABANDONED not in str(error) and "start_weight_update must be called" not in str(error):
                words = f"the weight update {self.open or 'under way'} could not be dropped: {error}"
                raise Refused(500, words) from error
        self.active, self.open = False, None

    def _observe_term(self, headers: dict[str, str]) -> None:
        text = headers.get(TERM_HEADER, "0")
        if not text.isdecimal() or len(text) > 18:
            raise Refused(400, f"header {TERM_HEADER}: {text[:40]!r} is not a term")
        term = int(text)
        if term and term < self.term:
            raise Refused(409, f"term {term} is over: this engine has seen term {self.term}")
        self.term = max(self.term, term)

    def _refuse_torn(self) -> None:
        if self.torn:
            raise Refused(503, f"the weights are torn: {self.torn}. Repeat the update while paused")

    def _capabilities(self, app: Any) -> dict[str, Any]:
        config = getattr(app.state.engine_client.vllm_config, "weight_transfer_config", None)
        ours = getattr(config, "backend", "") in ("lab_shm", "lab_gloo")
        abilities = EngineCapabilities(
            staged=ours,
            hashes=ours,
            token_versions=any(getattr(route, "path", "") == TOKEN_ROUTE for route in app.routes),
            term_fencing=True,
        )
        state = {"seen_term": self.term, "start_id": self.start_id, "torn": self.torn}
        return {**dataclasses.asdict(abilities), **state}

    # --- the lease --------------------------------------------------------------------------------------

    def _holding_lease(self, state: Any) -> _Holding:
        return _Holding(self, state.engine_client)

    def _arm(self, client: Any) -> None:
        """After the last control call: who paused and says nothing more for the lease has died."""
        if self._lease_s:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._lease_s, self._expire, client)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, client: Any) -> None:
        self._timer = None
        self._expiry = asyncio.get_running_loop().create_task(self._release(client))

    async def _release(self, client: Any) -> None:
        await self._abandon(client, None)
        if not self.torn:
            await client.resume_generation()
        self._lease_s = 0.0


class _Holding:
    """While a control call is under way the lease does not run."""

    def __init__(self, middleware: LabMiddleware, client: Any) -> None:
        self._middleware, self._client = middleware, client

    def __enter__(self) -> None:
        self._middleware._busy += 1
        self._middleware._disarm()

    def __exit__(self, *_: object) -> None:
        self._middleware._busy -= 1
        if not self._middleware._busy:
            self._middleware._arm(self._client)


def _sync_of(headers: dict[str, str]) -> SyncId | None:
    text = headers.get(SYNC_HEADER)
    if text is None:
        return None
    try:
        return SyncId.parse(text)
    except ValueError as error:
        raise Refused(400, f"header {SYNC_HEADER}: {error}") from error


def _lease_of(headers: dict[str, str]) -> float:
    """Seconds; 0: none."""
    try:
        lease_s = float(headers.get(LEASE_HEADER, "0"))
    except ValueError:
        return 0.0
    return lease_s if 0 < lease_s <= MAX_LEASE_S else 0.0


async def _peek_plan(receive: Receive) -> tuple[Receive, str]:
    """The digest of the plan in the body, and a ``receive`` that yields the same body again.

    Sent back as a header when the join succeeds, as the worker has then compared that plan with the model.
    """
    body, more = bytearray(), True
    messages: list[Message] = []
    while more:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
    replay = iter(messages)

    async def again() -> Message:
        return next(replay, None) or await receive()

    try:
        digest = json.loads(body)["init_info"]["plan_digest"]
    except (ValueError, KeyError, TypeError):
        digest = ""
    return again, digest if isinstance(digest, str) and digest.isalnum() and len(digest) <= 128 else ""


def _error(status: int, message: str) -> dict[str, Any]:
    kind = {400: "Bad Request", 409: "ConflictError"}.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
