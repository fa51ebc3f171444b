"""The compiled extension, and what it needs to know about a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from grpo_lab.errors import PackingError
from grpo_lab.packing.dtypes import DTYPES
from grpo_lab.packing.plan import BucketPlan

if TYPE_CHECKING:
    import torch

try:
    from grpo_lab.packing import _packing as extension
except ImportError as error:
    raise ImportError(
        f"the compiled packer is missing ({error}); build it with `pip install -e .` in the repository's root"
    ) from error

__all__ = ["BoundTensors", "buckets_of", "extension", "memory_of"]


def buckets_of(plan: BucketPlan) -> extension.Buckets:
    """The plan as the extension holds it."""
    pieces = sorted(
        (p.bucket, p.offset, t, p.first, p.count) for t, e in enumerate(plan.tensors) for p in e.pieces
    )
    return extension.Buckets(
        [(DTYPES[e.wire_dtype].code, e.numel) for e in plan.tensors],
        [(tensor, bucket, offset, first, count) for bucket, offset, tensor, first, count in pieces],
        list(plan.bucket_sizes),
    )


def memory_of(tensor: torch.Tensor, name: str) -> tuple[int, int, int]:
    """Address of the first element, and address and bytes of the storage around it."""
    if tensor.device.type != "cpu":
        raise PackingError(
            f"tensor {name!r} is on {tensor.device}; the CPU packer reads and writes host memory only"
        )
    if tensor.layout is not _strided():
        raise PackingError(f"tensor {name!r} has layout {tensor.layout}; only strided tensors can be packed")
    if tensor.is_conj() or tensor.is_neg():
        raise PackingError(
            f"tensor {name!r} is a lazy conjugate or negative view; call resolve_conj() / resolve_neg() first"
        )
    storage = tensor.untyped_storage()
    if tensor.numel() and not storage.nbytes():
        raise PackingError(f"tensor {name!r} has no memory behind it (a freed or resharded parameter?)")
    return tensor.data_ptr(), storage.data_ptr(), storage.nbytes()


class BoundTensors:
    """Tensors kept alive; it can tell whether one changed since it was made: memory, shape, strides or dtype.

    Looking is one pass in the extension over what torch's stable C interface tells of each tensor, or the
    same in Python where torch is none that the extension knows.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._watch: extension.Watch | _PythonWatch = _watch(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._tensors[index]

    @property
    def watch(self) -> extension.Watch | None:
        """For `extension.pack_watched`; None if nothing is bound, or looking is a pass in Python."""
        return self._watch if self._tensors and isinstance(self._watch, extension.Watch) else None

    def changed(self, span: range) -> bool:
        """True if one of ``self[span]`` is not what it was."""
        return self._watch.changed(span.start, span.stop)


class _PythonWatch:
    """As `extension.Watch`."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors
        self._seen = [_described(tensor) for tensor in tensors]

    def changed(self, begin: int, end: int) -> bool:
        tensors, seen = self._tensors[begin:end], self._seen[begin:end]
        try:
            return any(_described(t) != s for t, s in zip(tensors, seen, strict=True))
        except RuntimeError:  # one has no memory to tell of any more
            return True


def _watch(tensors: tuple[torch.Tensor, ...]) -> extension.Watch | _PythonWatch:
    import torch  # noqa: PLC0415 - plans are used where torch is not

    try:
        return extension.Watch(tensors, torch.Tensor)
    except NotImplementedError:
        return _PythonWatch(tensors)


def _described(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _strided() -> torch.layout:
    import torch  # noqa: PLC0415 - plans are used where torch is not

    return torch.strided
