"""Terms, checkpoints, optimizer steps and what they consume."""

from __future__ import annotations

from dataclasses import field

from grpo_lab.events.base import Event, Params, event


@event
class TermBegan(Event):
    """A trainer (re)starts, resumes or calls train() again; ``term`` fences everything older (S12).

    ``base_version`` is the last version of the lineage it continues (0 for a fresh run).
    """

    term: int
    base_version: int
    optimizer_step: int
    prompt_low_water: int = 0
    prompts_done: tuple[int, ...] = ()
    checkpoint: str = ""
    restored_weights_hash: str = ""


@event
class CheckpointSaved(Event):
    """One consistent cut: weights, optimizer, version, term and prompt cursor (S27)."""

    checkpoint: str
    term: int
    version: int
    optimizer_step: int
    prompt_low_water: int
    prompts_done: tuple[int, ...] = ()
    weights_hash: str = ""


@event
class StepPlanned(Event):
    """Rank 0 decided what optimizer step ``optimizer_step`` consumes, under ``version`` (S18)."""

    term: int
    optimizer_step: int
    version: int
    groups: tuple[str, ...]


@event
class GroupConsumed(Event):
    """The gradient of ``optimizer_step`` begins to use this group.

    ``versions_first[i]`` and ``versions_last[i]`` belong to ``samples[i]``; ``correction_versions`` are
    the versions whose logprobs the correction divided by (S25); ``optimizer_step_first`` is the
    optimizer step whose weights the oldest token was sampled with (staleness in steps).
    """

    term: int
    group: str
    number: int
    prompt_index: int
    samples: tuple[str, ...]
    versions_first: tuple[int, ...]
    versions_last: tuple[int, ...]
    version: int
    optimizer_step: int
    optimizer_step_first: int = -1
    correction: str = "none"
    correction_versions: tuple[int, ...] = ()


@event
class MicroBatchBegan(Event):
    """A forward-backward pass over ``groups`` begins on ``rank`` under the trainer's ``version``."""

    term: int
    optimizer_step: int
    version: int
    rank: int
    micro_batch: int
    groups: tuple[str, ...] = ()
    samples: int = 0
    tokens: int = 0


@event
class OptimizerStepApplied(Event):
    """The parameters changed (``changed`` False: they were compared and did not)."""

    term: int
    optimizer_step: int
    version: int
    loss: float
    reward_mean: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    duration_s: float = 0.0
    wait_s: float = 0.0
    changed: bool = True
    metrics: Params = field(default_factory=dict)


@event
class LogprobGapMeasured(Event):
    """Largest |behaviour logprob - trainer's logprob| over samples of equal weights (S24, D1)."""

    version: int
    gap_max: float
    gap_mean: float
    tokens: int


@event
class Evaluated(Event):
    """Greedy accuracy on ``split`` (heldout, development)."""

    split: str
    accuracy: float
    optimizer_step: int
    version: int
    prompts: int
