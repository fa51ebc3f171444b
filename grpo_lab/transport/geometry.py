"""What both sides of a transfer must agree on before a byte moves: bucket sizes, slots, bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_lab.errors import HandshakeError, PackingError
from grpo_lab.packing import BucketPlan
from grpo_lab.types import JsonDict

PAGE_BYTES = (
    4096  # a multiple of the packer's 256-byte alignment; also keeps slots of two writers off one page
)
MAX_SLOTS = 64
MAX_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Geometry:
    """The ring: ``slots`` slots of ``slot_bytes`` each, and the exact size of every bucket."""

    bucket_nbytes: tuple[int, ...]
    slots: int
    slot_bytes: int
    plan_digest: str

    @classmethod
    def of_plan(cls, plan: JsonDict, slots: int) -> Geometry:
        """Raises ``HandshakeError`` for a plan that cannot be read or whose digest does not fit it."""
        try:
            parsed = BucketPlan.from_json(plan)
        except PackingError as error:
            raise HandshakeError(f"the bucket plan cannot be used: {error}") from error
        slot_bytes = max(1, math.ceil(parsed.max_bucket_nbytes / PAGE_BYTES)) * PAGE_BYTES
        return cls(parsed.bucket_sizes, slots, slot_bytes, parsed.digest())

    @property
    def num_buckets(self) -> int:
        return len(self.bucket_nbytes)

    @property
    def ring_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def mismatch(self, index: int, expected: int, slot: int, nbytes: int) -> str:
        """Why this cannot be bucket ``expected`` of the plan, or "" when it can."""
        if index != expected or not index < self.num_buckets:
            return f"bucket {index} where bucket {expected} of {self.num_buckets} is due"
        if not 0 <= slot < self.slots:
            return f"bucket {index} in slot {slot}; the ring has {self.slots}, counted from 0"
        if nbytes != self.bucket_nbytes[index]:
            return f"bucket {index} of {nbytes} bytes; the plan says {self.bucket_nbytes[index]}"
        return ""


@dataclass(frozen=True, slots=True)
class Invitation:
    """The fields of ``init_info`` that all transports share, checked: they come from another process."""

    member: str
    token: str
    geometry: Geometry
    progress_timeout_s: float

    @classmethod
    def parse(cls, info: JsonDict, backend: str) -> Invitation:
        """Raises ``HandshakeError`` naming the first field that is wrong."""
        field(info, "backend", lambda v: v == backend, repr(backend))
        slots = field(info, "slots", lambda v: type(v) is int and 1 <= v <= MAX_SLOTS, f"1 to {MAX_SLOTS}")
        timeout_s = field(info, "progress_timeout_s", is_wait, f"a number of seconds up to {MAX_WAIT_S:g}")
        geometry = Geometry.of_plan(field(info, "plan", lambda v: isinstance(v, dict), "a plan"), slots)
        field(info, "plan_digest", lambda v: v == geometry.plan_digest, "the plan's digest")
        return cls(text(info, "member"), text(info, "token"), geometry, float(timeout_s))


def field(info: JsonDict, name: str, valid: Callable[[Any], bool], wanted: str) -> Any:
    """``info[name]`` when ``valid`` accepts it; raises ``HandshakeError`` otherwise."""
    value = info.get(name)
    if not valid(value):
        raise HandshakeError(f"init_info[{name!r}] is {str(value)[:80]!r}; it must be {wanted}")
    return value


def text(info: JsonDict, name: str) -> str:
    """A short, non-empty string of ``init_info``."""
    return str(
        field(info, name, lambda v: isinstance(v, str) and 0 < len(v) <= 256, "a string of 1 to 256 letters")
    )


def is_wait(value: Any) -> bool:
    """Whether ``value`` can bound a wait."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_WAIT_S
