"""What an inference engine does: pauses, weight writes, model steps, requests."""

from __future__ import annotations

from grpo_lab.events.base import Event, event


@event
class EnginePaused(Event):
    """No new step begins; ``aborted`` requests were returned with their partial tokens.

    ``running`` and ``waiting`` count the requests that the engine still holds.
    """

    engine: str
    mode: str
    clear_cache: bool
    running: int = 0
    waiting: int = 0
    aborted: tuple[str, ...] = ()
    term: int = 0


@event
class EngineResumed(Event):
    engine: str
    term: int = 0


@event
class UpdateStarted(Event):
    engine: str
    term: int
    version: int
    attempt: int


@event
class BucketReceived(Event):
    """Where the bytes landed. ``hash64`` was computed there; ``expected_hash64`` came with the bucket."""

    engine: str
    term: int
    version: int
    attempt: int
    bucket: int
    nbytes: int
    hash64: int
    expected_hash64: int
    accepted: bool = True


@event
class WeightWriteBegan(Event):
    """Served weights are about to change (not the staging area). ``shard`` names a rank or stage."""

    engine: str
    term: int
    version: int
    shard: int = 0


@event
class WeightWriteEnded(Event):
    engine: str
    term: int
    version: int
    shard: int = 0
    complete: bool = True


@event
class WeightsLoaded(Event):
    """The engine holds the whole version; ``hashes_verified`` says whether it checked every bucket."""

    engine: str
    term: int
    version: int
    attempt: int
    hashes_verified: bool
    buckets: int = 0
    weights_hash: str = ""


@event
class UpdateFailed(Event):
    """``weights`` says what is left: previous (whole), staged (dropped) or torn (out of service)."""

    engine: str
    term: int
    version: int
    attempt: int
    reason: str
    weights: str = "previous"


@event
class WeightsActivated(Event):
    """From model step ``first_step`` on, tokens come from this version."""

    engine: str
    term: int
    version: int
    first_step: int
    shard: int = 0
    weights_hash: str = ""


@event
class CacheCleared(Event):
    """``cache`` names it (prefix, kv, encoder); ``kept_blocks`` survived."""

    engine: str
    cache: str
    cleared_blocks: int = 0
    kept_blocks: int = 0


@event
class CacheHit(Event):
    """A new request reuses cached work that ``content_version`` computed, under ``version`` (S17).

    The terms belong to the two versions; 0 where the engine does not know them.
    """

    engine: str
    request: str
    cache: str
    content_version: int
    version: int
    tokens: int
    content_term: int = 0
    term: int = 0


@event
class ModelStep(Event):
    """Steps ``first_step..last_step`` ran under ``version``.

    ``began_seq`` is what the recorder's ``next_seq`` said when they began, and this record is their end:
    every event of this actor from ``began_seq`` on happened during the steps. So an overlap with a weight
    write or a pause is seen without comparing clocks (S7, S16). ``shard`` is the rank or pipeline stage.
    """

    engine: str
    first_step: int
    last_step: int
    version: int
    term: int
    sequences: int
    prefill_tokens: int
    decode_tokens: int
    began_seq: int
    shard: int = 0
    duration_s: float = 0.0


@event
class RequestAdmitted(Event):
    """The engine took a request into its waiting queue. ``weight_version`` is active (0: none yet).

    ``term`` belongs to the active weights, ``request_term`` to the sender (0: it named none).
    """

    engine: str
    request: str
    request_kind: str
    prompt_tokens: int
    weight_version: int
    paused: bool = False
    term: int = 0
    request_term: int = 0


@event
class RequestFinished(Event):
    """``spans`` are (term, version, start, end, first_step, last_step) rows over the completion's tokens.

    The n-th continuation of a sample that a pause cut off has the sample's request id + ``.c<n>``.
    """

    engine: str
    request: str
    finish_reason: str
    tokens: int
    spans: tuple[tuple[int, int, int, int, int, int], ...] = ()
    recomputed_tokens: int = 0
    kv_version: int | None = None
    request_kind: str = "rollout"


@event
class RequestRefused(Event):
    """Not admitted: status 4xx, a stale term (S12), or out of service."""

    engine: str
    request: str
    status: int
    detail: str = ""
    term: int = 0
