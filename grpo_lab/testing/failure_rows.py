"""The JSON of a failure file, judged before anything that is slow to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_lab.errors import TraceError

LARGEST_FILE_BYTES = 64 << 20
FIX = "Name one as grpo-lab fuzz or mutants has written it, or have it found again: grpo-lab fuzz"


def read_row(path: Path) -> dict[str, Any]:
    """Raises ``TraceError`` for what is no JSON object with a schema number."""
    row = _read(path)
    if type(row.get("schema")) is not int:
        raise TraceError(f"{path}: not a failure file; it has no schema number. {FIX}")
    return row


def _read(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE_BYTES:
            raise TraceError(f"{path}: {size:,} bytes; a failure file has at most {LARGEST_FILE_BYTES:,}")
        row = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair could not be printed
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: no failure file can be read: {error}. {FIX}") from error
    if not isinstance(row, dict):
        raise TraceError(f"{path}: not a failure file; it has no schema number. {FIX}")
    return row
