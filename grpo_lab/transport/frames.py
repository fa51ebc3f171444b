"""The words on the control channel: fixed-size frames, and short JSON for the greeting.

Nothing here is unpickled, and no length is believed before it is compared with its bound.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

from grpo_lab.errors import HandshakeError, TransportError
from grpo_lab.types import JsonDict, SyncId

MAGIC = b"GLW1"
FRAME_BYTES = 32
MAX_GREETING_BYTES = 4096
LENGTH = struct.Struct("<I")

_BEGIN, _BUCKET, _RELEASE = 1, 2, 3
_BEGIN_FRAME = struct.Struct("<4sHxxIIQQ")  # kind, buckets, attempt, term, version
_BUCKET_FRAME = struct.Struct("<4sHHI4xQQ")  # kind, slot, bucket, nbytes, hash64


@dataclass(frozen=True, slots=True)
class Begin:
    """Sender to receivers: ``num_buckets`` buckets of ``sync`` follow."""

    sync: SyncId
    num_buckets: int

    def encode(self) -> bytes:
        sync = self.sync
        return _BEGIN_FRAME.pack(MAGIC, _BEGIN, self.num_buckets, sync.attempt, sync.term, sync.version)


@dataclass(frozen=True, slots=True)
class Announce:
    """Sender to receivers: bucket ``bucket`` lies in (or is about to be broadcast from) ``slot``."""

    bucket: int
    slot: int
    nbytes: int
    hash64: int

    def encode(self) -> bytes:
        return _BUCKET_FRAME.pack(MAGIC, _BUCKET, self.slot, self.bucket, self.nbytes, self.hash64)


@dataclass(frozen=True, slots=True)
class Release:
    """Receiver to sender: it reads ``slot`` no more."""

    bucket: int
    slot: int

    def encode(self) -> bytes:
        return _BUCKET_FRAME.pack(MAGIC, _RELEASE, self.slot, self.bucket, 0, 0)


Frame = Begin | Announce | Release


def decode(data: bytes) -> Frame:
    """Raises ``TransportError`` for bytes that are no frame."""
    if len(data) != FRAME_BYTES or data[:4] != MAGIC:
        raise TransportError(f"not a control frame: {data[:40]!r}")
    (_, kind, slot, bucket, nbytes, hash64) = _BUCKET_FRAME.unpack(data)
    if kind == _BEGIN:
        (_, _, num_buckets, attempt, term, version) = _BEGIN_FRAME.unpack(data)
        return Begin(SyncId(term, version, attempt), num_buckets)
    if kind == _BUCKET:
        return Announce(bucket, slot, nbytes, hash64)
    if kind == _RELEASE:
        return Release(bucket, slot)
    raise TransportError(f"control frame of unknown kind {kind}")


def encode_greeting(greeting: JsonDict) -> bytes:
    """A length and JSON. Raises ``HandshakeError`` for more than ``MAX_GREETING_BYTES``."""
    body = json.dumps(greeting).encode()
    if len(body) > MAX_GREETING_BYTES:
        raise HandshakeError(f"a greeting of {len(body)} bytes; the limit is {MAX_GREETING_BYTES}")
    return LENGTH.pack(len(body)) + body


def greeting_length(head: bytes) -> int:
    """Raises ``HandshakeError`` for a length beyond the bound."""
    (length,) = LENGTH.unpack(head)
    if length > MAX_GREETING_BYTES:
        raise HandshakeError(f"a greeting of {length} bytes; the limit is {MAX_GREETING_BYTES}")
    return int(length)


def decode_greeting(body: bytes) -> JsonDict:
    """Raises ``HandshakeError`` for anything but a JSON object."""
    try:
        greeting = json.loads(body)
    except ValueError as error:
        raise HandshakeError(f"the greeting is no JSON: {body[:80]!r}") from error
    if not isinstance(greeting, dict):
        raise HandshakeError(f"the greeting is no JSON object: {body[:80]!r}")
    return greeting
