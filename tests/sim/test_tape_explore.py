"""Exhaustive schedules, planted races and shrinking."""

import asyncio
import math
import time

import pytest

from grpo_lab.errors import InvariantViolation
from grpo_lab.events import Reached
from grpo_lab.sim import Tape, explore, pct_tape, random_tape, run_simulation, shrink


def interleavings(tape):
    """Two tasks of two steps each, started at the same time."""

    async def main(context):
        log = []

        async def worker(name):
            log.append(name)
            await asyncio.sleep(0)
            log.append(name)

        await asyncio.gather(worker("a"), worker("b"))
        return "".join(log)

    return run_simulation(main, tape).value


def test_every_interleaving_is_met_exactly():
    found = explore(interleavings, depth=20)
    assert found.complete
    assert found.deepest < 20
    assert set(found.outcomes) == {"aabb", "abab", "abba", "baab", "baba", "bbaa"}
    assert found.outcomes.total() == found.runs
    assert str(found).startswith(f"{found.runs} schedules (all to a depth of 20 decisions")


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_number_of_schedules_is_the_factorial_for_one_shot_timers(count):
    def run(tape):
        async def main(context):
            log = []
            for number in range(count):
                context.loop.call_at(1.0, log.append, number)
            await asyncio.sleep(2)
            return tuple(log)

        return run_simulation(main, tape).value

    found = explore(run, depth=10)
    assert (found.runs, len(found.outcomes)) == (math.factorial(count), math.factorial(count))


def test_depth_and_run_bounds_are_reported():
    shallow = explore(interleavings, depth=1)
    assert shallow.complete
    assert shallow.runs == 2
    assert shallow.deepest == 1
    cut = explore(interleavings, depth=20, max_runs=3)
    assert not cut.complete
    assert "not all" in str(cut)


async def version_race(context):
    """A planted bug: the engine reads the version, waits, and only then reads the weights.

    In first-in-first-out order both engines have answered before the trainer's second write.
    """
    store = {"version": 1, "weights": "w1"}
    trainer = context.recorder("trainer")

    async def publish():
        await asyncio.sleep(1)
        for _ in range(3):
            await asyncio.sleep(0)
        store["weights"] = "w2"
        await asyncio.sleep(0)
        store["version"] = 2
        trainer.emit(Reached(mark="published"))

    async def serve(name):
        await asyncio.sleep(1)
        version = store["version"]
        await asyncio.sleep(0)
        weights = store["weights"]
        context.recorder(name).emit(Reached(mark=f"{version} {weights}"))
        if weights != f"w{version}":
            return f"{name} served {weights} as version {version}"
        return ""

    _, *faults = await asyncio.gather(publish(), serve("engine-0"), serve("engine-1"))
    for fault in faults:
        if fault:
            raise InvariantViolation(fault, rule="S4")


def test_planted_race_is_invisible_in_fifo_order_found_shrunk_and_replayed():
    run_simulation(version_race)  # first in, first out: no alarm

    def run(tape):
        return run_simulation(version_race, tape).digest

    started_s = time.monotonic()
    found = explore(run, depth=12, max_runs=20_000)
    assert found.failed_runs == 1
    failure = found.failures[0]
    assert isinstance(failure.error, InvariantViolation)

    def fails(tape):
        try:
            run(tape)
        except InvariantViolation:
            return True
        return False

    shrunk = shrink(failure.tape, fails)
    assert time.monotonic() - started_s < 60
    assert 1 <= sum(choice != 0 for choice in shrunk.choices) <= 4
    saved = shrunk.to_json()
    texts, traces = set(), set()
    for _ in range(3):
        records = []
        with pytest.raises(InvariantViolation) as caught:
            run_simulation(version_race, Tape.from_json(saved), records=records)
        texts.add(str(caught.value))
        traces.add(tuple(record.to_line() for record in records))
        assert caught.value.__context__ is None
    assert len(texts) == len(traces) == 1


def test_random_and_priority_tapes_find_the_race_too():
    def finds(make_tape):
        for seed in range(300):
            try:
                run_simulation(version_race, make_tape(seed))
            except InvariantViolation:
                return True
        return False

    assert finds(lambda seed: random_tape(seed, 60))
    assert finds(lambda seed: pct_tape(seed, depth=3, steps=40))


def test_random_failure_shrinks_to_a_handful_of_choices():
    def fails(tape):
        try:
            run_simulation(version_race, tape)
        except InvariantViolation:
            return True
        return False

    failing = next(tape for seed in range(300) if fails(tape := random_tape(seed, 60)))
    shrunk = shrink(failing, fails)
    assert fails(shrunk)
    assert sum(choice != 0 for choice in shrunk.choices) <= 4
    assert max(shrunk.choices) <= 3


def test_all_failures_can_be_counted():
    def run(tape):
        return run_simulation(version_race, tape).digest

    found = explore(run, depth=5, stop_at_failure=False, keep_failures=2)
    assert found.complete
    assert found.failed_runs + found.outcomes.total() == found.runs
    assert len(found.failures) <= 2


def test_shrink_of_a_tape_that_does_not_fail_gives_it_back():
    tape = Tape([3, 1])
    assert shrink(tape, lambda _: False) is tape


def needs(wanted, decisions=80, lanes=3):
    """A program of so many decisions that fails when it takes the ``wanted`` lanes; counts its runs."""
    runs = []

    def fails(tape):
        runs.append(tape)
        taken = [tape.choose(range(lanes)) for _ in range(decisions)]
        return all(taken[place] == lane for place, lane in wanted.items())

    return fails, runs


@pytest.mark.parametrize(
    ("wanted", "most_runs"), [({17: 2}, 140), ({3: 1, 50: 2}, 400), ({3: 1, 30: 1, 31: 2, 70: 1}, 500)]
)
def test_what_is_left_is_what_the_failure_needs(wanted, most_runs):
    fails, runs = needs(wanted)
    failing = next(tape for seed in range(10_000) if fails(tape := random_tape(seed, 200)))
    runs.clear()
    shrunk = shrink(failing, fails)
    assert {place: choice for place, choice in enumerate(shrunk.choices) if choice} == wanted
    assert len(shrunk.choices) == max(wanted) + 1
    assert len(runs) <= most_runs
    assert len({run.choices for run in runs}) == len(runs), "no schedule is tried twice"


def test_shrinking_ends_with_its_budget():
    fails, runs = needs({3: 1, 30: 1, 31: 2, 70: 1})
    failing = next(tape for seed in range(10_000) if fails(tape := random_tape(seed, 200)))
    runs.clear()
    assert fails(shrink(failing, fails, max_runs=20))
    assert len(runs) == 21
