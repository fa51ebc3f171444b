"""The parts of the weight transports that need no second process: frames, board, segment, greeting."""

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import stat
import struct
import subprocess
import sys

import pytest

from grpo_lab.errors import ConfigError, HandshakeError, PeerDied, TransportError, TransportTimeout
from grpo_lab.events import ResourceClosed, ResourceOpened, SlotReleased
from grpo_lab.packing import BucketPlan
from grpo_lab.recorders import ListRecorder
from grpo_lab.transport import control, frames, segment
from grpo_lab.transport.board import SlotBoard
from grpo_lab.transport.geometry import Geometry
from grpo_lab.transport.receivers import RECEIVERS, make_transport
from grpo_lab.transport.segment import Segment, map_for_reading, sweep_stale_segments
from grpo_lab.transport.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from grpo_lab.types import Bucket, SyncId

SYNC = SyncId(3, 8, 2)


def plan_of(*lengths, bucket_bytes=1024):
    import torch

    tensors = {f"w{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(lengths)}
    return BucketPlan.build(tensors, bucket_bytes=bucket_bytes).to_json()


def bucket(index=0, slot=0, nbytes=1000, memory=None):
    data = memoryview(bytearray(nbytes if memory is None else memory))
    return Bucket(index, slot, data, nbytes, 0)


async def two_buckets():
    yield bucket()
    yield bucket(1, 1, 300)


async def accept_and_send(transport):
    await transport.accept()
    await transport.send(SYNC, two_buckets())


def recorder():
    return ListRecorder("trainer", clock=lambda: 0.0)


async def drain(buckets):
    return [item.index async for item in buckets]


def kinds_of(rec):
    return [type(record.event) for record in rec.records]


# --- frames -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        frames.Begin(SYNC, 17),
        frames.Announce(bucket=9, slot=1, nbytes=(1 << 40) + 3, hash64=(1 << 64) - 1),
        frames.Release(bucket=9, slot=1),
    ],
)
def test_frames_survive_the_wire(frame):
    data = frame.encode()
    assert len(data) == frames.FRAME_BYTES
    assert frames.decode(data) == frame


@pytest.mark.parametrize("data", [b"", b"x" * 32, frames.MAGIC + b"\xff" * 28, frames.MAGIC])
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(TransportError):
        frames.decode(data)


def test_greetings_are_bounded_json_objects():
    assert frames.decode_greeting(frames.encode_greeting({"a": 1})[4:]) == {"a": 1}
    with pytest.raises(HandshakeError, match="limit"):
        frames.greeting_length(struct.pack("<I", frames.MAX_GREETING_BYTES + 1))
    with pytest.raises(HandshakeError, match="limit"):
        frames.encode_greeting({"a": "x" * frames.MAX_GREETING_BYTES})
    for body in (b"[1]", b"{", b"\xff\xfe"):
        with pytest.raises(HandshakeError):
            frames.decode_greeting(body)


# --- board ------------------------------------------------------------------------------------------


def test_a_slot_is_free_when_its_last_reader_has_released_it():
    rec = recorder()
    board = SlotBoard(["a", "b"], 2, rec)
    board.occupy(1, bucket=5)
    board.release("a", 1, 5)
    assert rec.records == []
    with pytest.raises(TransportError, match="does not read"):
        board.release("a", 1, 5)
    with pytest.raises(TransportError, match="does not read"):
        board.release("b", 1, 4)
    with pytest.raises(TransportError, match="does not read"):
        board.release("b", 7, 5)
    board.release("b", 1, 5)
    assert [record.event for record in rec.records] == [SlotReleased(slot=1, bucket=5)]


def test_a_wait_names_who_holds_the_slot_and_ends_with_the_first_failure():
    async def scenario():
        board = SlotBoard(["a", "b"], 1, recorder())
        board.occupy(0, bucket=5)
        board.release("a", 0, 5)
        with pytest.raises(TransportTimeout, match=r"b did not release bucket 5 in slot 0 within 0\.01 s"):
            await board.wait_free(0, 0.01)
        waiter = asyncio.create_task(board.wait_free(0, 10))
        await asyncio.sleep(0)
        board.fail(PeerDied("b died"))
        board.fail(TransportError("a consequence"))
        with pytest.raises(PeerDied, match="b died"):
            await waiter

    asyncio.run(scenario())


# --- segment ----------------------------------------------------------------------------------------


