"""A stock vLLM's own wire format on a CPU: a gloo broadcast of bytes, announced by names, dtypes and shapes.

Nothing on this wire says what the bytes are: both sides must cut the stream alike. Packed, a buffer closes
when it *exceeds* the size that both were told, and tensors lie in it without padding; unpacked, every tensor
is a broadcast of its own.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch marks no re-exports
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from grpo_lab.errors import TransportError

T = TypeVar("T")
BACKEND = "gloo_packed"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PATH = re.compile(r"(?:/[\w.\-]+)+/[\w\-]+\.\w+")
Item = tuple[str, torch.dtype, tuple[int, ...]]


class StockInit(Protocol):
    """What of an ``init_info`` the wire needs to know."""

    @property
    def master_address(self) -> str: ...
    @property
    def master_port(self) -> int: ...
    @property
    def rank_offset(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def packed(self) -> bool: ...
    @property
    def packed_buffer_size_bytes(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def group(self) -> str: ...


class StockGlooReceiver:
    """An engine's end. Torch's calls run in a thread of its own, which gloo's time-out bounds.

    Raises ``TransportError`` with gloo's own first line, which is what a vLLM worker passes on.
    """

    def __init__(self) -> None:
        self._group: ProcessGroupGloo | None = None
        self._init: StockInit | None = None

    async def join(self, init: StockInit) -> None:
        self._init = init
        timeout = timedelta(seconds=init.timeout_s)

        def make_store() -> Store:
            address = (init.master_address, init.master_port)
            return TCPStore(*address, timeout=timeout, wait_for_workers=False)

        def form() -> ProcessGroupGloo:
            host = init.master_address
            return form_group(
                make_store(), init.group, init.rank_offset, init.world_size, host, init.timeout_s
            )

        self._group = await _in_thread(form)

    async def receive(self, layout: Sequence[Item]) -> AsyncIterator[list[tuple[str, Tensor]]]:
        """The tensors of one broadcast at a time."""
        init, group = self._init, self._group
        if init is None or group is None:
            raise TransportError("the group was never joined")
        for part in cut(layout, init.packed_buffer_size_bytes if init.packed else -1, item_nbytes):
            buffer = torch.empty(sum(item_nbytes(item) for item in part), dtype=torch.uint8)
            await _in_thread(partial(broadcast, group, buffer, init.timeout_s))
            yield unpacked(buffer, part)

    async def close(self) -> None:
        self._group = self._init = None


class StockGlooSender:
    """A trainer's end: rank 0, which also holds the store. For tests, and for trainers without a vLLM.

    Life: ``open`` -> hand ``init_info`` to every engine -> ``accept`` -> any number of ``send`` -> ``close``.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        engines: int = 1,
        buffer_bytes: int = 1 << 20,
        packed: bool = True,
        timeout_s: float = 30.0,
    ) -> None:
        self._host, self._engines = host, engines
        self._buffer_bytes, self._packed = buffer_bytes, packed
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def open(self) -> None:
        timeout = timedelta(seconds=self._timeout_s)
        self._store = TCPStore(self._host, 0, is_master=True, timeout=timeout, wait_for_workers=False)

    def init_info(self, engine: int = 0, **changes: Any) -> dict[str, Any]:
        """For engine number ``engine``; ``changes`` make it say something else than this end does."""
        assert self._store is not None, "open() comes first"
        return {
            "master_address": self._host,
            "master_port": self._store.port,
            "rank_offset": engine + 1,
            "world_size": self._engines + 1,
            "packed": self._packed,
            "packed_buffer_size_bytes": self._buffer_bytes,
            "timeout_s": self._timeout_s,
            "group": "weights",
            **changes,
        }

    async def accept(self) -> None:
        """Returns when every engine has joined. Raises ``TransportError`` after the time-out."""
        store = self._store
        assert store is not None, "open() comes first"
        self._group = await _in_thread(
            lambda: form_group(store, "weights", 0, self._engines + 1, self._host, self._timeout_s)
        )

    async def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts them in order, as they are. Raises ``TransportError``."""
        group = self._group
        assert group is not None, "accept() comes first"
        for part in cut(tensors, self._buffer_bytes if self._packed else -1, lambda tensor: tensor.nbytes):
            buffer = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in part])
            await _in_thread(partial(broadcast, group, buffer, self._timeout_s))

    def close(self) -> None:
        self._group = self._store = None


def update_info(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What announces them, as vLLM's trainer API writes it."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).rpartition(".")[2] for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def cut(items: Sequence[T], size: int, nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Parts of the stream: one closes when it exceeds ``size`` bytes (-1: each item alone).

    Source: the packed consumer of vLLM's NCCL weight transfer, whose rule this is.
    """
    part: list[T] = []
    filled = 0
    for item in items:
        part.append(item)
        filled += nbytes_of(item)
        if filled > size:
            yield part
            part, filled = [], 0
    if part:
        yield part


def item_nbytes(item: Item) -> int:
    return item[1].itemsize * torch.Size(item[2]).numel()


def unpacked(buffer: Tensor, part: Sequence[Item]) -> list[tuple[str, Tensor]]:
    """The named tensors that lie in ``buffer`` one after another."""
    found, first = [], 0
    for item in part:
        name, dtype, shape = item
        piece = buffer[first : first + item_nbytes(item)]
        first += item_nbytes(item)
        found.append((name, piece.clone().view(dtype).view(shape)))
    return found


def form_group(
    store: Store, prefix: str, rank: int, size: int, master: str, timeout_s: float
) -> ProcessGroupGloo:
    """Returns when all ``size`` ranks are there. On loopback if the master is, else on the default device."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    if master in LOOPBACK:
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    return ProcessGroupGloo(PrefixStore(prefix, store), rank, size, options)


def broadcast(group: ProcessGroupGloo, buffer: Tensor, timeout_s: float) -> None:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=timeout_s)
    group.broadcast([buffer], options).wait()  # type: ignore[attr-defined]


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs a call that gloo bounds, in a daemon thread: a process that ends need not wait for it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="grpo_lab_stock", daemon=True).start()
    try:
        return await asyncio.wrap_future(done)
    except RuntimeError as error:
        first_line = str(error).strip().partition("\n")[0][:300]
        raise TransportError(_PATH.sub("<path>", first_line)) from error
