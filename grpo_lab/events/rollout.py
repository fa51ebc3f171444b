"""Prompts, samples and groups on their way to the trainer."""

from __future__ import annotations

from grpo_lab.events.base import Event, event


@event
class GroupAdmitted(Event):
    """Admission let a prompt in. ``admitted`` counts admitted, not lost groups of this term with it (S19)."""

    term: int
    group: str
    number: int
    prompt_index: int
    samples: tuple[str, ...]
    version: int
    admitted: int
    running: int


@event
class SampleDispatched(Event):
    """A completion request was sent. ``version`` is the newest committed version that the worker knew."""

    term: int
    sample: str
    group: str
    engine: str
    version: int
    request: str = ""


@event
class SampleCompleted(Event):
    """``spans`` are (term, version, start, end) rows; ``version_source`` says where they come from
    (engine, pause_windows or none); ``provisional`` tokens were decoded in probation.
    """

    term: int
    sample: str
    group: str
    engine: str
    finish_reason: str
    tokens: int
    logprobs: int
    logprobs_finite: bool
    spans: tuple[tuple[int, int, int, int], ...] = ()
    version_source: str = "engine"
    provisional: bool = False
    duration_s: float = 0.0


@event
class GroupScored(Event):
    term: int
    group: str
    rewards: tuple[float | None, ...]


@event
class GroupQueued(Event):
    """Put into the sample queue: ``depth`` groups are in it afterwards (S23)."""

    term: int
    group: str
    number: int
    depth: int


@event
class GroupTaken(Event):
    """The trainer took the group out of the sample queue."""

    term: int
    group: str


@event
class GroupDropped(Event):
    """Ends all ``samples`` at once. ``staleness`` is in versions where the reason is stale."""

    term: int
    group: str
    prompt_index: int
    samples: tuple[str, ...]
    reason: str
    detail: str = ""
    staleness: int | None = None


@event
class AdmissionBlocked(Event):
    """The worker waits: ``by`` is bound, inflight, queue, pause or prompts."""

    term: int
    by: str


@event
class TrainerStarved(Event):
    """The trainer waits for samples (closed by the next StepPlanned)."""

    term: int
    optimizer_step: int
    have_groups: int
    need_groups: int