def test_a_segment_is_shared_private_and_has_no_name_left(tmp_path):
    made = Segment(3 * 4096, tmp_path)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(made.reader_fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert status.st_blocks * 512 >= 3 * 4096  # allocated, not sparse
    first, second, third = made.ring(3)
    third[:4] = b"abcd"
    view = map_for_reading(made.reader_fd, 3 * 4096)
    assert bytes(view[8192:8196]) == b"abcd"
    assert view.readonly
    assert fcntl.fcntl(made.reader_fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(TransportError, match="its ring needs"):
        map_for_reading(made.reader_fd, 4 * 4096)
    made.close()
    assert bytes(third[:4]) == b"abcd"  # a view outlives the segment
    del first, second


def test_too_little_space_says_what_is_needed_and_what_to_do(tmp_path):
    with pytest.raises(TransportError, match=r"needs \d+ bytes; .* has \d+ available; use a smaller bucket"):
        Segment(1 << 50, tmp_path)
    with pytest.raises(TransportError, match=r"No such file.*gloo"):
        Segment(4096, tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


def test_allocation_that_fails_later_leaves_nothing(tmp_path, monkeypatch):
    """The space can be gone between the question and the allocation."""
    monkeypatch.setattr(segment, "_check_space", lambda nbytes, directory: None)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="cannot allocate"):
        Segment(1 << 50, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before  # garbage of other tests may go meanwhile


def test_only_segments_of_dead_processes_are_swept(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for name in (f"grpo_lab_{child.pid}_ab12", f"grpo_lab_{os.getpid()}_ab12", "grpo_lab_x", "other"):
        (tmp_path / name).touch()
    assert sweep_stale_segments(tmp_path) == [f"grpo_lab_{child.pid}_ab12"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"grpo_lab_{os.getpid()}_ab12", "grpo_lab_x", "other"]
    )
    assert sweep_stale_segments(tmp_path / "missing") == []


def test_opening_sweeps_what_a_kill_between_create_and_unlink_left(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / f"grpo_lab_{child.pid}_ab12").write_bytes(b"left")

    async def scenario():
        transport = await opened(directory=tmp_path)
        assert list(tmp_path.iterdir()) == []
        await transport.close()

    asyncio.run(scenario())


# --- geometry and configuration ---------------------------------------------------------------------


def test_geometry_refuses_what_is_not_the_plans():
    geometry = Geometry.of_plan(plan_of(1000, 300), slots=2)
    assert geometry.slot_bytes % 256 == 0
    assert geometry.mismatch(0, 0, 0, 1000) == ""
    assert "bucket 1 where bucket 0" in geometry.mismatch(1, 0, 0, 1000)
    assert "slot 2" in geometry.mismatch(0, 0, 2, 1000)
    assert "999 bytes" in geometry.mismatch(0, 0, 0, 999)
    assert "bucket 9" in geometry.mismatch(9, 9, 0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 0},
        {"slots": 65},
        {"slots": True},
        {"accept_timeout_s": 0},
        {"progress_timeout_s": -1.0},
        {"progress_timeout_s": float("inf")},
        {"progress_timeout_s": float("nan")},
    ],
)
def test_bad_configuration_is_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_transport("shm", recorder=recorder(), **options)


def test_unknown_transport_is_refused():
    with pytest.raises(ConfigError, match="shm, gloo or stock"):
        make_transport("pigeon", recorder=recorder())
    assert sorted(RECEIVERS) == ["lab_gloo", "lab_shm"]


# --- joining, and strangers -------------------------------------------------------------------------


async def opened(members=("engine-0",), **options):
    transport = SharedMemoryTransport(recorder(), accept_timeout_s=0.3, **options)
    await transport.open(members, plan_of(1000, 300))
    return transport


def test_init_info_is_json_and_joining_works():
    async def scenario():
        transport = await opened()
        info = json.loads(json.dumps(transport.init_info("engine-0")))
        assert info["backend"] == "lab_shm"
        receiver = SharedMemoryReceiver()
        await receiver.join(info)
        await transport.accept()
        await receiver.close()
        await transport.close()
        assert kinds_of(transport.recorder) == [ResourceOpened, ResourceClosed]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": "0" * 32}, "wrong token"),
        ({"member": "engine-9"}, "not a member"),
        ({"backend": "lab_gloo"}, "backend"),
        ({"slots": 10**9}, "slots"),
        ({"progress_timeout_s": "soon"}, "progress_timeout_s"),
        ({"plan": {}}, "plan"),
        ({"plan": None}, "plan"),
        ({"plan_digest": "00"}, "plan_digest"),
        ({"address": 5}, "address"),
    ],
)
def test_a_receiver_with_wrong_information_is_refused_and_disturbs_nobody(change, message):
    async def scenario():
        transport = await opened()
        info = transport.init_info("engine-0")
        with pytest.raises(HandshakeError, match=message):
            await SharedMemoryReceiver().join({**info, **change})
        receiver = SharedMemoryReceiver()
        await receiver.join(info)
        await transport.accept()
        with pytest.raises(HandshakeError, match="joined already"):
            await SharedMemoryReceiver().join(info)
        await receiver.close()
        await transport.close()

    asyncio.run(scenario())


