"""vLLM's development routes about memory: sleep, wake-up, caches.

The memory itself is a CPU's: as in a vLLM on CPU, nothing is offloaded at any level, and only the pause and
the emptied caches are real.
"""

from __future__ import annotations

from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.wire import ApiError, answer, choice, invalid, query_flag
from grpo_lab.types import PauseMode

MEMORY = ("kv_cache", "weights")  # what sleeps, by vLLM's tags
MAX_LEVEL = 2


class MemoryRoutes:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._asleep: set[str] = set()
        self._level = -1
        self.table = {
            ("POST", "/sleep"): self.sleep,
            ("POST", "/wake_up"): self.wake_up,
            ("GET", "/is_sleeping"): self.is_sleeping,
            ("POST", "/release_kv_cache_memory"): self.release,
            ("POST", "/reset_prefix_cache"): self.reset_prefix_cache,
            ("POST", "/reset_mm_cache"): self.nothing_to_reset,
            ("POST", "/reset_encoder_cache"): self.nothing_to_reset,
        }

    def level(self) -> int:
        """The level that it sleeps at; -1 awake."""
        return self._level

    async def sleep(self, http: HttpRequest) -> Response:
        level = _level(http.query_params.get("level", "1"))
        mode = choice(http.query_params.get("mode", "abort"), "query.mode", ("abort", "wait", "keep"))
        await self._core.pause(cast(PauseMode, mode), level >= 1)
        if level >= 1:
            self._asleep = set(MEMORY)
        self._level = level
        return answer({"status": "sleeping", "level": level})

    async def wake_up(self, http: HttpRequest) -> Response:
        """With tags, only that memory wakes; the engine runs again once all has (or for "scheduling")."""
        self._core.check_alive()
        tags = http.query_params.getlist("tags") or None
        memory = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        if memory is None:
            self._asleep.clear()
        elif self._asleep.issuperset(memory):
            self._asleep -= set(memory)
        awake = not self._asleep
        if awake:
            self._level = -1
            await self._core.resume()
        return answer({"status": "awake" if awake else "sleeping", "tags": tags})

    async def is_sleeping(self, http: HttpRequest) -> Response:
        """A paused engine counts as sleeping, as in vLLM."""
        self._core.check_alive()
        return answer({"is_sleeping": self._core.is_paused or bool(self._asleep)})

    async def release(self, http: HttpRequest) -> Response:
        raise ApiError(
            500, "Call to release_kv_cache_memory method failed: Selective discard is not supported on CPU."
        )

    async def reset_prefix_cache(self, http: HttpRequest) -> Response:
        """Fails, and clears nothing, while sequences hold blocks, unless these are to start again."""
        self._core.check_alive()
        running = query_flag(http, "reset_running_requests", False)
        query_flag(http, "reset_external", False)
        async with self._core.held():
            if running:
                self._core.scheduler.preempt_all()
            if self._core.scheduler.pool.num_used:
                return answer({"success": False})
            self._core.flush_prefix_cache()
        return answer({"success": True})

    async def nothing_to_reset(self, http: HttpRequest) -> Response:
        self._core.check_alive()
        return Response(status_code=200)


def _level(text: str) -> int:
    try:
        level = int(text)
    except ValueError:
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", "query.level", message, text) from None
    if level < 0:
        message = "Input should be greater than or equal to 0"
        raise invalid("greater_than_equal", "query.level", message, text, "'ge': 0")
    if level > MAX_LEVEL:
        message = f"Input should be less than or equal to {MAX_LEVEL}"
        raise invalid("less_than_equal", "query.level", message, text, f"'le': {MAX_LEVEL}")
    return level
