"""Throughput and staleness of fault-free clusters against an independent SimPy model, and Little's law.

Latencies have no jitter and lengths are fixed, so both models are deterministic and nothing needs to be
averaged out. They differ in what the reference leaves out on purpose: the prompts' own lengths (it takes
their mean), the millisecond between trainer and worker, and which of two samples that arrive together goes
first. That came to at most 0.3 % where it was measured; ``TOLERANCE`` leaves ten times as much, and the
planted bugs are far outside.
"""

from dataclasses import replace
from statistics import fmean

import pytest
from simpy_cluster import Cluster, Reference

from grpo_lab.engine.core import EngineCore
from grpo_lab.events import (
    GroupAdmitted,
    GroupConsumed,
    GroupDropped,
    OptimizerStepApplied,
    SampleDispatched,
)
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import Scenario
from grpo_lab.sim.world import simulate

TOLERANCE = 0.03
STALENESS_TOLERANCE = 0.05  # versions, of a mean over all groups

BASE = Scenario(
    engines=2,
    slots=4,
    steps=30,
    lengths="fixed",
    mean_tokens=16,
    max_tokens=16,
    kv_blocks=512,
    jitter=0.0,
)
CLUSTERS = {
    "trainer-bound": replace(BASE, step_s=3.0, max_staleness=2),
    "engine-bound": replace(BASE, engines=1, slots=2, token_s=0.05, step_s=0.1),
    "few-in-flight": replace(BASE, engines=1, slots=2, max_inflight=4),
    "synchronous": replace(BASE, engines=3, max_staleness=0),
    "large-groups": replace(
        BASE, generations=4, max_inflight=24, max_staleness=2, slots=8, mean_tokens=24, max_tokens=24
    ),
    "slow-network": replace(BASE, network_s=0.05),  # counts the messages of a sync
}


def measured(records):
    """From the first admission to the last step, as the reference counts it."""
    dispatched, found, began_s, last_s = {}, Reference(), None, 0.0
    for record in records:
        event = record.event
        if isinstance(event, GroupAdmitted):
            began_s = record.t if began_s is None else began_s
        elif isinstance(event, SampleDispatched):
            dispatched.setdefault(event.group, record.t)
        elif isinstance(event, GroupConsumed):
            found.staleness.append(event.version - min(event.versions_first))
            found.stays_s.append(record.t - dispatched[event.group])
        elif isinstance(event, OptimizerStepApplied):
            found.steps += 1
            last_s = record.t
    found.virtual_s = last_s - began_s
    return found


def differences(scenario, *, simulated=None, parts=None):
    """What the two models do not agree on, in words; empty when they agree."""
    ours = measured(simulate(simulated or scenario, parts=parts).records)
    theirs = Cluster(scenario).run()
    assert ours.steps == theirs.steps == scenario.steps
    found = []
    for name in ("steps_per_s", "mean_stay_s"):
        ratio = getattr(ours, name) / getattr(theirs, name)
        if abs(ratio - 1) > TOLERANCE:
            found.append(f"{name}: {getattr(ours, name):.4g}, the reference says {getattr(theirs, name):.4g}")
    if abs(ours.mean_staleness - theirs.mean_staleness) > STALENESS_TOLERANCE:
        found.append(f"staleness: {ours.mean_staleness:.3f}, the reference says {theirs.mean_staleness:.3f}")
    return found


@pytest.mark.parametrize("name", CLUSTERS)
def test_throughput_staleness_and_stay_agree_with_the_reference(name):
    assert differences(CLUSTERS[name]) == []


class LeaksSlots(EngineCore):
    """Each switch of weights loses a place in the batch, down to one."""

    async def switch_weights(self, *args, **kwargs):
        await super().switch_weights(*args, **kwargs)
        self.scheduler.max_num_seqs = max(1, self.scheduler.max_num_seqs - 1)


def test_a_leaked_slot_is_seen():
    """No rule of the protocol is broken by it: only a second model can tell."""
    assert differences(CLUSTERS["engine-bound"], parts=Parts(core=LeaksSlots)) != []


@pytest.mark.parametrize(
    ("name", "field", "factor"),
    [
        ("engine-bound", "token_s", 1.1),
        ("trainer-bound", "step_s", 1.1),
        ("slow-network", "network_s", 1.2),
        ("synchronous", "reward_s", 3.0),
    ],
)
def test_a_wrong_latency_is_seen(name, field, factor):
    scenario = CLUSTERS[name]
    slower = replace(scenario, **{field: factor * getattr(scenario, field)})
    assert differences(scenario, simulated=slower) != []


# -- Little's law ------------------------------------------------------------------------------------------


def littles_law(records):
    """(mean number in the system, throughput x mean stay) of samples, dispatch to consumption.

    The left side integrates over time how many samples have been dispatched and not yet ended; the right
    side looks at each consumed sample by itself. They differ by what is in the system at the two ends of the
    window, at most ``max_inflight + queued`` of all samples.
    """
    began, stays_s = {}, []
    area, inside, last_s = 0.0, 0, None
    for record in records:
        event = record.event
        if isinstance(event, (SampleDispatched, GroupConsumed, GroupDropped)):
            area += inside * (record.t - last_s) if last_s is not None else 0.0
            last_s = record.t
        if isinstance(event, SampleDispatched) and event.sample not in began:
            began[event.sample] = record.t
            inside += 1
        elif isinstance(event, GroupConsumed):
            stays_s += [record.t - began[sample] for sample in event.samples]
            inside -= len(event.samples)
        elif isinstance(event, GroupDropped):
            inside -= sum(1 for sample in event.samples if sample in began)
    window_s = last_s - min(began.values())
    return area / window_s, len(stays_s) / window_s * fmean(stays_s)


LONG = {name: replace(CLUSTERS[name], steps=60) for name in ("trainer-bound", "engine-bound", "large-groups")}


@pytest.mark.parametrize("name", LONG)
def test_littles_law(name):
    """60 steps of 2 or more groups against a handful that is under way at the end: well within 5 %."""
    inside, expected = littles_law(simulate(LONG[name]).records)
    assert inside == pytest.approx(expected, rel=0.05)


def test_littles_law_sees_samples_that_never_end():
    records = simulate(LONG["engine-bound"]).records
    consumed = [record for record in records if isinstance(record.event, GroupConsumed)]
    lost = {id(record) for record in consumed[::10]}
    inside, expected = littles_law([record for record in records if id(record) not in lost])
    assert inside > 1.2 * expected
