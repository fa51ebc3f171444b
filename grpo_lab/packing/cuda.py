"""The packer for tensors in GPU memory: one kernel launch gathers, casts and hashes a bucket.

The kernels are compiled into ``_packing_cuda.so`` where nvcc is found at build time, and loaded here when a
GPU is asked for. Their per-thread code is shared with the CPU (csrc/device.h) and tested there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from grpo_lab.errors import BucketCorrupt, PackingError
from grpo_lab.packing.device import PIECE, piece_table
from grpo_lab.packing.dtypes import DTYPES, dtype_name
from grpo_lab.packing.native import BoundTensors, extension
from grpo_lab.packing.plan import BucketPlan, TensorEntry

LEAF_BYTES = 1 << 16


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels; raises PackingError if they were not built."""
    path = Path(__file__).with_name("_packing_cuda.so")
    if not path.exists():
        raise PackingError("the CUDA packer was not built: install with nvcc on PATH, or pack on the CPU")
    kernels = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    kernels.grpo_cuda_error.restype = ctypes.c_char_p
    kernels.grpo_cuda_pack.argtypes = [pointer, ctypes.c_int, ctypes.c_int64, pointer, pointer, pointer]
    kernels.grpo_cuda_unpack.argtypes = [pointer, ctypes.c_int, ctypes.c_int64, pointer, pointer]
    return kernels


def unavailable() -> str | None:
    """Why the CUDA packer cannot run here, in words; None if it can."""
    try:
        devices = library().grpo_cuda_device_count()
    except (PackingError, OSError) as error:
        return str(error)
    if not devices:
        return "the CUDA packer is built, but this machine has no GPU"
    if not torch.cuda.is_available():
        return f"the machine has {devices} GPU(s), but this torch ({torch.__version__}) is built without CUDA"
    return None


@dataclass(frozen=True, slots=True)
class CudaBucket:
    """A bucket in GPU memory, complete once ``event`` has passed. ``memory`` is ``nbytes`` of uint8."""

    index: int
    slot: int
    memory: torch.Tensor
    nbytes: int
    event: torch.cuda.Event
    leaves: torch.Tensor

    def hash64(self) -> int:
        """Waits for the bucket; the same value as the CPU packer's."""
        self.event.synchronize()
        return _root(self.leaves, self.nbytes)


