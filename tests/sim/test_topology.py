"""Whose link carries which copy, against times that can be counted by hand; and samples that are cut off."""

from __future__ import annotations

import dataclasses

import pytest

from grpo_lab.events import RequestFinished, SampleCompleted, SyncEnded
from grpo_lab.sim.scenario import Scenario
from grpo_lab.sim.topology import Relay, parent_of
from grpo_lab.sim.world import simulate

CLUSTER = Scenario(engines=6, steps=3, jitter=0.0, network_s=0.001, bucket_bytes=2048, bandwidth_bytes_s=1e5)


def arrivals(topology, members, buckets, wire_s=1.0, hop_s=0.0):
    names = [f"engine-{index}" for index in range(members)]
    relay = Relay(topology, names)
    return [list(relay.arrivals_s(0.0, lambda _: wire_s, lambda _: hop_s).values()) for _ in range(buckets)]


def test_copies_through_one_link_come_one_after_another():
    assert arrivals("p2p", 3, 2, hop_s=0.5) == [[1.5, 2.5, 3.5], [4.5, 5.5, 6.5]]


def test_a_ring_passes_on_one_bucket_while_the_next_one_comes():
    assert arrivals("ring", 3, 2, hop_s=0.5) == [[1.5, 3.0, 4.5], [2.5, 4.0, 5.5]]


def test_a_node_of_the_tree_serves_its_children_in_turn():
    assert arrivals("tree", 6, 1) == [[1, 2, 2, 3, 3, 4]]
    assert [max(row) for row in arrivals("tree", 6, 3)] == [4, 6, 8]
    assert [parent_of("tree", place) for place in range(1, 8)] == [0, 0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("topology", "copies"), [("independent", 1), ("p2p", 6), ("tree", 4), ("ring", 6)], ids=str
)
def test_a_sync_takes_as_long_as_its_copies_under_way(topology, copies):
    records = []
    simulate(dataclasses.replace(CLUSTER, topology=topology), records=records)
    syncs = [record.event for record in records if isinstance(record.event, SyncEnded)]
    assert len(syncs) == 3
    copy_s = syncs[0].nbytes / CLUSTER.bandwidth_bytes_s
    for sync in syncs:
        assert sync.outcome == "committed"
        # A hop takes 1 ms each, and a copy 15 ms or more.
        assert sync.phases_s["wire"] == pytest.approx(copies * copy_s, abs=0.008)


@pytest.mark.parametrize("engine_mode", ["step", "event"])
def test_a_sample_that_is_cut_off_is_as_long_as_it_would_have_been(engine_mode):
    lengths = {}
    for mode in ("keep", "abort"):
        records = []
        scenario = dataclasses.replace(
            CLUSTER,
            lengths="lognormal",
            length_sigma=1.2,
            mean_tokens=40,
            max_tokens=200,
            steps=6,
            max_staleness=2,
            pause_mode=mode,
            engine_mode=engine_mode,
            kv_blocks=1000,
        )
        simulate(scenario, records=records)
        events = [record.event for record in records]
        lengths[mode] = {e.sample: e.tokens for e in events if isinstance(e, SampleCompleted)}
        cut = sum(isinstance(e, RequestFinished) and ".c" in e.request for e in events)
        assert (cut > 5) == (mode == "abort")
    both = lengths["keep"].keys() & lengths["abort"].keys()
    assert len(both) > 15
    assert {name: lengths["keep"][name] for name in both} == {name: lengths["abort"][name] for name in both}
