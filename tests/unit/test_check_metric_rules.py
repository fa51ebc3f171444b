"""D1 - D5: the detectors, at and beyond their thresholds."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_trace import RolloutTrace
from trace_builder import Trace, declared

from grpo_lab.check.metric_rules import D3_MIN_GROUPS, D4_MIN_SYNCS
from grpo_lab.events import LogprobGapMeasured, MemoryMeasured, SyncEnded, WeightsPublished

MIB = 2**20


@pytest.mark.parametrize(
    ("mean", "parameters", "violated", "status"),
    [
        (4e-5, {}, set(), "passed"),
        (6e-5, {}, {"D1"}, "violated"),
        (float("nan"), {}, {"D1"}, "violated"),
        (6e-5, {"clear_cache": False}, set(), "vacuous"),
    ],
)
def test_d1_mean_gap(mean: float, parameters: dict[str, Any], violated: set[str], status: str) -> None:
    trace = Trace(declared(**parameters))
    trace.emit("trainer", LogprobGapMeasured(version=1, gap_max=9e-5, gap_mean=mean, tokens=10))
    assert trace.violated() == violated
    assert trace.check().of("D1").status == status


def memory(*resident_mib: float) -> Trace:
    trace = Trace()
    for value in resident_mib:
        trace.emit("engine-0", MemoryMeasured(member="engine-0", resident_bytes=int(value * MIB)))
    return trace


def test_d2_memory_grows_with_every_sync() -> None:
    grown = memory(*(100 + index for index in range(40)))
    assert grown.violated() == {"D2"}
    assert "1024.0 KiB a sync" in grown.check().of("D2").violations[0].message
    long = memory(*(100 + index / 16 for index in range(1500)))
    assert long.violated() == {"D2"}
    assert "64.0 KiB a sync" in long.check().of("D2").violations[0].message


@pytest.mark.parametrize(
    "values",
    [
        [100 + index % 7 * 10 for index in range(40)],  # peaks that come back
        [100 + min(index, 3) * 100 for index in range(40)],  # warm-up
        [100 + index / 20 for index in range(40)],  # 2 % over the run
    ],
)
def test_d2_memory_that_comes_back(values: list[float]) -> None:
    assert memory(*values).violated() == set()
    assert memory(*values).evaluated("D2") == 1


def test_d2_needs_enough_syncs() -> None:
    assert memory(*range(100, 112)).check().of("D2").status == "vacuous"


def test_an_allocator_that_warms_up_is_no_leak():
    """It grows by a quarter, ever more slowly: measured on a trainer with two threads."""
    warming = memory(*(746 - 134 * 0.9**sync for sync in range(60)))
    assert warming.violated() == set()
    assert warming.evaluated("D2") == 1


# MiB after each sync of a trainer without a leak: `run quickstart` on two cores, 80 steps.
TRAINER_MIB = (
    670,
    679,
    678,
    694,
    706,
    725,
    717,
    730,
    740,
    677,
    710,
    745,
    677,
    715,
    736,
    677,
    686,
    752,
    729,
    784,
    677,
    677,
    787,
    751,
    795,
    787,
    752,
    765,
    682,
    774,
    774,
    767,
    787,
    697,
    727,
    768,
    779,
    779,
    778,
    788,
    802,
    738,
    792,
    800,
    751,
    775,
    785,
    798,
    778,
    768,
    733,
    759,
    743,
    785,
    714,
    771,
    790,
    794,
    778,
    750,
    802,
    804,
    739,
    678,
    758,
    765,
    799,
    791,
    791,
    796,
    728,
    769,
    795,
    755,
    805,
    678,
    744,
    763,
    678,
    798,
)


def test_a_trainer_without_a_leak_is_not_taken_for_one_at_whatever_sync_it_ends():
    ends = range(32, len(TRAINER_MIB) + 1)
    assert [end for end in ends if memory(*TRAINER_MIB[:end]).violated()] == []


@pytest.mark.parametrize(("syncs", "leaked_mib"), [(40, 6), (80, 6)])
def test_a_leak_of_a_buffer_a_sync_is_found_under_that_noise(syncs, leaked_mib):
    noisy = [value + leaked_mib * sync for sync, value in enumerate(TRAINER_MIB[:syncs])]
    assert memory(*noisy).violated() == {"D2"}


def lengths(consumed: int, dropped: int, groups: int = 120, reason: str = "stale") -> RolloutTrace:
    """Every third group is dropped. Lengths spread by a token, so that the difference has an error."""
    trace = RolloutTrace().begin().commit(1, step=0)
    for number in range(groups):
        lost = number % 3 == 2
        tokens = (dropped if lost else consumed) + number % 2
        trace.admit(number, 1).dispatch(number, 1).complete(number, 1, tokens=tokens).enqueue(number)
        trace.take(number)
        if lost:
            trace.drop(number, reason, actor="trainer")
        else:
            trace.train(number, step=number - number // 3, version=1, first=1)
    return trace


def test_d3_long_completions_are_dropped_as_stale() -> None:
    trace = lengths(consumed=20, dropped=80)
    assert trace.violated() == {"D3"}
    assert "49% shorter" in trace.check().of("D3").violations[0].message


def test_d3_drops_that_say_nothing_about_length() -> None:
    assert lengths(consumed=20, dropped=20).violated() == set()
    assert lengths(consumed=20, dropped=20).evaluated("D3") == 1
    assert lengths(consumed=20, dropped=80, reason="shutdown").violated() == set()


def test_d3_needs_enough_groups() -> None:
    assert lengths(consumed=20, dropped=80, groups=D3_MIN_GROUPS - 1).check().of("D3").status == "vacuous"


def syncs(count: int, unexplained_s: float, named_s: float = 0.1) -> Trace:
    trace = Trace()
    phases_s = {"wire": named_s, "total": named_s + unexplained_s}
    for version in range(1, count + 1):
        event = SyncEnded(term=1, version=version, outcome="committed", phases_s=phases_s)
        trace.emit("trainer", event)
    return trace


def test_d4_a_sleep_in_every_sync() -> None:
    slow = syncs(D4_MIN_SYNCS, unexplained_s=0.5)
    assert slow.violated() == {"D4"}
    assert "0.50 s each" in slow.check().of("D4").violations[0].message
    assert syncs(D4_MIN_SYNCS, unexplained_s=0.15).violated() == set()  # short
    assert syncs(D4_MIN_SYNCS, unexplained_s=0.5, named_s=0.6).violated() == set()  # a small part
    assert syncs(D4_MIN_SYNCS, unexplained_s=0.15).evaluated("D4") == D4_MIN_SYNCS
    assert syncs(D4_MIN_SYNCS - 1, unexplained_s=5.0).check().of("D4").status == "vacuous"


def payloads(*hashes: int, changed: bool = True, attempts: int = 1) -> RolloutTrace:
    """A version for each hash, a step before each but the first."""
    trace = RolloutTrace().begin()
    for place, value in enumerate(hashes):
        if place:
            trace.generate(place - 1, version=place).plan(place - 1, step=place - 1, version=place)
            trace.consume(place - 1, place - 1, place, place).apply(place - 1, place, changed=changed)
        for attempt in range(1, attempts + 1):
            published = WeightsPublished(
                term=1,
                version=place + 1,
                attempt=attempt,
                plan_digest="d",
                tensors=1,
                bucket_nbytes=(8,),
                bucket_hashes=(value,),
            )
            trace.emit("trainer", published)
        trace.commit(place + 1, step=place)
    return trace


def test_d5_the_same_bytes_after_a_step_that_changed_the_parameters() -> None:
    def found(trace: RolloutTrace) -> tuple[int, str]:
        result = trace.check().of("D5")
        return result.violation_count, result.status

    assert found(payloads(1, 2, 2)) == (1, "violated")
    assert found(payloads(1, 2, 3)) == (0, "passed")
    assert found(payloads(1, 2, 3, attempts=2)) == (0, "passed")  # a retry sends the same bytes
    assert found(payloads(1, 1, changed=False)) == (0, "vacuous")
    message = payloads(1, 2, 2).check().of("D5").violations[0].message
    assert "version 3 was published with the very bytes of version 2" in message
