"""What a step looks like: metrics under TRL's names, and a table of completions."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from grpo_lab.trainer.batching import StepPlan
from grpo_lab.trainer.gradient import StepTotals
from grpo_lab.types import RolloutGroup


class MetricMeans:
    """Collects values by name between two logs."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._values[name].append(value)

    def take(self) -> dict[str, float]:
        """The mean of each since the last ``take``; ``.../max`` and ``.../min`` keep the extreme."""
        reduce = {"max": max, "min": min}
        means = {
            name: float(reduce.get(name.rpartition("/")[2], statistics.fmean)(values))
            for name, values in self._values.items()
        }
        self._values.clear()
        return means


def plan_metrics(plan: StepPlan, reward_names: Sequence[str] = ()) -> dict[str, float]:
    """Figures of what a step consumes: rewards, lengths, staleness in versions (of the oldest token)."""
    samples = [sample for group in plan.groups for sample in group.samples]
    lengths = [len(sample.completion_token_ids) for sample in samples]
    staleness = [plan.version - group.version_first for group in plan.groups]
    metrics = {
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": _share(sample.finish_reason == "length" for sample in samples),
        "staleness/mean": statistics.fmean(staleness),
        "staleness/max": float(max(staleness)),
        "frac_reward_zero_std": _share(_without_signal(group) for group in plan.groups),
    }
    rewards = _known(sample.reward for sample in samples)
    if rewards:
        metrics["reward"] = statistics.fmean(rewards)
        metrics["reward_std"] = statistics.fmean(_std(group) for group in plan.groups)
    for place, name in enumerate(reward_names):
        values = _known(sample.rewards[place] for sample in samples if len(sample.rewards) > place)
        if values:
            metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
    return metrics


def print_completions(
    plan: StepPlan, step: int, limit: int | None = None, console: Console | None = None
) -> None:
    """A table with one row a sample: prompt, completion, reward, staleness."""
    table = Table(title=f"completions of step {step}", show_lines=True)
    for heading in ("prompt", "completion", "reward", "staleness"):
        table.add_column(heading, overflow="fold")
    rows = [(group, sample) for group in plan.groups for sample in group.samples]
    for _, sample in rows[:limit]:
        reward = "-" if sample.reward is None else f"{sample.reward:.3g}"
        age = plan.version - sample.version_first
        table.add_row(_plain(sample.prompt_text), _plain(sample.completion_text), reward, str(age))
    (console or Console()).print(table)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _std(group: RolloutGroup) -> float:
    rewards = _known(sample.reward for sample in group.samples)
    return statistics.stdev(rewards) if len(rewards) > 1 else 0.0


def _without_signal(group: RolloutGroup) -> bool:
    return len(set(_known(sample.reward for sample in group.samples))) < 2


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)


def correction_metrics(totals: StepTotals) -> dict[str, float]:
    """What the step's importance ratios were, and what was done about them; TRL's names where it has them.

    The effective sample size is Kish's, ``(sum r)**2 / (n sum r**2)``, over the step's tokens: 1 where all
    ratios are equal, near 0 where a few tokens decide.
    """
    names = {
        "importance_sum": "sampling/importance_sampling_ratio/mean",
        "truncated": "sampling/truncated_ratio",
        "masked": "sampling/masked_ratio",
        "clipped": "clip_ratio/region_mean",
    }
    tokens, sums = max(totals.tokens, 1), totals.correction
    metrics = {name: sums[key] / tokens for key, name in names.items() if key in sums}
    if squares := sums.get("importance_squares", 0.0):
        metrics["sampling/effective_sample_size"] = sums["importance_sum"] ** 2 / (tokens * squares)
    return metrics
