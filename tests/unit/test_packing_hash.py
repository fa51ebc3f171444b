"""The bucket hash against the published XXH3, byte for byte, for every instruction set."""

import os
import random
import struct
import threading

import pytest
import xxhash

from grpo_lab.packing import hash64, instruction_sets
from grpo_lab.packing.native import extension

LEAF = 65536
LENGTHS = [0, 1, 63, 64, 65, 240, 241, 255, 256, 1023, 1024, 1025, 1087, 1088, 2048, LEAF - 1, LEAF, LEAF + 1,
           LEAF + 63, LEAF + 241, 3 * LEAF + 1025, 5 * LEAF]  # fmt: skip


def reference(data: bytes) -> int:
    def leaf(part: bytes) -> int:
        return xxhash.xxh3_64_intdigest(part if len(part) > 240 else part.ljust(256, b"\0"))

    leaves = [leaf(data[at : at + LEAF]) for at in range(0, len(data), LEAF)]
    return leaf(struct.pack(f"<{len(leaves) + 1}Q", *leaves, len(data)))


@pytest.mark.parametrize("length", LENGTHS)
def test_hash_is_the_tree_of_published_xxh3(length):
    data = random.Random(length).randbytes(length)
    assert hash64(data) == reference(data)
    for isa in instruction_sets():
        for threads in (1, 3):
            assert extension.hash64(data, extension.Pool(threads), isa) == reference(data)


def test_every_instruction_set_of_this_cpu_is_offered():
    flags = set()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            flags = {word for line in lines if line.startswith("flags") for word in line.split()}
    found = instruction_sets()
    assert found[-1] in ("plain", "neon")
    assert ("avx2" in found) == ("avx2" in flags)
    assert ("avx512" in found) == {"avx512f", "avx512bw", "avx512dq", "avx512vl"}.issubset(flags)


@pytest.mark.parametrize("length", [1, 100, 241, 1025, LEAF, 2 * LEAF + 7])
def test_any_flipped_bit_changes_the_hash(length):
    rng = random.Random(length)
    data = bytearray(rng.randbytes(length))
    original = hash64(data)
    for _ in range(200):
        at, mask = rng.randrange(length), 1 << rng.randrange(8)
        data[at] ^= mask
        assert hash64(data) != original
        data[at] ^= mask
    assert hash64(data) == original


def test_swapped_leaves_truncation_and_zeros_change_the_hash():
    data = random.Random(0).randbytes(3 * LEAF)
    swapped = data[LEAF : 2 * LEAF] + data[:LEAF] + data[2 * LEAF :]
    hashes = {
        hash64(d)
        for d in (data, swapped, data[:-1], data + b"\0", data[LEAF:], b"", bytes(1), bytes(2), bytes(256))
    }
    assert len(hashes) == 9


def test_bits_of_the_hash_are_balanced():
    """Each output bit is set for about half of 4,000 inputs that differ in a counter only."""
    counts = [0] * 64
    for i in range(4000):
        value = hash64(struct.pack("<Q", i) * 40)
        for bit in range(64):
            counts[bit] += value >> bit & 1
    assert all(1800 < count < 2200 for count in counts)  # 6 sigma is 190


def test_hash_refuses_what_is_not_bytes():
    from grpo_lab.errors import PackingError

    with pytest.raises(PackingError, match="contiguous buffer"):
        hash64("text")
    with pytest.raises(PackingError, match="contiguous buffer"):
        hash64(memoryview(b"abcdef")[::2])


def test_a_forked_child_hashes_with_its_own_threads():
    data = random.Random(1).randbytes(20 * LEAF)
    pool = extension.Pool(3)
    expected = extension.hash64(data, pool)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, struct.pack("<Q", extension.hash64(data, pool)))
        os._exit(0)
    os.close(write)
    got = os.read(read, 8)
    os.close(read)
    assert os.waitpid(pid, 0)[1] == 0
    assert struct.unpack("<Q", got)[0] == expected


def test_one_pool_serves_several_callers():
    pool = extension.Pool(2)
    datas = [random.Random(i).randbytes(9 * LEAF + i) for i in range(4)]
    failures = []

    def work(data):
        for _ in range(20):
            if extension.hash64(data, pool) != reference(data):
                failures.append(data[:4])

    threads = [threading.Thread(target=work, args=(d,)) for d in datas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
