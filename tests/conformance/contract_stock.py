"""Updates in vLLM's own form (names, dtypes, shapes), whole and spoiled, and who sends them."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from contract_weights import Model
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from grpo_lab.engine.failures import WorkerKilled
from grpo_lab.errors import TransportError
from grpo_lab.transport import stock as wire_format

Wire = list[tuple[str, str, torch.Tensor]]  # name, dtype name, tensor
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
BUFFER_BYTES = 1 << 20  # the whole model: nothing is left to send when the engine gives up
UNPACKED = -1  # every tensor is a buffer of its own
MEMORY_PORT = 29500  # of no socket
TIMEOUT_S = 20.0
UNSENT = (
    "nothing",
    "lists differ",
    "bad dtype",
    "torch dtype",
    "unknown field",
)  # refused before a byte moves


class StockTrainer:
    """Rank 0 of a group: ``prepare`` opens it, ``join`` waits for the engine, ``send`` broadcasts."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._prefix = ""
        self._buffer_bytes, self._timeout = BUFFER_BYTES, timedelta(seconds=TIMEOUT_S)

    async def prepare(self, own: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        """The init info. A store of its own each time, as a trainer that starts again has.

        ``changes`` go for both sides, ``own`` for this one only.
        """
        self._group = None
        self._settle({**changes, **own})
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self._prefix = secrets.token_hex(8)
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        return {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
            "timeout_s": TIMEOUT_S,
            "group": self._prefix,
            **changes,
        }

    def _settle(self, mine: Mapping[str, Any]) -> None:
        size = mine.get("packed_buffer_size_bytes", BUFFER_BYTES)
        self._buffer_bytes = size if mine.get("packed", True) else UNPACKED
        self._timeout = timedelta(seconds=mine.get("timeout_s", TIMEOUT_S))

    async def join(self) -> None:
        self._group = await asyncio.to_thread(self._form)

    def _form(self) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        assert self._store is not None
        return ProcessGroupGloo(PrefixStore(self._prefix, self._store), 0, 2, options)

    async def send(self, wire: Wire, fault: str = "") -> None:
        """``dies``: the group is gone after the first buffer. ``hangs``: no other buffer comes."""
        buffers = self._buffers(wire)
        await self._send(buffers[:1] if fault else buffers)
        if fault == "dies":
            await self.close()

    def _buffers(self, wire: Wire) -> list[torch.Tensor]:
        parts = cut([tensor for _, _, tensor in wire], self._buffer_bytes)
        return [torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in part]) for part in parts]

    async def _send(self, buffers: list[torch.Tensor]) -> None:
        await asyncio.to_thread(self._broadcast, buffers)

    def _broadcast(self, buffers: list[torch.Tensor]) -> None:
        group = self._group  # a send that goes on must not find itself in the next group
        assert group is not None
        for buffer in buffers:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            options.timeout = self._timeout
            try:
                group.broadcast([buffer], options).wait()
            except RuntimeError:  # the engine has given up: its answer says why
                return

    async def close(self) -> None:
        self._group = self._store = None