def test_a_plan_larger_than_the_memory_is_refused():
    """A receiver that believed its own plan would read beyond the segment's end."""

    async def scenario():
        transport = await opened()
        larger = plan_of(100_000, bucket_bytes=100_000)
        info = {**transport.init_info("engine-0"), "plan": larger, "plan_digest": larger["digest"]}
        with pytest.raises(TransportError, match="its ring needs"):
            await SharedMemoryReceiver().join(info)
        await transport.close()

    asyncio.run(scenario())


def test_who_does_not_join_is_named_with_the_refusals():
    async def scenario():
        transport = await opened(["engine-0", "engine-1"])
        receiver = SharedMemoryReceiver()
        await receiver.join(transport.init_info("engine-0"))
        with pytest.raises(HandshakeError):
            await SharedMemoryReceiver().join({**transport.init_info("engine-1"), "token": "guess"})
        with pytest.raises(TransportTimeout, match=r"^engine-1 did not join \(refused: wrong token\) within"):
            await transport.accept()
        with pytest.raises(TransportError, match="not open"):
            transport.ring  # noqa: B018
        await receiver.close()

    asyncio.run(scenario())


def test_a_member_that_leaves_before_all_have_joined_is_named():
    async def scenario():
        transport = await opened(["engine-0", "engine-1"])
        receiver = SharedMemoryReceiver()
        await receiver.join(transport.init_info("engine-0"))
        await receiver.close()
        with pytest.raises(PeerDied, match="engine-0"):
            await transport.accept()

    asyncio.run(scenario())


def test_garbage_and_silence_on_the_control_channel_disturb_nobody(monkeypatch):
    monkeypatch.setattr(control, "GREETING_TIMEOUT_S", 0.1)

    async def scenario():
        transport = await opened()
        info = transport.init_info("engine-0")
        strangers = []
        for data in (b"", b"\xff" * 4, struct.pack("<I", 7) + b"garbage", os.urandom(64)):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(f"\0{info['address']}")
            stranger.sendall(data)
            strangers.append(stranger)
        await asyncio.sleep(0.2)
        for stranger in strangers:
            stranger.settimeout(1)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # a refusal at most, then the end
                    pass
            stranger.close()
        receiver = SharedMemoryReceiver()
        await receiver.join(info)
        await transport.accept()
        await receiver.close()
        await transport.close()

    asyncio.run(scenario())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_refused_though_it_knows_the_token():
    code = (
        "import os, socket, struct, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1])\n"
        "s.sendall(struct.pack('<I', len(sys.argv[2])) + sys.argv[2].encode())\n"
        "s.settimeout(3)\n"
        "sys.stdout.buffer.write(s.recv(4096))\n"
    )

    async def scenario():
        transport = await opened()
        info = transport.init_info("engine-0")
        greeting = json.dumps({"token": info["token"], "member": "engine-0"})
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", code, info["address"], greeting, stdout=asyncio.subprocess.PIPE
        )
        answer, _ = await asyncio.wait_for(child.communicate(), 10)
        assert b"belongs to user 65534" in answer
        with pytest.raises(TransportTimeout, match="belongs to user 65534"):
            await transport.accept()

    asyncio.run(scenario())


def test_nobody_listens():
    async def scenario():
        transport = await opened()
        info = transport.init_info("engine-0")
        await transport.close()
        with pytest.raises(PeerDied, match="no sender"):
            await SharedMemoryReceiver().join(info)

    asyncio.run(scenario())


# --- misuse and cancellation ------------------------------------------------------------------------


