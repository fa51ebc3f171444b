"""The staleness bound under every setting that ``StalenessBound`` accepts and any order of events.

Each property is also run over a planted bug, which it must find.
"""

import dataclasses
import random
import re

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from staleness_model import FIRST_VERSION, Simulation, overtakings

from grpo_lab.errors import ConfigError, WorkerError
from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.protocol.staleness import GroupBuffer

quick = settings(max_examples=100, deadline=None)


def draw_bound(draw, policies, bound_class=StalenessBound, wide=False):
    """Every accepted setting of a small scope; ``wide`` also draws windows that must be refused."""
    policy = draw(st.sampled_from(policies))
    groups, versions, k = draw(st.integers(1, 3)), draw(st.integers(0, 4)), draw(st.integers(1, 3))
    steps = draw(st.one_of(st.none(), st.none(), st.integers(k - 1, 3 * k + 4)))
    spare_steps = versions * k if steps is None else min(versions * k, steps + 1 - k)
    room = 5 if wide else min(spare_steps * groups, 5)
    window = 1 + draw(st.integers(0, room)) if policy == "window" else 1
    return bound_class(policy, groups, versions, k, steps, window)


@st.composite
def bounds(draw, policies=("admission", "window", "drop", "freshest")):
    return draw_bound(draw, policies)


# Short lists shrink well; long random ones reach far.
_choices = st.one_of(
    st.lists(st.integers(0, 11), max_size=40),
    st.integers(0, 2**32).map(lambda seed: random.Random(seed).choices(range(12), k=200)),
)


@st.composite
def simulations(draw, policies=("admission", "window", "drop", "freshest"), **planted):
    wide = planted.pop("wide", False)
    try:
        bound = draw_bound(draw, policies, planted.pop("bound_class", StalenessBound), wide)
    except ConfigError:
        assume(False)
    return Simulation(
        bound,
        choices=draw(_choices),
        steps=draw(st.integers(1, 9)),
        max_running=draw(st.integers(1, 8)),
        lost_every=draw(st.sampled_from([0, 2, 3, 5])),
        slow_every=draw(st.sampled_from([0, 0, 2, 3, 7])),
        **planted,
    )


def found_by(check, **planted):
    """Runs ``check(simulation)`` over many cases with the planted bug; it must fail."""

    @settings(
        max_examples=3000,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(simulations(**planted))
    def search(simulation):
        check(simulation)

    with pytest.raises(AssertionError) as caught:
        search()
    return str(caught.value)


def run_to_the_end(simulation):
    simulation.run()


def never_drop_as_stale(simulation):
    simulation.run()
    assert "stale" not in simulation.dropped.values(), "admission let something become stale"


def order_is_kept(simulation):
    simulation.run()
    window = simulation.bound.window
    assert all(count <= window - 1 for count in overtakings(simulation).values()), "overtaken too often"


# -- admission and window: hold prompts back ---------------------------------------------------------


@quick
@given(simulations())
def test_bound_holds_at_consumption_everything_ends_once_and_no_deadlock(simulation):
    run_to_the_end(simulation)


@quick
@given(simulations(policies=("admission", "window")))
def test_admission_alone_keeps_the_bound_so_nothing_is_ever_dropped_as_stale(simulation):
    never_drop_as_stale(simulation)


@quick
@given(simulations(policies=("admission", "window")))
def test_dispatch_order_up_to_window_minus_one_overtakings(simulation):
    order_is_kept(simulation)


@quick
@given(simulations(policies=("admission", "window")))
def test_no_prompt_starves(simulation):
    """Whatever the order, all but the newest admitted groups have ended when the run has."""
    simulation.run()
    bound = simulation.bound
    newest = (bound.max_staleness + 1) * bound.weight_sync_steps * bound.groups_per_step + bound.window
    left = [number for number in range(simulation.admitted) if _unfinished(simulation, number)]
    assert all(number >= simulation.admitted - simulation.lost - newest for number in left)


def _unfinished(simulation, number):
    return number in simulation.running or simulation.dropped.get(number) == "shutdown"


@quick
@given(simulations())
def test_bound_zero_trains_on_the_current_version_only(simulation):
    simulation.bound = dataclasses.replace(simulation.bound, max_staleness=0, window=1)
    simulation.__post_init__()
    simulation.run()
    assert all(age == 0 for age, _ in simulation.staleness)


@quick
@given(bounds(policies=("admission", "window")), st.integers(0, 5))
def test_admission_always_leaves_room_for_the_steps_until_the_next_version(bound, versions):
    needed = (versions + 1) * bound.weight_sync_steps * bound.groups_per_step
    assert bound.admission_limit(versions) >= needed


@quick
@given(bounds(policies=("admission",)))
def test_the_bound_is_used_up_so_admission_is_not_stricter_than_it_must_be(bound):
    """With everything admitted at once and FIFO ends, the oldest consumed group is exactly at a bound."""
    steps = 3 * (bound.max_staleness + 1) * bound.weight_sync_steps
    admit_while_allowed = [-1] * 10_000  # the last of the possible events
    simulation = Simulation(bound, admit_while_allowed, steps, max_running=10**6)
    simulation.run()
    oldest = max(age for age, _ in simulation.staleness)
    oldest_steps = max(steps for _, steps in simulation.staleness)
    k = bound.weight_sync_steps
    by_steps = bound.max_staleness_steps
    assert oldest == bound.max_staleness or (by_steps is not None and oldest_steps > by_steps - k)


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "window", "window": 2, "max_staleness": 0, "weight_sync_steps": 2},
        {"policy": "window", "window": 6, "max_staleness": 1, "groups_per_step": 4},
        {"policy": "window", "window": 2, "max_staleness": 5, "max_staleness_steps": 0},
        {"policy": "admission", "window": 2},
        {"policy": "drop", "window": 2},
        {"policy": "window", "window": 0},
    ],
)
def test_a_window_without_room_is_refused(changes):
    with pytest.raises(ConfigError, match="window"):
        StalenessBound(**({"policy": "window", "groups_per_step": 4, "max_staleness": 1} | changes))


