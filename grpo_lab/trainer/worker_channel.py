"""Messages between the trainer and its rollout worker: length-prefixed pickles over a socket pair.

Both ends are one program: the trainer makes the pair and hands one end to the process that it spawns.
Every message carries the sender's newest event id, so that the two traces can be merged.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any, Literal

from grpo_lab.errors import WorkerError

_LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 1 << 30

Kind = Literal[
    "version",  # to the worker: (version)
    "fenced",  # to the worker: names of engines that are out of service
    "taken",  # to the worker: one group left the queue
    "stop",  # to the worker
    "item",  # from the worker: a RolloutGroup or DroppedGroup
    "beat",  # from the worker: (progress, blocked_by)
    "failed",  # from the worker: its last words
    "stopped",  # from the worker: nothing follows
]


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    body: Any = None
    cause: str = ""


def encode(message: Message) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Decoder:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now. Raises ``WorkerError`` for a length that cannot be."""
        self._data += data
        messages: list[Message] = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_MESSAGE_BYTES:
                raise WorkerError(f"a message of {length} bytes, the limit is {MAX_MESSAGE_BYTES}")
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            messages.append(pickle.loads(bytes(self._data[_LENGTH.size : end])))  # noqa: S301 - own process
            del self._data[:end]
        return messages


async def read_messages(reader: asyncio.StreamReader) -> list[Message]:
    """At least one message, or an empty list at the end of the stream."""
    decoder = Decoder()
    while True:
        try:
            head = await reader.readexactly(_LENGTH.size)
            (length,) = _LENGTH.unpack(head)
            body = await reader.readexactly(min(length, MAX_MESSAGE_BYTES))
        except asyncio.IncompleteReadError:
            return []
        messages = decoder.feed(head + body)
        if messages:
            return messages
