"""The figures of a run that are predicted, measured, and searched for: names that need nothing slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run was like after its first steps. Times are means; None where nothing was measured.

    ``staleness`` counts consumed groups by their staleness in versions, for the distance of distributions.
    """

    tokens_per_s: float
    step_s: float
    sync_s: float | None
    staleness_mean: float
    staleness_p99: float
    staleness_max: int
    staleness_steps_mean: float
    ttft_s: float | None
    tpot_s: float | None
    trainer_idle_share: float
    engine_busy_share: float
    dropped_share: float
    staleness: Mapping[int, int]

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Of ``dataclasses.asdict`` that went through JSON, where keys are texts."""
        counts = {int(age): count for age, count in row["staleness"].items()}
        return cls(**{**row, "staleness": counts})


QUANTITIES = tuple(name for name in Figures.__dataclass_fields__ if name != "staleness")
COMPARED = ("tokens_per_s", "step_s", "sync_s", "staleness_mean", "ttft_s", "tpot_s")