def test_the_largest_window_is_named_and_accepted():
    with pytest.raises(ConfigError, match="1 to 5"):
        StalenessBound("window", groups_per_step=4, max_staleness=1, window=6)
    assert StalenessBound("window", groups_per_step=4, max_staleness=1, window=5).admission_limit(0) == 4


# -- drop and freshest: discard at the end -----------------------------------------------------------


@quick
@given(simulations(policies=("drop", "freshest")))
def test_discarding_policies_hold_the_bound_and_progress(simulation):
    simulation.run()
    assert len(simulation.consumed) == simulation.steps * simulation.bound.groups_per_step


def _group(number, first):
    simulation = Simulation(StalenessBound("freshest", groups_per_step=2, max_staleness=3), [], 1)
    simulation.running[number] = first
    simulation._end_group(number)
    return simulation.queue[0]


def test_freshest_takes_the_youngest_and_drops_what_is_too_old():
    simulation = Simulation(StalenessBound("freshest", groups_per_step=2, max_staleness=3), [], 1)
    for number, first in enumerate([4, 6, 5, 7, 3]):
        simulation.buffer.add(_group(number, first))
    groups = simulation.buffer.assemble(version=7, optimizer_step=99)
    assert [group.number for group in groups] == [3, 1]
    dropped = [record.event for record in simulation.recorder.records if record.event.kind == "group_dropped"]
    assert [(event.group, event.reason) for event in dropped] == [("t1.g4", "stale")]


@pytest.mark.parametrize("when", ["waiting", "consumed", "lost"])
def test_a_group_that_comes_twice_is_refused(when):
    simulation = Simulation(StalenessBound("drop", groups_per_step=1, max_staleness=3), [], 1)
    group = _group(0, FIRST_VERSION)
    if when == "lost":
        simulation.lost_every = 1
        simulation.running[0] = FIRST_VERSION
        simulation._end_group(0)
        simulation._take()
    else:
        simulation.buffer.add(group)
    if when == "consumed":
        assert simulation.buffer.assemble(FIRST_VERSION, 13) == (group,)
    with pytest.raises(WorkerError, match="number 0, which came before"):
        simulation.buffer.add(group)


# -- planted bugs --------------------------------------------------------------------------------------


class OneTooMany(StalenessBound):
    def admission_limit(self, versions_since_start):
        limit = super().admission_limit(versions_since_start)
        return None if limit is None else limit + 1


class ForgetsTheWindow(StalenessBound):
    def admission_limit(self, versions_since_start):
        return self._steps_admitted(versions_since_start) * self.groups_per_step


class ForgetsSyncSteps(StalenessBound):
    """The formula for weight_sync_steps = 1 only."""

    def _steps_admitted(self, versions_since_start):
        return self.max_staleness + versions_since_start + 1


class TakesRoomForTheWindow(StalenessBound):
    """Accepts windows that leave one step's groups, though a version needs those of k steps."""

    @property
    def _spare_groups(self):
        return (self._steps_admitted(0) - 1) * self.groups_per_step


class AnyOrder(GroupBuffer):
    def _in_dispatch_order(self, need):
        return sorted(self._ready)[:need]


class NeverCounts(GroupBuffer):
    def _count_overtaking(self, chosen):
        pass


class KeepsTheStale(GroupBuffer):
    def _drop_stale(self, version, optimizer_step):
        pass


class ConsumesTwice(GroupBuffer):
    def assemble(self, version, optimizer_step):
        groups = super().assemble(version, optimizer_step)
        if groups is not None:
            self._ready[groups[0].number] = groups[0]
        return groups


class LosesTheRest(GroupBuffer):
    def drain(self, reason="shutdown"):
        self._ready.clear()


class ForgetsLostGroups(GroupBuffer):
    """Waits for a lost number for ever."""

    def add(self, item):
        if hasattr(item, "samples"):
            super().add(item)


HOLD_BACK = ("admission", "window")


@pytest.mark.parametrize(
    ("check", "planted", "words"),
    [
        (never_drop_as_stale, {"bound_class": OneTooMany, "policies": HOLD_BACK}, "become stale"),
        (never_drop_as_stale, {"bound_class": ForgetsTheWindow, "policies": ("window",)}, "become stale"),
        (run_to_the_end, {"bound_class": ForgetsSyncSteps, "policies": HOLD_BACK}, "deadlock"),
        (
            run_to_the_end,
            {"bound_class": TakesRoomForTheWindow, "policies": ("window",), "wide": True},
            "deadlock",
        ),
        (order_is_kept, {"buffer_class": AnyOrder, "policies": HOLD_BACK}, "overtaken"),
        (order_is_kept, {"buffer_class": NeverCounts, "policies": ("window",)}, "overtaken"),
        (
            run_to_the_end,
            {"buffer_class": KeepsTheStale, "policies": ("drop", "freshest")},
            "(versions|steps) old",
        ),
        (run_to_the_end, {"buffer_class": ConsumesTwice, "policies": ("drop", "freshest")}, r"\d+: 2"),
        (run_to_the_end, {"buffer_class": LosesTheRest}, "not one each"),
        (run_to_the_end, {"buffer_class": ForgetsLostGroups, "policies": ("admission",)}, "deadlock"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_bugs_are_found(check, planted, words):
    found = found_by(check, **planted)
    assert re.search(words, found), found
