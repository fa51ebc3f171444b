"""Files of /dev/shm that nobody maps any more, told from those that somebody does."""

import mmap
import os

import pytest

from grpo_lab.harness.shared_files import SHM_DIRECTORY, forgotten, mapped_by, remove_unmapped, unmapped

pytestmark = pytest.mark.skipif(not os.access(SHM_DIRECTORY, os.W_OK), reason=f"no {SHM_DIRECTORY}")


@pytest.fixture
def segments():
    """Two of them; this process maps the first."""
    paths = [SHM_DIRECTORY / f"psm_grpo_lab_test_{os.getpid()}_{number}" for number in range(2)]
    try:
        for path in paths:
            path.write_bytes(bytes(mmap.PAGESIZE))
        with paths[0].open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
            yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_only_what_nobody_maps_is_removed(segments):
    mapped, free = segments
    assert mapped in mapped_by(os.getpid())
    assert unmapped([*segments, SHM_DIRECTORY / "psm_grpo_lab_never_made"]) == {free}
    remove_unmapped(segments)
    assert mapped.exists()
    assert not free.exists()


def test_what_is_forgotten_is_old_and_unmapped(segments):
    mapped, free = segments
    assert free not in forgotten()  # it may be in the making
    found = forgotten(young_s=-60.0)
    assert free in found
    assert mapped not in found
