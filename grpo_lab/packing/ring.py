"""Preallocated slots that buckets are packed into.

The first touch of fresh memory costs several times the copy into it, so slots are touched once, here, and
reused.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from grpo_lab.errors import PackingError

_PAGE_BYTES = 4096
_LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def allocate_ring(slots: int, slot_bytes: int) -> list[memoryview]:
    """`slots` private buffers, page-aligned and touched, on huge pages where the system grants them."""
    return [_allocate(slot_bytes) for _ in range(slots)]


def _allocate(nbytes: int) -> memoryview:
    if torch.cuda.is_available():  # pinned, so that copies to and from a GPU run at full speed
        return as_bytes(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).numpy(), "slot")
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # huge pages are a wish, not a condition
        memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.uint8)[::_PAGE_BYTES] = 0
    return memoryview(memory)[:nbytes]


def stays_in_cache(ring_bytes: int, cache: Path = _LAST_LEVEL_CACHE) -> bool:
    """Whether a ring is still in the last-level cache when its reader comes.

    Then ordinary stores fill it faster than non-temporal ones (1.1 times, measured on 32 MiB of L3, up to
    half of it), and it is read back more than twice as fast. Where the system does not tell its cache's
    size, 4 MiB are assumed.
    """
    found = re.fullmatch(r"(\d+)K\s*", cache.read_text()) if cache.exists() else None
    return 2 * ring_bytes <= (int(found[1]) << 10 if found else 4 << 20)


def check_ring(ring: Iterable[object], slot_bytes: int) -> list[memoryview]:
    """The given buffers as writable bytes; raises PackingError naming a slot that does not do."""
    slots = [as_bytes(buffer, f"ring slot {index}") for index, buffer in enumerate(ring)]
    if not slots:
        raise PackingError("the ring has no slot; give at least one buffer")
    for index, slot in enumerate(slots):
        if slot.readonly:
            raise PackingError(f"ring slot {index} is read-only")
        if slot.nbytes < slot_bytes:
            raise PackingError(
                f"ring slot {index} has {slot.nbytes} bytes; the plan's largest bucket needs {slot_bytes}"
            )
    return slots


def as_bytes(buffer: object, what: str) -> memoryview:
    """A one-dimensional byte view of any contiguous buffer; raises PackingError for anything else."""
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
    except TypeError as error:
        raise PackingError(f"{what} is not a contiguous buffer of bytes: {error}") from None
