"""How many groups may be under way, so that the staleness bound can be kept at consumption.

Symbols: G groups a step, k optimizer steps a sync, eta the bound in versions, v0 the version of the
initial sync, d the version under which a group is admitted, n its number in dispatch order (groups
that were lost are not counted).

When groups are consumed in dispatch order, group n is used in step ``n // G``, under version
``v0 + n // (G k)``. Admitting it only while ``n < (eta + d - v0 + 1) G k`` bounds its staleness:
``v0 + n // (G k) - d <= eta``. A lost group makes every later one be used earlier, which can only lower
its staleness. With a window of W a finished group may overtake an unfinished one; no group is
overtaken more than W - 1 times, so leaving that much room keeps the bound.
The form of the inequality is AReaL's (arXiv 2505.24298, section 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from grpo_lab.errors import ConfigError

StalenessPolicy = Literal["admission", "drop", "freshest", "window"]


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The staleness bound, and what admission does to keep it.

    ``max_staleness`` counts weight versions, ``max_staleness_steps`` optimizer steps; both must hold.
    ``admission`` and ``window`` hold prompts back; ``drop`` and ``freshest`` admit freely and discard what
    has become too old.

    >>> bound = StalenessBound("admission", groups_per_step=4, max_staleness=1)
    >>> [bound.admission_limit(versions) for versions in (0, 1, 2)]
    [8, 12, 16]
    """

    policy: StalenessPolicy
    groups_per_step: int
    max_staleness: int
    weight_sync_steps: int = 1
    max_staleness_steps: int | None = None
    window: int = 1

    def __post_init__(self) -> None:
        if self.policy not in get_args(StalenessPolicy):
            raise ConfigError("staleness_policy", self.policy, f"one of {get_args(StalenessPolicy)}")
        for name, lowest in (("groups_per_step", 1), ("max_staleness", 0), ("weight_sync_steps", 1)):
            if getattr(self, name) < lowest:
                raise ConfigError(name, getattr(self, name), f"an integer of at least {lowest}")
        between_syncs = self.weight_sync_steps - 1
        if self.max_staleness_steps is not None and self.max_staleness_steps < between_syncs:
            raise ConfigError(
                "max_staleness_steps",
                self.max_staleness_steps,
                f"at least weight_sync_steps - 1 = {between_syncs}",
                "Even the freshest sample grows that old between two syncs: sync more often",
            )
        if self.policy != "window" and self.window != 1:
            raise ConfigError("window", self.window, f"1 with staleness_policy={self.policy!r}")
        if not 1 <= self.window <= self._spare_groups + 1:
            raise ConfigError(
                "window",
                self.window,
                f"1 to {self._spare_groups + 1}: the groups that the staleness bound leaves to spare, plus 1",
                "Raise max_staleness or lower the window",
            )

    @property
    def admits_by_bound(self) -> bool:
        """Whether prompts are held back; otherwise stale groups are dropped at the end."""
        return self.policy in ("admission", "window")

    @property
    def _spare_groups(self) -> int:
        """What may be admitted under one version beyond the groups that its own steps consume.

        The next version comes only when those steps are done, so a window that took their room would
        stop the run. The same for every version: both sides of the inequality rise by k G.
        """
        steps = self._steps_admitted(0) - self.weight_sync_steps
        return steps * self.groups_per_step

    def admission_limit(self, versions_since_start: int) -> int | None:
        """How many groups (lost ones not counted) may have been admitted by then; None: no limit."""
        if not self.admits_by_bound:
            return None
        overtaking = self.window - 1 if self.policy == "window" else 0
        return self._steps_admitted(versions_since_start) * self.groups_per_step - overtaking

    def _steps_admitted(self, versions_since_start: int) -> int:
        steps = (self.max_staleness + versions_since_start + 1) * self.weight_sync_steps
        if self.max_staleness_steps is not None:
            # Version d holds the weights of step d k, and may be used up to step d k + bound.
            steps = min(steps, versions_since_start * self.weight_sync_steps + self.max_staleness_steps + 1)
        return steps
