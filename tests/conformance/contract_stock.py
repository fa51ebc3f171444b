"""Updates in vLLM's own form (names, dtypes, shapes), whole and spoiled, and who sends them."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from contract_weights import Model
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

Wire = list[tuple[str, str, torch.Tensor]]  # name, dtype name, tensor
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
BUFFER_BYTES = 1 << 20  # the whole model: nothing is left to send when the engine gives up
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

    async def prepare(self, **changes: Any) -> dict[str, Any]:
        """The init info. A store of its own each time, as a trainer that starts again has."""
        self._group = None
        self._buffer_bytes = changes.get("packed_buffer_size_bytes", BUFFER_BYTES)
        self._timeout = timedelta(seconds=changes.get("timeout_s", TIMEOUT_S))
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

    async def join(self) -> None:
        self._group = await asyncio.to_thread(self._form)

    def _form(self) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        assert self._store is not None
        return ProcessGroupGloo(PrefixStore(self._prefix, self._store), 0, 2, options)

    async def send(self, wire: Wire) -> None:
        await asyncio.to_thread(self._broadcast, wire)

    def _broadcast(self, wire: Wire) -> None:
        group = self._group  # a send that goes on must not find itself in the next group
        assert group is not None
        for part in cut([tensor for _, _, tensor in wire], self._buffer_bytes):
            buffer = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in part])
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
        self._sent: asyncio.Queue[Wire] = asyncio.Queue()

    async def prepare(self, **changes: Any) -> dict[str, Any]:
        self._sent = asyncio.Queue()
        return {
            "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
            "packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "timeout_s": TIMEOUT_S,
            "group": "g", **changes,
        }  # fmt: skip

    async def join(self) -> None:
        """There is nobody to wait for."""

    async def send(self, wire: Wire) -> None:
        self._sent.put_nowait(wire)

    def receiver(self) -> MemoryReceiver:
        return MemoryReceiver(self._sent)


class MemoryReceiver:
    """Port ``StockReceiver``: gives what was sent the form that was announced."""

    def __init__(self, sent: asyncio.Queue[Wire]) -> None:
        self._sent = sent

    async def join(self, init: Any) -> None:
        """Joined as soon as it is made."""

    async def receive(
        self, layout: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
    ) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        if not layout:
            return
        async with asyncio.timeout(TIMEOUT_S):
            wire = await self._sent.get()
        for (name, dtype, shape), (_, _, tensor) in zip(layout, wire, strict=True):
            data = tensor.contiguous().view(-1).view(torch.uint8).clone()
            yield [(name, data.view(dtype).view(shape))]

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
