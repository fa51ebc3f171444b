"""The in-process pair: what it carries, and that each fault made by subclassing reaches the engine's side."""

import asyncio
import dataclasses

import pytest

from grpo_lab.errors import HandshakeError, PeerDied, TransportError, TransportTimeout
from grpo_lab.events import SlotReleased
from grpo_lab.packing import BucketPlan, hash64
from grpo_lab.recorders import ListRecorder
from grpo_lab.transport.memory import InMemoryTransport
from grpo_lab.types import Bucket, SyncId

SYNC = SyncId(1, 1, 1)
NUM_BUCKETS = 5


def make_plan():
    import torch

    tensors = {f"w{i}": torch.empty(256, dtype=torch.uint8, device="meta") for i in range(NUM_BUCKETS)}
    return BucketPlan.build(tensors, bucket_bytes=256)


async def packed(transport):
    for index in range(NUM_BUCKETS):
        slot = index % len(transport.ring)
        memory = transport.ring[slot][:256]
        memory[:] = bytes([index + 1]) * 256
        yield Bucket(index, slot, memory, 256, hash64(memory))


async def run(cls=InMemoryTransport, members=("a", "b"), timeout_s=0.2):
    """One sync; returns (outcome of the send, {member: outcome of its receive}, the recorder)."""
    recorder = ListRecorder("trainer", clock=lambda: 0.0)
    transport = cls(recorder, progress_timeout_s=timeout_s)
    await transport.open(members, make_plan().to_json())
    receivers = {member: transport.receiver() for member in members}
    for member, receiver in receivers.items():
        await receiver.join(transport.init_info(member))
    await transport.accept()
    info = transport.update_info(SYNC)

    async def receive(receiver):
        return [
            (bucket.index, bucket.memory[0], hash64(bucket.memory) == bucket.hash64)
            async for bucket in receiver.receive(SYNC, info)
        ]

    sent, *received = await asyncio.gather(
        transport.send(SYNC, packed(transport)),
        *(receive(receiver) for receiver in receivers.values()),
        return_exceptions=True,
    )
    await transport.close()
    for receiver in receivers.values():
        await receiver.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    return sent, dict(zip(members, received, strict=True)), recorder


WHOLE = [(index, index + 1, True) for index in range(NUM_BUCKETS)]


def test_bytes_arrive_and_slots_are_released_in_order():
    sent, received, recorder = asyncio.run(run())
    assert sent >= 0
    assert received == {"a": WHOLE, "b": WHOLE}
    released = [r.event.bucket for r in recorder.records if isinstance(r.event, SlotReleased)]
    assert released == list(range(NUM_BUCKETS))


def test_two_runs_leave_the_same_trace():
    first, second = (asyncio.run(run())[2].records for _ in range(2))
    assert first == second


class Corrupting(InMemoryTransport):
    async def carry(self, member, bucket):
        if member == "b" and bucket.index == 2:
            bucket.memory[0] = 99
        return [bucket]


class Losing(InMemoryTransport):
    async def carry(self, member, bucket):
        return [] if (member, bucket.index) == ("b", 3) else [bucket]


class Reordering(InMemoryTransport):
    kept = None

    async def carry(self, member, bucket):
        if member == "b" and bucket.index == 0:
            self.kept = bucket
            return []
        if member == "b" and bucket.index == 1:
            return [bucket, self.kept]
        return [bucket]


class Duplicating(InMemoryTransport):
    async def carry(self, member, bucket):
        twice = dataclasses.replace(bucket)
        return [bucket, twice] if (member, bucket.index) == ("b", 1) else [bucket]


class Delaying(InMemoryTransport):
    async def carry(self, member, bucket):
        await asyncio.sleep(0.05 if bucket.index == 0 else 0)
        return [bucket]


class Failing(InMemoryTransport):
    async def carry(self, member, bucket):
        raise ValueError("a fault in the fault")


def test_corruption_reaches_one_receiver_only():
    sent, received, _ = asyncio.run(run(Corrupting))
    assert sent >= 0
    assert received["a"] == WHOLE
    assert received["b"][2] == (2, 99, False)


def test_loss_ends_in_bounded_time_on_both_sides():
    sent, received, _ = asyncio.run(run(Losing))
    assert isinstance(sent, TransportTimeout)
    assert "b did not release bucket 3" in str(sent)
    assert isinstance(received["b"], TransportTimeout | PeerDied)


def test_reordered_buckets_arrive_reordered():
    _, received, _ = asyncio.run(run(Reordering))
    assert [index for index, _, _ in received["b"]] == [1, 0, 2, 3, 4]


def test_a_second_release_of_a_duplicate_fails_the_send():
    sent, _, _ = asyncio.run(run(Duplicating))
    assert isinstance(sent, TransportError)
    assert "b released bucket 1" in str(sent)


def test_delays_of_different_links_do_not_add_up():
    async def scenario():
        began_s = asyncio.get_running_loop().time()
        _, received, _ = await run(Delaying, members=tuple("abcdefgh"))
        return received, asyncio.get_running_loop().time() - began_s

    received, elapsed_s = asyncio.run(scenario())
    assert all(outcome == WHOLE for outcome in received.values())
    assert 0.05 <= elapsed_s < 0.3


def test_a_failing_link_is_not_lost():
    sent, _, _ = asyncio.run(run(Failing))
    assert isinstance(sent, TransportError)
    assert "a fault in the fault" in str(sent)


def test_an_older_session_and_a_second_join_are_refused():
    async def scenario():
        transport = InMemoryTransport(ListRecorder("trainer", clock=lambda: 0.0))
        await transport.open(["a"], make_plan().to_json())
        old = transport.init_info("a")
        await transport.open(["a"], make_plan().to_json())
        with pytest.raises(HandshakeError, match="token"):
            await transport.receiver().join(old)
        receiver = transport.receiver()
        await receiver.join(transport.init_info("a"))
        with pytest.raises(HandshakeError, match="joined"):
            await transport.receiver().join(transport.init_info("a"))
        await receiver.close()
        with pytest.raises(PeerDied, match="a closed"):
            await transport.accept()

    asyncio.run(scenario())


def test_who_does_not_join_is_named():
    async def scenario():
        transport = InMemoryTransport(ListRecorder("trainer", clock=lambda: 0.0), accept_timeout_s=0.05)
        await transport.open(["a", "b"], make_plan().to_json())
        await transport.receiver().join(transport.init_info("a"))
        with pytest.raises(TransportTimeout, match=r"^b did not join"):
            await transport.accept()

    asyncio.run(scenario())
