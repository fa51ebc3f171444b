"""For tests of one's own: simulated clusters as Hypothesis strategies, and a search that keeps failures.

With ``@given(clusters(), tapes())``, a test calls ``simulate(scenario, tape, coordinator=MyCoordinator)`` of
``grpo_lab.sim.world``, which raises ``InvariantViolation`` when a rule is broken.
"""

from grpo_lab.testing.search import Search, load_coordinator, run_once, search
from grpo_lab.testing.strategies import clusters, delays, faults, tapes, workloads

__all__ = [
    "Search",
    "clusters",
    "delays",
    "faults",
    "load_coordinator",
    "run_once",
    "search",
    "tapes",
    "workloads",
]
