"""Types of the compiled extension (csrc/module.cpp). Functions that move bytes release the GIL."""

from collections.abc import Sequence

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
    def move(self, view: int, memory: tuple[int, int, int], /) -> None: ...
    def __len__(self) -> int: ...

class Watch:
    """Works with the GIL. Raises NotImplementedError where this torch is not one that it can look into."""

    def __init__(self, tensors: tuple[object, ...], type: type) -> None: ...
    def changed(self, begin: int, end: int) -> bool: ...
    def __len__(self) -> int: ...

def pack(
    sources: Views, pool: Pool, bucket: int, memory: Buffer, hash: bool, stream: bool, isa: str = "auto"
) -> int: ...
def pack_watched(
    sources: Views,
    watch: Watch,
    starts: Buffer,
    tensors: tuple[int, int],
    pool: Pool,
    bucket: int,
    memory: Buffer,
    hash: bool,
    stream: bool,
    isa: str = "auto",
) -> int | None:
    """As pack, looking at tensors while those already looked at are packed; None if one changed.

    `tensors`: all that the bucket holds (first, end). `starts`: where each of the plan's begins in `watch`,
    and the end, 8 bytes each.
    """

def unpack(
    targets: Views, pool: Pool, bucket: int, memory: Buffer, stream: bool, isa: str = "auto"
) -> None: ...
def hash64(memory: Buffer, pool: Pool, isa: str = "auto") -> int: ...
def move(
    to: Buffer, from_: Buffer, pool: Pool, reads: int = 1, writes: int = 1, isa: str = "auto"
) -> int: ...
def instruction_sets() -> list[str]: ...
def root_hash(leaves: Sequence[int], length: int) -> int: ...
def emulate_device_pack(pieces: Buffer, memory: Buffer) -> list[int]: ...
def emulate_device_unpack(pieces: Buffer, memory: Buffer) -> None: ...
