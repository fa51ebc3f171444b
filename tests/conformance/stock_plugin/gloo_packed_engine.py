"""A weight transfer inside vLLM with the wire format and the life cycle of its own backends, over gloo.

vLLM's backends need a GPU. This one does on a CPU what its NCCL engine does: names, dtypes and shapes are
announced; the trainer broadcasts, packed into buffers or tensor by tensor; each tensor goes to
``load_weights`` within a layerwise reload. The suite calls it "stock". It is found through its directory on
PYTHONPATH; nothing is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "gloo_packed"


@dataclass
class GlooInit(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    timeout_s: float = 60.0
    group: str = ""


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        for field in ("dtype_names", "shapes"):
            given = len(getattr(self, field))
            if given != len(self.names):
                raise ValueError(
                    f"`{field}` should be of the same size as `names`: got {given} and {len(self.names)}"
                )


class GlooPackedEngine(WeightTransferEngine[GlooInit, GlooUpdate]):
    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    group: ProcessGroupGloo | None = None
    info: GlooInit | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        timeout = timedelta(seconds=init_info.timeout_s)
        store = TCPStore(
            init_info.master_address, init_info.master_port, timeout=timeout, wait_for_workers=False
        )
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = ProcessGroupGloo(
            PrefixStore(init_info.group, store), rank, init_info.world_size, options
        )
        self.info = init_info

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdate) -> None:
        if self.group is None or self.info is None:
            raise RuntimeError(f"{NAME} weight transfer not initialized. Call init_transfer_engine() first.")
        layout = [
            (name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            )
        ]
        size = self.info.packed_buffer_size_bytes if self.info.packed else 0
        for part in cut(layout, size):
            buffer = torch.empty(sum(map(nbytes, part)), dtype=torch.uint8)
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            options.timeout = timedelta(seconds=self.info.timeout_s)
            self.group.broadcast([buffer], options).wait()
            offset = 0
            for item in part:
                name, dtype, shape = item
                piece = buffer[offset : offset + nbytes(item)]
                offset += nbytes(item)
                self.model.load_weights([(name, piece.clone().view(dtype).view(shape))])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = self.info = None


def nbytes(item: tuple[str, torch.dtype, tuple[int, ...]]) -> int:
    return item[1].itemsize * torch.Size(item[2]).numel()


def cut(layout: list, size: int) -> Iterator[list]:
    """Parts of the stream: one closes when it exceeds ``size`` bytes."""
    part: list = []
    filled = 0
    for item in layout:
        part.append(item)
        filled += nbytes(item)
        if filled > size:
            yield part
            part, filled = [], 0
    if part:
        yield part


def register() -> None:
    """Idempotent: the API server, the engine and each worker load plugins, some of them twice."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, GlooPackedEngine)
