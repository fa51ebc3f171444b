"""Weight transports between real processes: bytes, order, deaths by SIGKILL, hangs by SIGSTOP, leftovers."""

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from grpo_lab.errors import PeerDied, TransportTimeout
from grpo_lab.events import ResourceClosed, ResourceOpened, SlotReleased
from grpo_lab.packing import BucketPlan, hash64
from grpo_lab.recorders import ListRecorder, run_clock
from grpo_lab.transport.receivers import RECEIVERS, make_transport
from grpo_lab.types import Bucket, SyncId

KINDS = ["shm", "gloo"]
BUCKET_BYTES = 1 << 20
NUM_BUCKETS = 6
SPAWN = multiprocessing.get_context("spawn")
ANSWER_S = 40  # a spawned process that imports torch on a busy machine


def content(version, index, nbytes):
    """The same bytes in every process, different for every version and bucket."""
    return random.Random(f"{version}/{index}").randbytes(nbytes)


def make_plan(num_buckets=NUM_BUCKETS):
    import torch

    last = BUCKET_BYTES // 2 + 77
    sizes = [BUCKET_BYTES] * (num_buckets - 1) + [last]
    tensors = {f"w{i}": torch.empty(n, dtype=torch.uint8, device="meta") for i, n in enumerate(sizes)}
    return BucketPlan.build(tensors, bucket_bytes=BUCKET_BYTES)


async def packed(transport, plan, version):
    """Packs straight into the ring, as the packer does."""
    slots = len(transport.ring)
    for index in range(plan.num_buckets):
        nbytes = plan.bucket_nbytes(index)
        memory = transport.ring[index % slots][:nbytes]
        memory[:] = content(version, index, nbytes)
        yield Bucket(index, index % slots, memory, nbytes, hash64(memory))


# --- the other process ------------------------------------------------------------------------------


def receiver_process(kind, pipe):
    """Obeys ("join", info) and ("receive", sync, info, stall); answers ("ok", ...) or ("error", ...)."""
    receiver = RECEIVERS[f"lab_{kind}"]()

    async def receive(sync, info, stall):
        received = []
        async with contextlib.aclosing(receiver.receive(sync, info)) as buckets:
            async for bucket in buckets:
                if stall is not None and bucket.index == stall:
                    pipe.send(("stalled", bucket.index))
                    await asyncio.sleep(3600)
                same = bytes(bucket.memory) == content(sync.version, bucket.index, bucket.nbytes)
                received.append((bucket.index, same, hash64(bucket.memory) == bucket.hash64))
        return received

    async def serve():
        while (command := await asyncio.to_thread(pipe.recv)) is not None:
            began_s = time.monotonic()
            try:
                if command[0] == "join":
                    answer = await receiver.join(command[1])
                else:
                    answer = await receive(*command[1:])
                pipe.send(("ok", answer))
            except Exception as error:
                pipe.send(("error", type(error).__name__, str(error), time.monotonic() - began_s))
        await receiver.close()

    asyncio.run(serve())


def sender_process(kind, pipe, stall, fork=False):
    """Opens, sends, stalls before bucket ``stall``. With ``fork`` a child inherits every descriptor."""

    async def run():
        plan = make_plan()
        transport = make_transport(kind, recorder=ListRecorder("trainer", run_clock()))
        await transport.open(["engine-0"], plan.to_json())
        pipe.send(transport.init_info("engine-0"))
        await transport.accept()
        if fork and os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        sync = SyncId(1, 1, 1)
        pipe.send(transport.update_info(sync))

        async def stalling():
            async for bucket in packed(transport, plan, 1):
                if bucket.index == stall:
                    pipe.send(("stalled", bucket.index))
                    await asyncio.sleep(3600)
                yield bucket

        await transport.send(sync, stalling())
        await transport.close()
        pipe.send("sent")

    asyncio.run(run())


class Peer:
    """A spawned process and its pipe."""

    def __init__(self, target, *arguments):
        self.pipe, theirs = SPAWN.Pipe()
        kind, *rest = arguments
        self.process = SPAWN.Process(target=target, args=(kind, theirs, *rest), daemon=True)
        self.process.start()
        theirs.close()

    async def answer(self, timeout_s=ANSWER_S):
        assert await asyncio.to_thread(self.pipe.poll, timeout_s), "the peer did not answer"
        return self.pipe.recv()

    async def call(self, *command):
        self.pipe.send(command)
        return await self.answer()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def end(self):
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(10)
        self.pipe.close()


@pytest.fixture
def peers():
    started = []

    def start(target, *arguments):
        started.append(Peer(target, *arguments))
        return started[-1]

    before = segments()
    yield start
    for peer in started:
        peer.end()
    assert segments() - before == set()


