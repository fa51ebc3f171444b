"""For tests of one's own: simulated clusters as Hypothesis strategies, a search that keeps failures, state
machines, exhaustive small scopes, and pytest fixtures (``grpo_lab.testing.plugin``). See docs/testing.md.

With ``@given(clusters(), tapes())``, a test calls ``simulate(scenario, tape, coordinator=MyCoordinator)`` of
``grpo_lab.sim.world``, which raises ``InvariantViolation`` when a rule is broken.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lab.testing.coordinators import load_coordinator
    from grpo_lab.testing.coverage import TRANSITIONS, Coverage
    from grpo_lab.testing.exhaustive import explore_scopes, quick_scopes
    from grpo_lab.testing.failures import load_case
    from grpo_lab.testing.machines import CoordinatorMachine, EngineMachine
    from grpo_lab.testing.scopes import Scope, run_scope
    from grpo_lab.testing.search import Search, run_once
    from grpo_lab.testing.strategies import clusters, delays, faults, tapes, workloads

# Imported when first asked for: pytest loads this package's plugin in every run, and torch takes seconds.
_HOMES = {
    "TRANSITIONS": "coverage",
    "CoordinatorMachine": "machines",
    "Coverage": "coverage",
    "EngineMachine": "machines",
    "Scope": "scopes",
    "Search": "search",
    "clusters": "strategies",
    "delays": "strategies",
    "explore_scopes": "exhaustive",
    "faults": "strategies",
    "load_case": "failures",
    "load_coordinator": "coordinators",
    "quick_scopes": "exhaustive",
    "run_once": "search",
    "run_scope": "scopes",
    "tapes": "strategies",
    "workloads": "strategies",
}

__all__ = [
    "TRANSITIONS",
    "CoordinatorMachine",
    "Coverage",
    "EngineMachine",
    "Scope",
    "Search",
    "clusters",
    "delays",
    "explore_scopes",
    "faults",
    "load_case",
    "load_coordinator",
    "quick_scopes",
    "run_once",
    "run_scope",
    "tapes",
    "workloads",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
