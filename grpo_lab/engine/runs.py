"""Sequences of long runs of one value, in the memory of a few numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Generic, TypeVar, cast, overload

T = TypeVar("T")


class Runs(Sequence[T], Generic[T]):
    """Grows like a list, by ``append`` and ``+=``; reads like one. A slice is ``Runs`` of its own.

    >>> runs = Runs([5, 5, 7])
    >>> runs += Runs.of(7, 1_000_000)
    >>> len(runs), runs[1], runs[-1], list(runs[1:4])
    (1000003, 5, 7, [5, 7, 7])
    """

    __slots__ = ("_ends", "_values")

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._values: list[T] = list(values)
        self._ends = list(range(1, len(self._values) + 1))  # the place behind each run

    @classmethod
    def of(cls, value: T, count: int) -> Runs[T]:
        runs: Runs[T] = cls()
        runs._extend(value, count)
        return runs

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Runs[T]: ...
    def __getitem__(self, place: int | slice) -> T | Runs[T]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice with step {step}; Runs have steps of 1 only")
            return self._between(start, stop)
        if not -len(self) <= place < len(self):
            raise IndexError(f"place {place} of {len(self)}")
        return self._values[bisect_right(self._ends, place % len(self))]

    def __iter__(self) -> Iterator[T]:
        starts = [0, *self._ends[:-1]]
        runs = zip(self._values, starts, self._ends, strict=False)
        return chain.from_iterable(repeat(value, end - start) for value, start, end in runs)

    def __iadd__(self, values: Iterable[T]) -> Runs[T]:
        if isinstance(values, Runs):
            start = 0
            for value, end in zip(values._values, values._ends, strict=True):
                self._extend(value, end - start)
                start = end
        else:
            for value in values:
                self._extend(value, 1)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_same, self, other))

    __hash__ = None  # type: ignore[assignment]  # it grows

    def append(self, value: T) -> None:
        self._extend(value, 1)

    def _extend(self, value: T, count: int) -> None:
        if count <= 0:
            return
        if self._values and self._values[-1] == value:
            self._ends[-1] += count
        else:
            self._ends.append(len(self) + count)
            self._values.append(value)

    def _between(self, start: int, stop: int) -> Runs[T]:
        part: Runs[T] = Runs()
        run = bisect_right(self._ends, start)
        while start < stop:
            end = min(self._ends[run], stop)
            part._extend(self._values[run], end - start)
            start, run = end, run + 1
        return part


def _same(one: object, other: object) -> bool:
    return one == other


def frozen(values: Sequence[T]) -> tuple[T, ...]:
    """What a reply carries: a tuple, or a copy of ``Runs``, which nobody changes and reads like a tuple."""
    return cast("tuple[T, ...]", values[:]) if isinstance(values, Runs) else tuple(values)
