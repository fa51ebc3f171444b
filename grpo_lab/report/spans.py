"""Intervals of time, as sorted lists of ``(start_s, end_s)`` that do not overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Span = tuple[float, float]


def merged(spans: Iterable[Span], gap_s: float = 0.0) -> list[Span]:
    """Sorts spans and joins those that overlap or lie at most ``gap_s`` apart.

    >>> merged([(3, 4), (0, 1), (1, 2)])
    [(0, 2), (3, 4)]
    """
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1] + gap_s:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif end > start:
            result.append((start, end))
    return result


def total_s(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    """The parts of ``spans`` inside ``window``."""
    pairs = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return [(start, end) for start, end in pairs if end > start]


def common(left: list[Span], right: list[Span]) -> list[Span]:
    """Times that lie in both of two merged lists.

    >>> common([(0, 4)], [(1, 2), (3, 9)])
    [(1, 2), (3, 4)]
    """
    result: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            result.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def without(spans: list[Span], holes: list[Span]) -> list[Span]:
    """The parts of a merged list that lie in none of the merged ``holes``.

    >>> without([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    result: list[Span] = []
    first = 0  # holes before it end before this span begins
    for start, end in spans:
        at = start
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        for hole_start, hole_end in itertools.islice(holes, first, None):
            if hole_start >= end:
                break
            if hole_start > at:
                result.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            result.append((at, end))
    return result
