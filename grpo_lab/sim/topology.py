"""The way of a bucket from the trainer to many engines, when they do not all have a link to it.

Every node has one uplink, which carries one copy at a time; what has arrived whole may be sent on, so that
the next bucket follows the one before it (store and forward by bucket).

| topology | who sends to the n-th engine | seconds of one bucket, w on the wire, a a hop, n engines |
|----------|------------------------------|-----------------------------------------------------------|
| p2p      | the trainer                  | n w + a                                                   |
| tree     | binary heap, trainer at root | (2 w + a) log2(n), to within one level                    |
| ring     | engine n - 1                 | n (w + a)                                                 |

A node that is down passes buckets on all the same: what fails here is a member's own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from grpo_lab.sim.scenario import Topology

_SENDER = 0


def parent_of(topology: Topology, place: int) -> int:
    """Who sends to the member at ``place`` (from 1; 0 is the sender).

    >>> [parent_of("tree", place) for place in (1, 2, 3, 4, 5, 6)]
    [0, 0, 1, 1, 2, 2]
    """
    if topology == "tree":
        return (place - 1) // 2
    return place - 1 if topology == "ring" else _SENDER


class Relay:
    """Knows when the uplink of every node is free again."""

    def __init__(self, topology: Topology, members: Sequence[str]) -> None:
        self._members = tuple(members)
        self._parents = [parent_of(topology, place) for place in range(1, len(members) + 1)]
        self._free_s = [0.0] * (len(members) + 1)

    def arrivals_s(
        self, sent_s: float, wire_s: Callable[[str], float], latency_s: Callable[[str], float]
    ) -> Mapping[str, float]:
        """When a bucket that is sent at ``sent_s`` has arrived at each member.

        Args:
            wire_s: how long a copy to that member keeps its sender's uplink busy.
            latency_s: from its last byte there to its last byte here.
        """
        at_s = [sent_s]
        for member, parent in zip(self._members, self._parents, strict=True):
            ended_s = max(at_s[parent], self._free_s[parent]) + wire_s(member)
            self._free_s[parent] = ended_s
            at_s.append(ended_s + latency_s(member))
        return dict(zip(self._members, at_s[1:], strict=True))
