"""A weight sync as the coordinator sees it."""

from __future__ import annotations

from dataclasses import field

from grpo_lab.events.base import Event, event


@event
class HandshakeCompared(Event):
    """Both sides' geometry was compared; ``difference`` is empty when they agree (H1)."""

    engine: str
    ours: str
    theirs: str
    difference: str = ""


@event
class ViewChanged(Event):
    """The set of engines that must prove the next version."""

    view: int
    members: tuple[str, ...]


@event
class StateChanged(Event):
    """The coordinator moved from ``before`` to ``after`` (values of ``SyncState``)."""

    term: int
    version: int
    attempt: int
    before: str
    after: str


@event
class SyncBegan(Event):
    """``version`` is the one to be published: committed + 1."""

    term: int
    version: int
    attempt: int
    view: int
    members: tuple[str, ...]
    scope: str = "global"
    pause_mode: str = "keep"
    clear_cache: bool = True
    optimizer_step: int = 0
    weights_changed: bool = True


@event
class GatherBegan(Event):
    """Rank ``rank`` begins to make the bucket's source tensors whole (``full_tensor``, a copy, a stream)."""

    term: int
    version: int
    attempt: int
    bucket: int
    rank: int = 0


@event
class GatherEnded(Event):
    """They are whole: the packer may read them (S10)."""

    term: int
    version: int
    attempt: int
    bucket: int
    rank: int = 0


@event
class BucketPackBegan(Event):
    """The packer begins to read source tensors into ring slot ``slot`` (S10)."""

    term: int
    version: int
    attempt: int
    bucket: int
    slot: int


@event
class BucketPacked(Event):
    """The slot is full; no source tensor is read for this bucket any more."""

    term: int
    version: int
    attempt: int
    bucket: int
    slot: int
    nbytes: int
    hash64: int


@event
class SlotReleased(Event):
    """Every reader of the slot ended: it may be written again (S10, S30)."""

    slot: int
    bucket: int


@event
class WeightsPublished(Event):
    """The manifest is complete. ``source_hash`` identifies the parameters that were read, if known."""

    term: int
    version: int
    attempt: int
    plan_digest: str
    tensors: int
    bucket_nbytes: tuple[int, ...]
    bucket_hashes: tuple[int, ...]
    source_hash: str = ""


@event
class EngineAcknowledged(Event):
    """An engine answered ``call`` (pause, start, update, finish, resume) with success."""

    engine: str
    call: str
    term: int
    version: int
    attempt: int


@event
class EngineFailed(Event):
    """An engine refused, timed out or died during ``call``."""

    engine: str
    call: str
    detail: str
    status: int = 0


@event
class EngineProved(Event):
    """``proof`` is hash, structure or canary; ``outcome`` is holds, fails or inconclusive."""

    engine: str
    term: int
    version: int
    attempt: int
    proof: str
    outcome: str
    gap: float | None = None
    separation: float | None = None
    tolerance: float | None = None


@event
class VersionCommitted(Event):
    """Every member of the view has loaded and proved the version, or was fenced. The only place it moves."""

    term: int
    version: int
    attempt: int
    view: int
    members: tuple[str, ...]
    optimizer_step: int = 0


@event
class SyncAborted(Event):
    """An attempt or the whole sync was given up; ``final`` when no attempt follows."""

    term: int
    version: int
    attempt: int
    reason: str
    final: bool = False


@event
class SyncEnded(Event):
    """``phases_s`` holds seconds of look, pause, start, gather, pack, wire, verify, load, resume, total."""

    term: int
    version: int
    outcome: str
    phases_s: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0


@event
class EngineAdmitted(Event):
    """The coordinator takes the engine into its view, as the run of its process that ``start`` names (""
    where the engine cannot say). Whatever an earlier run had loaded or proved counts no more.
    """

    engine: str
    start: str = ""
    term: int = 0
    version: int = 0


@event
class EngineFenced(Event):
    """Out of service until it restarts and takes a full sync. ``start``: as in ``EngineAdmitted``."""

    engine: str
    reason: str
    term: int = 0
    version: int = 0
    start: str = ""


@event
class VersionAnnounced(Event):
    """The rollout worker was told the committed version."""

    term: int
    version: int


@event
class CollectiveEntered(Event):
    """Rank ``rank`` entered its ``index``-th collective of ``group`` (S29)."""

    group: str
    rank: int
    index: int
    operation: str
    view: int = 0


@event
class PhaseAgreed(Event):
    """All ranks agreed on the outcome of a phase; ``ok`` is the conjunction (L10)."""

    phase: str
    rank: int
    ok: bool
    detail: str = ""
    term: int = 0
    version: int = 0
    attempt: int = 0