def segments():
    return {path.name for path in Path("/dev/shm").glob("grpo_lab_*")}


async def joined(transport, plan, receivers):
    """Opens for ``receivers`` (member -> Peer) and lets them join one after the other, like a coordinator."""
    await transport.open(list(receivers), plan.to_json())
    for member, peer in receivers.items():
        assert await peer.call("join", transport.init_info(member)) == ("ok", None)
    await transport.accept()


def ask_all(transport, sync, receivers, stall=None):
    for peer in receivers.values():
        peer.pipe.send(("receive", sync, transport.update_info(sync), stall))


ALL_RIGHT = ("ok", [(index, True, True) for index in range(NUM_BUCKETS)])


# --- all is well ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_receivers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_arrives_at_every_receiver(kind, num_receivers, peers):
    async def scenario():
        plan = make_plan()
        recorder = ListRecorder("trainer", run_clock())
        transport = make_transport(kind, recorder=recorder, slots=2, progress_timeout_s=20)
        receivers = {f"engine-{i}": peers(receiver_process, kind) for i in range(num_receivers)}
        await joined(transport, plan, receivers)
        for version in (1, 2):
            sync = SyncId(1, version, 1)
            ask_all(transport, sync, receivers)
            moving_s = await transport.send(sync, packed(transport, plan, version))
            assert 0 < moving_s < 20
            for peer in receivers.values():
                assert await peer.answer() == ALL_RIGHT
        await transport.close()
        events = [record.event for record in recorder.records]
        assert isinstance(events[0], ResourceOpened)
        assert isinstance(events[-1], ResourceClosed)
        released = [event for event in events if isinstance(event, SlotReleased)]
        assert [event.bucket for event in released] == list(range(NUM_BUCKETS)) * 2
        assert [event.slot for event in released] == [0, 1, 0, 1, 0, 1] * 2

    asyncio.run(scenario())


def test_one_slot_is_enough(peers):
    async def scenario():
        plan = make_plan()
        transport = make_transport("shm", recorder=ListRecorder("trainer", run_clock()), slots=1)
        receivers = {"engine-0": peers(receiver_process, "shm")}
        await joined(transport, plan, receivers)
        ask_all(transport, SyncId(1, 1, 1), receivers)
        await transport.send(SyncId(1, 1, 1), packed(transport, plan, 1))
        assert await receivers["engine-0"].answer() == ALL_RIGHT
        await transport.close()

    asyncio.run(scenario())


def test_a_bucket_is_drawn_only_when_its_slot_is_free(peers):
    """Receivers that hold bucket 0 stop the packer before bucket 2 of a ring of two."""

    async def scenario():
        plan = make_plan()
        transport = make_transport(
            "shm", recorder=ListRecorder("trainer", run_clock()), slots=2, progress_timeout_s=0.5
        )
        fast, slow = peers(receiver_process, "shm"), peers(receiver_process, "shm")
        await joined(transport, plan, {"fast": fast, "slow": slow})
        sync, drawn = SyncId(1, 1, 1), []

        async def noting():
            async for bucket in packed(transport, plan, 1):
                drawn.append(bucket.index)
                yield bucket

        ask_all(transport, sync, {"fast": fast})
        ask_all(transport, sync, {"slow": slow}, stall=0)
        with pytest.raises(TransportTimeout, match="slow did not release bucket 0 in slot 0"):
            await transport.send(sync, noting())
        assert drawn == [0, 1]

    asyncio.run(scenario())


