"""Types of the compiled extension (csrc/module.cpp). Every function releases the GIL while it works."""

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Buffer

class Pool:
    """`threads` counts the caller; a pool of one starts no thread."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Buckets:
    def __init__(
        self,
        tensors: Sequence[tuple[int, int]],
        pieces: Sequence[tuple[int, int, int, int, int]],
        bucket_bytes: Sequence[int],
    ) -> None: ...

class Views:
    def __init__(self, buckets: Buckets, target: bool) -> None: ...
    def add(
        self,
        tensor: int,
        dtype: int,
        shape: Sequence[int],
        strides: Sequence[int],
        memory: tuple[int, int, int],
        /,
    ) -> None: ...
    def clear(self) -> None: ...
    def moved(
        self,
        first: int,
        tensors: tuple[object, ...],
        begin: int,
        end: int,
        data_ptr: Callable[[Any], int],
        near: Buffer,
    ) -> bool: ...
    def move(self, view: int, memory: tuple[int, int, int], /) -> None: ...
    def __len__(self) -> int: ...

def pack(
    sources: Views, pool: Pool, bucket: int, memory: Buffer, hash: bool, stream: bool, isa: str = "auto"
) -> int: ...
def unpack(
    targets: Views, pool: Pool, bucket: int, memory: Buffer, stream: bool, isa: str = "auto"
) -> None: ...
def hash64(memory: Buffer, pool: Pool, isa: str = "auto") -> int: ...
def copy(to: Buffer, from_: Buffer, pool: Pool, isa: str = "auto") -> None: ...
def instruction_sets() -> list[str]: ...
def root_hash(leaves: Sequence[int], length: int) -> int: ...
def emulate_device_pack(pieces: Buffer, memory: Buffer) -> list[int]: ...
def emulate_device_unpack(pieces: Buffer, memory: Buffer) -> None: ...