class CudaPacker:
    """Packs bound GPU tensors into a ring of slots in GPU memory, on a stream of its own made once.

    Each pack is ordered after what the current stream has enqueued when it is called, so a slot may be reused
    once its reader's work is on that stream, or was waited for.
    """

    def __init__(self, plan: BucketPlan, *, slots: int = 2, device: str | torch.device = "cuda") -> None:
        if (reason := unavailable()) is not None:
            raise PackingError(reason)
        self.plan = plan
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        size = -(-plan.max_bucket_nbytes // 256) * 256
        self._ring = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(slots)]
        leaves = -(-plan.max_bucket_nbytes // LEAF_BYTES)
        self._leaves = [torch.zeros(leaves, dtype=torch.int64, device=self._device) for _ in range(slots)]
        self._tables: list[torch.Tensor] = []
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._watched = BoundTensors(())

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checks the tensors and sends their addresses to the GPU. Call again when another replaced one
        (pack notices one that moved in memory, or changed otherwise)."""
        self._stream.synchronize()  # a pack in flight may still read the tables that go now
        self._tables = []
        for entry in self.plan.tensors:
            _check(entry, tensors, entry.source_dtype, self._device)
        self._tables = [_upload(self.plan, i, tensors, self._device) for i in range(self.plan.num_buckets)]
        self._watched = BoundTensors(tensors[entry.name] for entry in self.plan.tensors)
        self._tensors = tensors

    def pack(self, bucket_index: int, slot: int | None = None) -> CudaBucket:
        """Enqueues the packing of one bucket and returns at once."""
        self.plan.check_bucket(bucket_index)
        if not self._tables:
            raise PackingError("no tensors are bound; call bind() before pack()")
        if self._watched.changed(self.plan.tensors_of_bucket[bucket_index]):
            self.bind(self._tensors)
        slot = bucket_index % len(self._ring) if slot is None else slot
        if type(slot) is not int or not 0 <= slot < len(self._ring):
            raise PackingError(f"no slot {slot!r}: the ring has {len(self._ring)}, counted from 0")
        nbytes = self.plan.bucket_nbytes(bucket_index)
        memory, leaves, table = self._ring[slot], self._leaves[slot], self._tables[bucket_index]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            _launch(
                library().grpo_cuda_pack(
                    table.data_ptr(), table.numel() // PIECE.itemsize, nbytes, memory.data_ptr(),
                    leaves.data_ptr(), self._stream.cuda_stream,
                )
            )  # fmt: skip
            host = torch.empty(-(-nbytes // LEAF_BYTES), dtype=torch.int64, pin_memory=True)
            host.copy_(leaves[: host.numel()], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return CudaBucket(bucket_index, slot, memory[:nbytes], nbytes, event, host)


class CudaUnpacker:
    """Checks buckets in GPU memory and writes their tensors back, on the current stream."""

    def __init__(self, plan: BucketPlan, *, device: str | torch.device = "cuda") -> None:
        if (reason := unavailable()) is not None:
            raise PackingError(reason)
        self.plan = plan
        self._device = torch.device(device)

    def verify(self, bucket_index: int, memory: torch.Tensor, hash64: int) -> None:
        """Raises BucketCorrupt unless `memory` has the bucket's size and hash; waits for the GPU."""
        self._sized(bucket_index, memory)
        leaves = torch.zeros(-(-memory.numel() // LEAF_BYTES), dtype=torch.int64, device=self._device)
        whole = {"bucket": memory}
        table = _upload(BucketPlan.build(whole, bucket_bytes=max(memory.numel(), 16)), 0, whole, self._device)
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            _launch(
                library().grpo_cuda_pack(
                    table.data_ptr(), 1, memory.numel(), None, leaves.data_ptr(), stream.cuda_stream
                )
            )
        found = _root(leaves.cpu(), memory.numel())
        if found != hash64:
            raise BucketCorrupt(f"bucket {bucket_index}: expected hash {hash64:#018x}, found {found:#018x}")

    def unpack(self, bucket_index: int, memory: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
        """Enqueues the writes into existing GPU tensors, under any name that the plan has for them."""
        self._sized(bucket_index, memory)
        targets: dict[str, torch.Tensor] = {}
        for position in self.plan.tensors_of_bucket[bucket_index]:
            entry = self.plan.tensors[position]
            name = next((n for n in entry.names if n in into), entry.name)
            targets[entry.name] = into[name] if name in into else into[entry.name]
            _check(entry, targets, None, self._device)
        table = _upload(self.plan, bucket_index, targets, self._device)
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            _launch(
                library().grpo_cuda_unpack(
                    table.data_ptr(), table.numel() // PIECE.itemsize, memory.numel(), memory.data_ptr(),
                    stream.cuda_stream,
                )
            )  # fmt: skip

    def _sized(self, bucket_index: int, memory: torch.Tensor) -> None:
        expected = self.plan.bucket_nbytes(bucket_index)
        if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() != expected:
            found = f"{tuple(memory.shape)} {memory.dtype}"
            raise BucketCorrupt(f"bucket {bucket_index}: expected {expected} bytes (uint8), found {found}")
        if not memory.is_cuda or not memory.is_contiguous() or memory.data_ptr() % 16:
            raise PackingError(
                f"bucket {bucket_index} must be contiguous GPU memory at a multiple of 16 bytes"
            )


def _check(
    entry: TensorEntry, tensors: Mapping[str, torch.Tensor], dtype: str | None, device: torch.device
) -> None:
    tensor = tensors.get(entry.name)
    if tensor is None:
        raise PackingError(f"tensor {entry.name!r} of the bucket plan was not given")
    if tuple(tensor.shape) != entry.shape:
        raise PackingError(
            f"tensor {entry.name!r} has shape {tuple(tensor.shape)}; the bucket plan has {entry.shape}"
        )
    found = dtype_name(tensor)
    fits = found == dtype if dtype else found == entry.wire_dtype or (
        DTYPES[found].castable and DTYPES[entry.wire_dtype].castable
    )  # fmt: skip
    if not fits:
        raise PackingError(
            f"tensor {entry.name!r} has dtype {found}; the bucket plan has {dtype or entry.wire_dtype}"
        )
    if tensor.device.type != "cuda" or (device.index is not None and tensor.device.index != device.index):
        raise PackingError(f"tensor {entry.name!r} is on {tensor.device}; this packer works on {device}")


def _upload(
    plan: BucketPlan, index: int, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    table = piece_table(plan, index, tensors)
    return torch.from_numpy(table.view("u1").copy()).to(device)


def _root(leaves: torch.Tensor, nbytes: int) -> int:
    return extension.root_hash([leaf & (1 << 64) - 1 for leaf in leaves.tolist()], nbytes)


def _launch(code: int) -> None:
    if code:
        raise PackingError(f"the CUDA packer could not launch: {library().grpo_cuda_error(code).decode()}")