class MemoryTrainer(StockTrainer):
    """The same without a network, for the engine in this process; ``receiver`` is its receiving end."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: asyncio.Queue[torch.Tensor | None] = asyncio.Queue()

    async def prepare(self, own: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        self._sent = asyncio.Queue()
        self._settle({**changes, **own})
        return {
            "master_address": "127.0.0.1", "master_port": MEMORY_PORT, "rank_offset": 1, "world_size": 2,
            "packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "timeout_s": TIMEOUT_S,
            "group": "g", **changes,
        }  # fmt: skip

    async def join(self) -> None:
        """There is nobody to wait for."""

    async def _send(self, buffers: list[torch.Tensor]) -> None:
        for buffer in buffers:
            self._sent.put_nowait(buffer)

    async def close(self) -> None:
        self._sent.put_nowait(None)

    def receiver(self) -> MemoryReceiver:
        return MemoryReceiver(self._sent)


class MemoryReceiver:
    """Port ``StockReceiver``: what gloo does with messages, and what it says when none comes."""

    def __init__(self, sent: asyncio.Queue[torch.Tensor | None]) -> None:
        self._sent = sent
        self._init: Any = None

    async def join(self, init: Any) -> None:
        self._init = init
        if init.master_port != MEMORY_PORT:
            await asyncio.sleep(init.timeout_s)
            raise TransportError(f"The client socket has timed out after {int(init.timeout_s * 1000)}ms")

    async def receive(
        self, layout: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
    ) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        size = self._init.packed_buffer_size_bytes if self._init.packed else UNPACKED
        for part in wire_format.cut(layout, size, wire_format.item_nbytes):
            buffer = torch.zeros(sum(map(wire_format.item_nbytes, part)), dtype=torch.uint8)
            message = await self._next()
            if len(message) > len(buffer):
                raise WorkerKilled("a message is larger than the buffer for it")
            buffer[: len(message)] = message
            yield wire_format.unpacked(buffer, part)

    async def _next(self) -> torch.Tensor:
        try:
            async with asyncio.timeout(self._init.timeout_s):
                message = await self._sent.get()
        except TimeoutError as error:
            limit_ms = int(self._init.timeout_s * 1000)
            raise TransportError(f"Timed out waiting {limit_ms}ms for recv operation to complete") from error
        if message is None:
            raise TransportError("Connection closed by peer")
        return message

    async def close(self) -> None:
        """Nothing is held."""


def cut(tensors: list[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """Parts of the stream: one closes when it exceeds ``size`` bytes, as vLLM's packed producer does it."""
    parts: list[list[torch.Tensor]] = [[]]
    for tensor in tensors:
        if sum(item.nbytes for item in parts[-1]) > size:
            parts.append([])
        parts[-1].append(tensor)
    return [part for part in parts if part]


def stock_wire(model: Model, weights: str, change: str) -> Wire:
    wire = [(name, "float32", tensor.detach()) for name, tensor in sorted(model.tensors(weights).items())]
    return CHANGES[change](wire)


def stock_update(wire: Wire, change: str) -> dict[str, Any]:
    """The ``update_info`` that goes with it."""
    info: dict[str, Any] = {
        "names": [name for name, _, _ in wire],
        "dtype_names": [dtype for _, dtype, _ in wire],
        "shapes": [list(tensor.shape) for _, _, tensor in wire],
    }
    if change == "lists differ":
        info["shapes"].pop()
    if change == "unknown field":
        info["packed"] = True
    return info


def _each(
    change: Callable[[str, str, torch.Tensor], tuple[str, str, torch.Tensor]],
) -> Callable[[Wire], Wire]:
    return lambda wire: [change(*item) for item in wire]


def _of(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Wire], Wire]:
    return _each(lambda key, dtype, tensor: (key, dtype, change(tensor) if key == name else tensor))


def _swap(name: str) -> str:
    return {GATE: UP, UP: GATE}.get(name, name)


def _bogus(name: str) -> str:
    return name.replace("layers.1.mlp.down_proj", "layers.1.mlp.bogus")


CHANGES: dict[str, Callable[[Wire], Wire]] = {
    "whole": lambda wire: wire,
    "nothing": lambda wire: [],
    "first part": lambda wire: wire[: len(wire) // 2],
    "second part": lambda wire: wire[len(wire) // 2 :],
    "without a norm": lambda wire: [item for item in wire if item[0] != NORM],
    "without k_proj": lambda wire: [item for item in wire if item[0] != K_PROJ],
    "swapped": _each(lambda name, dtype, tensor: (_swap(name), dtype, tensor)),
    "wrong name": _each(lambda name, dtype, tensor: (_bogus(name), dtype, tensor)),
    "transposed": _of(DOWN, lambda tensor: tensor.T),
    "flat": _of(DOWN, lambda tensor: tensor.reshape(-1)),
    "short": _of(DOWN, lambda tensor: tensor[:-1]),
    "bfloat16": _each(lambda name, _, tensor: (name, "bfloat16", tensor.bfloat16())),
    "bad dtype": _each(lambda name, _, tensor: (name, "float33", tensor)),
    "torch dtype": _each(lambda name, _, tensor: (name, "torch.float32", tensor)),
    "lists differ": lambda wire: wire,
    "unknown field": lambda wire: wire,
    "not a number": _each(lambda name, dtype, tensor: (name, dtype, torch.full_like(tensor, float("nan")))),
}
