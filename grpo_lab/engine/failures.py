"""What an engine refuses, and how HTTP says it."""

from __future__ import annotations

from grpo_lab.errors import EngineError


class BadRequest(EngineError):
    """A request that can never be served as it is: HTTP 400."""


class StaleTerm(EngineError):
    """A message of an older trainer than one already seen: HTTP 409 (S12)."""


class NotInService(EngineError):
    """A rollout request before the first synced weights, as after a restart: HTTP 503 (S2, S31)."""


class EngineDead(EngineError):
    """A step failed; the engine serves nothing any more: HTTP 500, /health 503."""


class UpdateError(EngineError):
    """A weight update is refused or failed: HTTP 500, as a vLLM worker's exception."""


class WorkerKilled(EngineError):
    """The worker process ended within a transfer, as gloo ends it when a message exceeds its buffer."""
