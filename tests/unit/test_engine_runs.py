"""Runs read like the list that they stand for."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.engine.runs import Runs, frozen

WORDS = st.lists(st.integers(0, 2), max_size=30)


@given(WORDS, WORDS, st.integers(0, 2), st.integers(0, 9), st.slices(40))
def test_like_a_list(first: list[int], second: list[int], value: int, count: int, part: slice) -> None:
    plain, runs = list(first), Runs(first)
    plain += second
    runs += second
    plain += [value] * count
    runs += Runs.of(value, count)
    plain.append(value)
    runs.append(value)
    assert runs == plain
    assert list(runs) == plain
    assert len(runs) == len(plain)
    assert [runs[place] for place in range(-len(plain), len(plain))] == [*plain, *plain]
    part = slice(part.start, part.stop)
    assert list(runs[part]) == plain[part]
    assert sum(runs[part]) == sum(plain[part])


def test_a_copy_does_not_grow() -> None:
    runs = Runs.of(3, 5)
    copy = frozen(runs)
    runs.append(4)
    assert (len(copy), len(runs)) == (5, 6)
    assert frozen([1, 2]) == (1, 2)
    assert runs != [3, 3, 3, 3, 3, 5]
