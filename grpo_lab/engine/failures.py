"""What an engine refuses, and how HTTP says it."""

from __future__ import annotations

from grpo_lab.errors import EngineError


class BadRequest(EngineError):
    """A request that can never be served as it is: HTTP 400."""


class StaleTerm(EngineError):
    """A message of an older trainer than one already seen: HTTP 409 (S12)."""


class EngineDead(EngineError):
    """A step failed; the engine serves nothing any more: HTTP 500, /health 503."""
