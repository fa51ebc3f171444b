"""One shared-memory segment: made, touched, unlinked at once, so that no kill -9 can leave it behind.

Readers do not attach by name: they are handed a read-only descriptor over the control channel. The name
exists only between two system calls; ``sweep_stale_segments`` removes what a kill between them left.
(``multiprocessing.shared_memory`` is not used: until Python 3.13 whoever attaches also unlinks at exit.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from grpo_lab.errors import TransportError

SHM_DIRECTORY = Path("/dev/shm")  # noqa: S108 - the system's directory for POSIX shared memory
_NAME = re.compile(r"grpo_lab_(\d+)_[0-9a-f]+")
_MADV_POPULATE_WRITE = 23  # linux/mman.h; a full directory is an error of it, not a SIGBUS
_FIX = "use a smaller bucket_bytes, fewer slots, a larger /dev/shm, or the gloo transport"


class Segment:
    """Memory of ``nbytes`` bytes that other processes can map through ``reader_fd`` (read-only).

    Every page is allocated and mapped before the constructor returns, so neither a packer nor a reader
    pays for first touches, and a full /dev/shm is an error here instead of a SIGBUS later. The memory is
    given back when the last view of it is gone, in whatever process.

    Raises ``TransportError`` when the directory is missing, unwritable or too small.
    """

    def __init__(self, nbytes: int, directory: Path = SHM_DIRECTORY) -> None:
        self.name = f"grpo_lab_{os.getpid()}_{secrets.token_hex(8)}"
        self.nbytes = nbytes
        path = directory / self.name
        try:
            _check_space(nbytes, directory)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TransportError(
                f"cannot create a segment of {nbytes} bytes in {directory}: {error.strerror}; {_FIX}"
            ) from error
        try:
            try:
                self.reader_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.unlink(path)
            try:
                os.ftruncate(fd, nbytes)
                _wish_for_huge_pages(fd, nbytes)
                os.posix_fallocate(fd, 0, nbytes)
                self._memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            except OSError as error:
                os.close(self.reader_fd)
                raise TransportError(
                    f"cannot allocate {nbytes} bytes in {directory}: {error.strerror}; {_FIX}"
                ) from error
        finally:
            os.close(fd)

    def ring(self, slots: int) -> list[memoryview]:
        """The memory as ``slots`` writable views of equal size."""
        whole = memoryview(self._memory)
        size = self.nbytes // slots
        return [whole[slot * size : (slot + 1) * size] for slot in range(slots)]

    def close(self) -> None:
        """The mapping itself ends with its last view, which a packer may hold a little longer."""
        os.close(self.reader_fd)
        del self._memory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def map_for_reading(fd: int, nbytes: int) -> memoryview:
    """Maps what ``Segment`` handed out. Raises ``TransportError`` when it is too short to be read."""
    size = os.fstat(fd).st_size
    if size < nbytes:  # reading beyond its end would be a SIGBUS
        raise TransportError(f"the shared-memory segment has {size} bytes; its ring needs {nbytes}")
    try:
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    except OSError as error:
        raise TransportError(f"cannot map {nbytes} bytes of shared memory: {error.strerror}") from error
    return memoryview(memory)


def sweep_stale_segments(directory: Path = SHM_DIRECTORY) -> list[str]:
    """Removes this user's ``grpo_lab_<pid>_*`` whose process is dead, and returns their names."""
    swept = []
    for path in sorted(directory.glob("grpo_lab_*")) if directory.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match is None or _alive(int(match[1])):
            continue
        try:
            if path.stat().st_uid != os.geteuid():
                continue
            path.unlink()
        except FileNotFoundError:  # another sweep was quicker
            continue
        swept.append(path.name)
    return swept


def _wish_for_huge_pages(fd: int, nbytes: int) -> None:
    """Lets the first touch of each page be one that asks for huge pages, which only a mapping can.

    Where the system grants none (``shmem_enabled``), or cannot populate a mapping (Linux before 5.14), the
    allocation that follows is as it would have been.
    """
    with contextlib.suppress(OSError), mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_MADV_POPULATE_WRITE)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's, or no pid at all: not ours to judge
        return True
    return True


def _check_space(nbytes: int, directory: Path) -> None:
    """Asking first gives a better message than the allocation's, and leaves other users' memory alone."""
    status = os.statvfs(directory)
    available = status.f_bavail * status.f_frsize
    if available < nbytes:
        raise TransportError(
            f"the shared-memory ring needs {nbytes} bytes; {directory} has {available} available; {_FIX}"
        )
