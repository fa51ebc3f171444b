"""Choice tapes: reading, recording, JSON, strategies."""

import asyncio
import json

import pytest

from grpo_lab.errors import TraceError
from grpo_lab.sim.loop import VirtualLoop
from grpo_lab.sim.tape import Tape, fifo, pct_tape, random_tape


def test_reads_modulo_and_zero_past_the_end():
    tape = Tape([7, 4])
    assert [tape.choose(range(3)), tape.choose(range(2)), tape.choose(range(9))] == [1, 0, 0]
    assert list(tape.asked) == [3, 2]
    assert list(tape.taken) == [1, 0]
    assert tape.exhausted


def test_rewind_reads_again():
    tape = Tape([1, 2])
    first = [tape.choose(range(5)) for _ in range(3)]
    tape.rewind()
    assert not tape.exhausted
    assert [tape.choose(range(5)) for _ in range(3)] == first


def test_canonical_drops_trailing_zeros_and_reduces():
    tape = Tape([7, 3, 4, 9])
    for lanes in (3, 2, 4):
        tape.choose(range(lanes))
    assert tape.canonical().choices == (1, 1)


def test_json_round_trip():
    tape = Tape([0, 3, 0, 1, 0, 0])
    data = tape.to_json()
    assert data == {"choices": [0, 3, 0, 1]}
    assert Tape.from_json(json.dumps(data)).choices == Tape.from_json(data).choices == (0, 3, 0, 1)
    assert fifo().to_json() == {"choices": []}


@pytest.mark.parametrize(
    "data", ["no json", "[]", "{}", {"choices": [1.5]}, {"choices": "12"}, {"choices": [True]}]
)
def test_bad_json_is_refused(data):
    with pytest.raises(TraceError, match="not a choice tape"):
        Tape.from_json(data)


def test_bad_choice_is_refused():
    with pytest.raises(TraceError, match=r"choice 1 of the tape is -1: expected 0 <= choice"):
        Tape([0, -1])
    with pytest.raises(TraceError, match="choice 0"):
        Tape([1 << 30])


def test_random_tape_is_a_function_of_its_seed():
    assert random_tape(3, 10).choices == random_tape(3, 10).choices != random_tape(4, 10).choices
    assert len(random_tape(3, 10).choices) == 10


def test_pct_runs_the_highest_priority_and_changes_it_depth_minus_one_times():
    for seed in range(20):
        tape = pct_tape(seed, depth=3, steps=50)
        lanes = ("a", "b", "c")
        chosen = [lanes[tape.choose(lanes)] for _ in range(50)]
        changes = [index for index in range(1, 50) if chosen[index] != chosen[index - 1]]
        assert 1 <= len(changes) <= 2  # a change point at the very last decision shows no more
        assert tape.exhausted
        assert tape.choose(lanes) == 0


def test_pct_repeats_after_rewind():
    tape = pct_tape(1)
    first = [tape.choose("abc") for _ in range(100)]
    tape.rewind()
    assert [tape.choose("abc") for _ in range(100)] == first


def test_loop_records_only_real_choices():
    tape = Tape([0] * 100)
    loop = VirtualLoop(tape)

    async def main():
        await asyncio.sleep(1)  # nothing to choose from
        assert len(tape.asked) == 0
        await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))

    loop.run_until_complete(main())
    loop.close()
    assert tape.asked[0] == 2
    assert min(tape.asked) >= 2


@pytest.mark.parametrize("make", [lambda: Tape([1, 1]), lambda: pct_tape(3, steps=2)], ids=["plain", "pct"])
def test_a_held_tape_keeps_its_choices_for_later(make):
    tape = make()
    tape.hold()
    assert tape.exhausted
    tape.go_on()
    assert not tape.exhausted
    tape.choose("ab")
    tape.hold()
    tape.go_on()
    tape.choose("ab")
    tape.go_on()
    assert tape.exhausted, "what was read is read"
    assert len(tape.asked) == 2
    tape.rewind()
    assert not tape.exhausted
