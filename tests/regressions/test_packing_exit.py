"""A process ends in order while packers are alive or at work, and a closed packer leaves nothing behind.

Python ends daemon threads where they ask for the GIL again, by unwinding their C++ frames; through a guard's
destructor that was std::terminate: "terminate called without an active exception", and exit code -6.
(torch's own functions still do that up to Python 3.13, so the threads here call nothing of torch.)
"""

import subprocess
import sys

import pytest

SETUP = """
import atexit, os, sys, threading
import torch
from grpo_lab.packing import BucketPlan, Packer, Unpacker
weights = {f"w{i}": torch.ones(1 << 20) for i in range(8)}
plan = BucketPlan.build(weights, wire_dtype="bfloat16")
packer, unpacker = Packer(plan, num_threads=3), Unpacker(plan, num_threads=3)
packer.bind(weights)
bucket = packer.pack(0)
at_work = threading.Barrier(2)

def again(function, *arguments):
    function(*arguments)
    at_work.wait()
    while True:
        function(*arguments)

def in_daemon_thread(function, *arguments):
    threading.Thread(target=again, args=(function, *arguments), daemon=True).start()
    at_work.wait()
"""

WAYS = {
    "pack, and wait for the same packer": "for _ in range(2): in_daemon_thread(packer.pack, 0)",
    "verify and unpack": """
targets = unpacker.bind(weights)
in_daemon_thread(unpacker.verify, 0, bucket.memory, bucket.hash64)
in_daemon_thread(targets.unpack, 0, bucket.memory)
""",
    "fork while packing": """
in_daemon_thread(packer.pack, 0)
for _ in range(2):
    if not (child := os.fork()):
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
""",
    "pack in a child, and in exit handlers": """
atexit.register(packer.pack, 0)
if not (child := os.fork()):
    sys.exit(packer.pack(0).hash64 != bucket.hash64)
assert os.waitpid(child, 0)[1] == 0
""",
    "die with a thread that outlives the main one": """
owner, go = [packer], threading.Event()
del packer
threading.Thread(target=lambda: go.wait() and owner.clear()).start()
go.set()
""",
}


def ended(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_process_ends_in_order_whatever_its_packers_do(way):
    done = ended(SETUP + WAYS[way])
    assert (done.returncode, done.stderr) == (0, "")


OPENED_AND_CLOSED = """
import psutil
process = psutil.Process()
MiB = 1 << 20

def transfer():
    packer, unpacker = Packer(plan, num_threads=3, ring=ring), Unpacker(plan, num_threads=3)
    packer.bind(weights)
    bucket = packer.pack(0)
    unpacker.verify(0, bucket.memory, bucket.hash64)
    unpacker.unpack(0, bucket.memory, weights)
    return packer, unpacker

weights = {"w": torch.ones(1000)}
plan = BucketPlan.build(weights)
ring = [bytearray(plan.max_bucket_nbytes)]
transfer()
threads, resident = process.num_threads(), process.memory_info().rss
for _ in range(200):
    transfer()
assert process.num_threads() == threads, process.num_threads()
grown = process.memory_info().rss - resident
assert grown < 8 * MiB, f"closed ones kept {grown} bytes"
opened = [transfer() for _ in range(50)]
assert process.num_threads() == threads + 50 * 2 * 2, process.num_threads()
held = process.memory_info().rss - resident
assert held < 50 * MiB, f"open ones hold {held} bytes"  # 300 scratch buffers of 2 MiB were touched: 630 MB
opened.clear()
assert process.num_threads() == threads, process.num_threads()
"""


def test_closed_packers_leave_neither_threads_nor_memory_and_open_ones_take_little():
    done = ended(SETUP + OPENED_AND_CLOSED)
    assert (done.returncode, done.stderr) == (0, "")