# --- deaths and hangs -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_receiver_is_noticed_at_once_and_named_and_the_rest_goes_on(kind, peers):
    async def scenario():
        plan = make_plan()
        recorder = ListRecorder("trainer", run_clock())
        transport = make_transport(kind, recorder=recorder, progress_timeout_s=30)
        receivers = {f"engine-{i}": peers(receiver_process, kind) for i in range(2)}
        await joined(transport, plan, receivers)
        sync = SyncId(1, 1, 1)
        victim, other = receivers["engine-1"], receivers["engine-0"]
        ask_all(transport, sync, {"engine-0": other})
        ask_all(transport, sync, {"engine-1": victim}, stall=2)
        sending = asyncio.create_task(transport.send(sync, packed(transport, plan, 1)))
        assert await victim.answer() == ("stalled", 2)
        victim.signal(signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(PeerDied, match="engine-1"):
            await sending
        assert time.monotonic() - began_s < 1.0
        status, error, *_ = await other.answer()
        assert (status, error) == ("error", "PeerDied")

        await joined(transport, plan, {"engine-0": other})  # fresh resources, one member less
        ask_all(transport, SyncId(1, 1, 2), {"engine-0": other})
        await transport.send(SyncId(1, 1, 2), packed(transport, plan, 1))
        assert await other.answer() == ALL_RIGHT
        await transport.close()
        opened = [r.event.resource for r in recorder.records if isinstance(r.event, ResourceOpened)]
        closed = [r.event.resource for r in recorder.records if isinstance(r.event, ResourceClosed)]
        assert opened == closed
        assert len(set(opened)) == 2

    asyncio.run(scenario())


def test_a_receiver_killed_between_two_syncs_fails_the_next_one_before_it_begins(peers):
    async def scenario():
        plan = make_plan()
        transport = make_transport("shm", recorder=ListRecorder("trainer", run_clock()))
        receivers = {"engine-0": peers(receiver_process, "shm")}
        await joined(transport, plan, receivers)
        receivers["engine-0"].end()
        await asyncio.sleep(0.05)
        drawn = []

        async def noting():
            async for bucket in packed(transport, plan, 1):
                drawn.append(bucket.index)
                yield bucket

        with pytest.raises(PeerDied, match="engine-0"):
            await transport.send(SyncId(1, 1, 1), noting())
        assert drawn == []

    asyncio.run(scenario())


@pytest.mark.parametrize(("kind", "fork"), [("shm", False), ("gloo", False), ("shm", True)])
def test_a_killed_sender_is_noticed_at_once(kind, fork, peers):
    """With ``fork``, a child (a data loader's worker, say) still holds the dead sender's sockets."""

    async def scenario():
        sender = peers(sender_process, kind, 3, fork)
        receiver = RECEIVERS[f"lab_{kind}"]()
        await receiver.join(await sender.answer())
        info = await sender.answer()
        received = []

        async def receive():
            async for bucket in receiver.receive(SyncId(1, 1, 1), info):
                received.append(bytes(bucket.memory) == content(1, bucket.index, bucket.nbytes))

        receiving = asyncio.create_task(receive())
        assert await sender.answer() == ("stalled", 3)
        await asyncio.sleep(0.2)
        sender.signal(signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(PeerDied):
            await receiving
        assert time.monotonic() - began_s < 1.0
        assert received == [True] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize("moment", ["before anyone joined", "after the join"])
def test_a_killed_sender_leaves_nothing_in_shared_memory(moment, peers):
    async def scenario():
        before = segments()
        sender = peers(sender_process, "shm", 3)
        info = await sender.answer()
        receiver = RECEIVERS["lab_shm"]()
        if moment == "after the join":
            await receiver.join(info)
            await sender.answer()
        sender.end()
        assert segments() == before
        await receiver.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_a_hung_receiver_ends_the_send_at_its_bound_and_is_named(kind, peers):
    async def scenario():
        plan = make_plan()
        transport = make_transport(
            kind, recorder=ListRecorder("trainer", run_clock()), progress_timeout_s=1.0
        )
        receivers = {"engine-0": peers(receiver_process, kind)}
        await joined(transport, plan, receivers)
        receivers["engine-0"].signal(signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(TransportTimeout, match="engine-0"):
            await transport.send(SyncId(1, 1, 1), packed(transport, plan, 1))
        assert 0.9 < time.monotonic() - began_s < 2.5
        receivers["engine-0"].signal(signal.SIGCONT)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_a_hung_sender_ends_the_receive_at_its_bound(kind, peers):
    async def scenario():
        sender = peers(sender_process, kind, 3)
        receiver = RECEIVERS[f"lab_{kind}"]()
        await receiver.join({**await sender.answer(), "progress_timeout_s": 1.0})
        info = await sender.answer()
        buckets = receiver.receive(SyncId(1, 1, 1), info)
        assert [(await anext(buckets)).index for _ in range(3)] == [0, 1, 2]
        began_s = time.monotonic()
        with pytest.raises(TransportTimeout, match="bucket 3 of 6"):
            await anext(buckets)
        assert 0.8 < time.monotonic() - began_s < 2.5

    asyncio.run(scenario())


def test_gloo_refuses_a_wrong_token_and_listens_on_loopback_only(peers):
    async def scenario():
        transport = make_transport("gloo", recorder=ListRecorder("trainer", run_clock()))
        await transport.open(["engine-0"], make_plan().to_json())
        info = transport.init_info("engine-0")
        peer = peers(receiver_process, "gloo")
        answer = await peer.call("join", {**info, "token": "0" * 32})
        assert answer[:2] == ("error", "HandshakeError")
        assert "wrong token" in answer[2]
        listening = listening_addresses()
        assert listening[info["control_port"]] == listening[info["store_port"]] == {"0100007F"}
        await transport.close()
        assert info["control_port"] not in listening_addresses()
        assert info["store_port"] not in listening_addresses()

    asyncio.run(scenario())


def listening_addresses():
    """Port -> addresses (hex) on which some process listens."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].split(":")
                found.setdefault(int(port, 16), set()).add(address)
    return found
