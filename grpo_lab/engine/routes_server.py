"""What a server says of itself: health, version, load, metrics."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from grpo_lab.engine.context import VERSION, Context
from grpo_lab.engine.metrics import Metrics
from grpo_lab.engine.wire import answer


class ServerRoutes:
    def __init__(self, context: Context, metrics: Metrics) -> None:
        self._context, self._metrics = context, metrics
        self.table = {
            ("GET", "/health"): self.health,
            ("GET", "/ping"): self.health,
            ("POST", "/ping"): self.health,
            ("GET", "/load"): self.load,
            ("GET", "/version"): self.version,
            ("GET", "/metrics"): self.metrics,
        }

    async def health(self, http: HttpRequest) -> Response:
        return Response(status_code=200 if self._context.core.failure is None else 503)

    async def load(self, http: HttpRequest) -> Response:
        """Always 0, as of a vLLM without --enable-server-load-tracking."""
        return answer({"server_load": 0})

    async def version(self, http: HttpRequest) -> Response:
        return answer({"version": VERSION})

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
