"""JSON that every reader takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any) -> str:
    """``value`` as indented JSON with a newline at its end; a number that is not finite becomes null.

    >>> strict_json({"loss": float("nan")})
    '{\\n  "loss": null\\n}\\n'
    """
    return json.dumps(_finite(value), indent=2, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