def test_misuse_of_the_sender_is_told():
    async def scenario():
        transport = SharedMemoryTransport(recorder())
        for call in (
            lambda: transport.ring,
            lambda: transport.init_info("a"),
            lambda: transport.update_info(SYNC),
        ):
            with pytest.raises(TransportError, match="open"):
                call()
        with pytest.raises(TransportError, match="none twice"):
            await transport.open(["a", "a"], plan_of(10))
        with pytest.raises(TransportError, match="at least one"):
            await transport.open([], plan_of(10))
        with pytest.raises(HandshakeError, match="plan"):
            await transport.open(["a"], {"format": 99})
        await transport.open(["a"], plan_of(10))
        with pytest.raises(TransportError, match="'b' is not a member"):
            transport.init_info("b")
        with pytest.raises(TransportError, match="accept"):
            await transport.send(SYNC, None)
        await transport.close()
        await transport.close()

    asyncio.run(scenario())


def test_misuse_of_the_receiver_is_told():
    async def scenario():
        receiver = SharedMemoryReceiver()
        with pytest.raises(TransportError, match="join"):
            await anext(receiver.receive(SYNC, {}))
        transport = await opened()
        await receiver.join(transport.init_info("engine-0"))
        with pytest.raises(TransportError, match="num_buckets"):
            await anext(receiver.receive(SYNC, {"sync": str(SYNC), "num_buckets": 99}))
        with pytest.raises(PeerDied, match="engine-0"):  # a receiver that failed has left
            await accept_and_send(transport)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([], "ended after 0 of 2"),
        ([bucket()], "ended after 1 of 2"),
        ([bucket(index=1)], "bucket 1 where bucket 0"),
        ([bucket(slot=1)], "slot 0 is due"),
        ([bucket(nbytes=999)], "999 bytes"),
        ([bucket(memory=10)], "10 bytes of memory"),
        ([bucket(), bucket(1, 1, 300), bucket(2, 0)], "beyond the plan's 2"),
    ],
)
def test_buckets_that_are_not_the_plans_are_refused(buckets, message):
    async def scenario():
        transport = await opened()
        receiver = SharedMemoryReceiver()
        await receiver.join(transport.init_info("engine-0"))
        await transport.accept()

        async def source():
            for item in buckets:
                yield item

        reading = asyncio.create_task(drain(receiver.receive(SYNC, transport.update_info(SYNC))))
        with pytest.raises(TransportError, match=message):
            await transport.send(SYNC, source())
        if len(buckets) < 3:
            with pytest.raises(PeerDied):
                await asyncio.wait_for(reading, 1)
        else:
            await reading
        await receiver.close()

    asyncio.run(scenario())


def test_another_sync_than_the_expected_one_is_refused():
    async def scenario():
        transport = await opened()
        receiver = SharedMemoryReceiver()
        await receiver.join(transport.init_info("engine-0"))
        await transport.accept()

        older = SyncId(3, 7, 1)
        sending = asyncio.create_task(transport.send(older, two_buckets()))
        with pytest.raises(TransportError, match=r"t3\.v8\.a2 is expected"):
            await anext(receiver.receive(SYNC, {"sync": str(SYNC), "num_buckets": 2}))
        with pytest.raises(PeerDied):
            await asyncio.wait_for(sending, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["cancel", "close"])
def test_a_send_that_is_cancelled_or_closed_gives_everything_back(kind):
    async def scenario():
        before = len(os.listdir("/proc/self/fd"))
        transport = await opened()
        receiver = SharedMemoryReceiver()
        await receiver.join(transport.init_info("engine-0"))
        await transport.accept()

        buckets = receiver.receive(SYNC, transport.update_info(SYNC))
        sending = asyncio.create_task(transport.send(SYNC, two_buckets()))
        assert (await anext(buckets)).index == 0
        with pytest.raises(TransportError, match="at most one sync"):
            await transport.send(SYNC, two_buckets())
        if kind == "cancel":
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        else:
            await transport.close()
            with pytest.raises(TransportError, match="closed"):
                await sending
        with pytest.raises(PeerDied):
            await drain(buckets)
        assert kinds_of(transport.recorder)[-1] is ResourceClosed
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) <= before  # garbage of other tests may go meanwhile
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(scenario())


def test_a_receive_that_is_left_early_ends_the_send_at_once():
    async def scenario():
        transport = await opened()
        receiver = SharedMemoryReceiver()
        await receiver.join(transport.init_info("engine-0"))
        await transport.accept()

        sending = asyncio.create_task(transport.send(SYNC, two_buckets()))
        buckets = receiver.receive(SYNC, transport.update_info(SYNC))
        await anext(buckets)
        await buckets.aclose()
        with pytest.raises(PeerDied, match="engine-0"):
            await asyncio.wait_for(sending, 1)

    asyncio.run(scenario())
