"""The same scenario on a real asyncio loop: what must follow what is the same as in virtual time.

Only order that causes decide is compared: the events of each chain (one actor about one engine, one request,
one kind of bucket event) in their order, never times, and never the order of two chains: two engines that are
asked at once may answer in either order. How far the buckets of an attempt had come when it failed is a
matter of time as well, so there they are left out, and nobody else is under way. So load changes nothing.
"""

import asyncio
from collections import defaultdict

import pytest

from grpo_lab.events import ModelStep
from grpo_lab.sim.scenario import Fault
from grpo_lab.sim.simulation import run_simulation
from grpo_lab.testing.small_world import SmallWorld, small_scenario

CASES = {  # engines, faults
    "quiet": (2, ()),
    "a reply is lost": (2, (Fault("lose_reply", "engine-1", "finish_update", 2),)),
    "an update is refused": (1, (Fault("error", "engine-0", "update", 2),)),
    "a bucket is damaged": (1, (Fault("flip", "engine-0", "bucket", 3),)),
}
SAID = (
    "call",
    "before",
    "after",
    "term",
    "version",
    "attempt",
    "outcome",
    "final",
    "bucket",
    "accepted",
    "proof",
)
BUCKETS = ("bucket", "slot", "gather")


async def scenario(clock, engines, faults):
    """Three syncs with requests in between; returns the trace."""
    records = []
    world = SmallWorld(
        small_scenario(*faults, engines=engines, network_s=0.002, token_s=0.001), clock, records
    )
    world.start()
    await world.connect()
    for _ in range(3):
        world.step()
        await world.sync()
        for engine in range(engines):
            world.generate(engine)
        await world.unanswered()
    await world.stop()
    assert world.watch.violation is None
    return records


def chains(records, *, buckets=True):
    found = defaultdict(list)
    for record in records:
        event = record.event
        if isinstance(event, ModelStep):
            continue  # how many steps are told of together is a matter of time
        about = getattr(event, "request", "") or getattr(event, "engine", "") or getattr(event, "member", "")
        bucket = event.kind if event.kind.startswith(BUCKETS) else ""
        if bucket and not buckets:
            continue
        words = tuple((name, getattr(event, name)) for name in SAID if hasattr(event, name))
        found[record.actor, about, bucket].append((event.kind, words))
    return dict(found)


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_protocol_events_is_that_of_virtual_time(name):
    async def real():
        return await scenario(asyncio.get_running_loop().time, *CASES[name])

    async def virtual(context):
        return await scenario(context.loop.time, *CASES[name])

    quiet = not CASES[name][1]
    expected = chains(run_simulation(virtual).value, buckets=quiet)
    assert sum(map(len, expected.values())) > 80
    assert chains(asyncio.run(real()), buckets=quiet) == expected


def test_another_order_would_be_seen():
    async def virtual(context):
        return await scenario(context.loop.time, 2, ())

    records = run_simulation(virtual).value
    place = next(index for index, record in enumerate(records) if record.event.kind == "version_committed")
    later = next(
        index
        for index, record in enumerate(records)
        if index > place and record.event.kind == "state_changed" and record.actor == "trainer"
    )
    swapped = list(records)
    swapped[place], swapped[later] = swapped[later], swapped[place]
    assert chains(swapped) != chains(records)
