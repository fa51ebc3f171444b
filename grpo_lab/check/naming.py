"""How messages of rules name weights and syncs: as they are named on the wire."""

from __future__ import annotations

Weights = tuple[int, int]  # (term, version): orders as the terms do, then as the versions do
Identity = tuple[int, int, int]  # (term, version, attempt)


def weights_name(weights: Weights | None) -> str:
    """
    >>> weights_name((1, 8)), weights_name(None)
    ('t1.v8', 'no version')
    """
    return "no version" if weights is None else f"t{weights[0]}.v{weights[1]}"


def sync_name(identity: Identity) -> str:
    """
    >>> sync_name((1, 8, 2))
    't1.v8.a2'
    """
    return f"t{identity[0]}.v{identity[1]}.a{identity[2]}"


def some(items: list[int], limit: int = 8) -> str:
    """The first few of many, in words.

    >>> some([3, 1, 2]), some(list(range(12)), limit=3)
    ('1, 2, 3', '0, 1, 2 and 9 more')
    """
    ordered = sorted(items)
    text = ", ".join(str(item) for item in ordered[:limit])
    return text if len(ordered) <= limit else f"{text} and {len(ordered) - limit} more"
