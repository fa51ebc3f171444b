"""What a stock vLLM can do, read from what it says about itself.

The RL routes changed from release to release: ``/pause`` had ``wait_for_inflight_requests`` before it had
``mode``, updates had two phases (init, update) before they had four, and weight versions came last. So the
server's own OpenAPI description decides, not its version number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_lab.errors import EngineError
from grpo_lab.types import PauseMode

OPENAPI_PATH = "/openapi.json"
TOKEN_ROUTE = "/inference/v1/generate"  # noqa: S105 - a path


@dataclass(frozen=True, slots=True)
class VllmFeatures:
    """By default the newest form, for servers that do not describe themselves.

    Attributes:
        pause_modes: ``/pause`` takes ``mode``, so ``keep`` exists.
        four_phases: updates have a start and a finish.
        token_route: token ids in and out, with weight versions; None: unknown.
    """

    pause_modes: bool = True
    four_phases: bool = True
    token_route: bool | None = None

    def pause_query(self, mode: PauseMode, clear_cache: bool) -> dict[str, str]:
        """The query of ``/pause``. Raises ``EngineError`` for a mode that the server does not have."""
        clear = "true" if clear_cache else "false"
        if self.pause_modes:
            return {"mode": mode, "clear_cache": clear}
        if mode == "keep":
            raise EngineError("this vLLM's /pause has no mode 'keep': use abort or wait, or a newer vLLM")
        return {"wait_for_inflight_requests": "true" if mode == "wait" else "false", "clear_cache": clear}


def features_of(openapi: Mapping[str, Any]) -> VllmFeatures:
    """From an OpenAPI document."""
    paths = openapi.get("paths")
    if not isinstance(paths, dict) or not paths:
        return VllmFeatures()
    pause = paths.get("/pause")
    if pause is None:
        return VllmFeatures(token_route=TOKEN_ROUTE in paths)
    parameters = pause.get("post", {}).get("parameters", ())
    return VllmFeatures(
        pause_modes=any(parameter.get("name") == "mode" for parameter in parameters),
        four_phases="/start_weight_update" in paths,
        token_route=TOKEN_ROUTE in paths,
    )
