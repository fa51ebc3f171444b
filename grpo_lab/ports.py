"""The seams between the protocol and a world. ``protocol/`` reaches everything through these.

The real world implements them with HTTP, gloo, shared memory and processes; a simulated world
implements the same ports on a virtual-time event loop. All methods are coroutines unless marked sync.
Every implementation bounds its own waits and raises from ``grpo_lab.errors``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from grpo_lab.events import Event
from grpo_lab.types import (
    Bucket,
    Completion,
    CursorState,
    DroppedGroup,
    EngineCapabilities,
    GenerateRequest,
    JsonDict,
    PauseMode,
    RolloutGroup,
    SyncId,
)

T = TypeVar("T")


class Recorder(Protocol):
    """Writes one actor's part of the trace. Sync, thread-safe, never blocks on a reader.

    ``observe`` is called with the id that came with a message; it becomes a cause of the next event.
    ``last_id`` goes out with every message ("" before the first event).
    """

    @property
    def actor(self) -> str: ...
    @property
    def last_id(self) -> str: ...
    @property
    def next_seq(self) -> int: ...
    @property
    def now_s(self) -> float: ...
    def emit(self, event: Event) -> str: ...
    def observe(self, event_id: str) -> None: ...


class Engine(Protocol):
    """One inference engine (all its ranks behind one address), named ``name``.

    Raises ``EngineUnreachable``, ``EngineTimeout`` or ``EngineRefused``; a success means only that the
    engine said so, which is why ``checksums`` and ``score`` exist.
    """

    @property
    def name(self) -> str: ...
    @property
    def capabilities(self) -> EngineCapabilities: ...
    async def health(self) -> None: ...
    async def start_id(self) -> str:
        """Which run of its process answers: another text after every start, "" where it cannot say.

        A restarted engine holds none of the weights, sessions and pauses of the run before.
        """
        ...

    async def world_size(self) -> int: ...
    async def pause(self, mode: PauseMode, clear_cache: bool, term: int) -> None: ...
    async def resume(self, term: int) -> None: ...
    async def is_paused(self) -> bool: ...
    async def init_transfer(self, info: JsonDict, term: int) -> str:
        """Joins the transfer; the digest of the plan that the engine found to be its own, "" if untold."""
        ...

    async def start_update(self, sync: SyncId) -> None: ...
    async def update(self, sync: SyncId, info: JsonDict) -> None:
        """Returns when the engine has received (and, if it can, verified) every bucket."""
        ...

    async def finish_update(self, sync: SyncId) -> None:
        """Makes the update the engine's weights, under the identity ``str(sync)``."""
        ...

    async def abandon_update(self, sync: SyncId) -> None:
        """Drops a staged update; engines without ``staged`` raise ``EngineRefused``, and so does one on which
        a late finish has made the version of ``sync`` the active one: it is not on the previous version.
        """
        ...

    async def weight_info(self) -> str:
        """The engine's weight version string: ``str(sync)`` of what it finished last."""
        ...

    async def checksums(self) -> dict[str, str]: ...
    async def generate(self, request: GenerateRequest) -> Completion: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token but the first of each sequence, at temperature 1."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...
    async def close(self) -> None: ...


class WeightSource(Protocol):
    """The trainer's parameters as buckets. On several ranks, every rank iterates; rank 0 also sends.

    ``begin`` freezes what this attempt carries; a retry of the same version yields the same bytes.
    ``next`` returns None after the last bucket. It is called only when slot ``index % slots`` is free.
    """

    @property
    def plan(self) -> JsonDict: ...
    @property
    def plan_digest(self) -> str: ...
    @property
    def num_buckets(self) -> int: ...
    @property
    def num_tensors(self) -> int: ...
    async def begin(self, sync: SyncId) -> None: ...
    async def next(self) -> Bucket | None: ...
    def phases_s(self) -> dict[str, float]:
        """Seconds of ``gather`` and ``pack`` since ``begin``. Sync."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The trainer's own logprobs, like ``Engine.score``."""
        ...


class WeightTransport(Protocol):
    """Moves buckets from the trainer to the engines.

    Life: ``open`` -> the coordinator hands ``init_info`` to every member -> ``accept`` (all joined) ->
    any number of ``send`` -> ``close``. ``send`` draws bucket i from the iterator only when the slot
    it will occupy is free on every member, returns the seconds spent moving bytes, and raises
    ``PeerDied`` or ``TransportTimeout``, naming the member; the transport must be re-opened after that.
    """

    async def open(self, members: Sequence[str], plan: JsonDict) -> None: ...
    def init_info(self, member: str) -> JsonDict: ...
    def update_info(self, sync: SyncId) -> JsonDict: ...
    async def accept(self) -> None: ...
    async def send(self, sync: SyncId, buckets: AsyncIterator[Bucket]) -> float: ...
    async def close(self) -> None: ...


class WeightReceiver(Protocol):
    """The engine's side of a transport: joins what ``init_info`` describes, then receives updates.

    ``receive`` yields each bucket with the hash that its sender declared; the memory is valid until the
    next one is asked for. It ends after the last bucket and raises ``PeerDied`` or ``TransportTimeout``.
    """

    async def join(self, info: JsonDict) -> None: ...
    def receive(self, sync: SyncId, info: JsonDict) -> AsyncIterator[Bucket]: ...
    async def close(self) -> None: ...


class Ranks(Protocol):
    """The trainer's ranks, for decisions that all must take together."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    async def barrier(self, timeout_s: float) -> None: ...
    async def agree(self, ok: bool, timeout_s: float) -> bool:
        """True when every rank said True. Raises ``PhaseTimeout`` when a rank does not answer."""
        ...


class SampleQueue(Protocol):
    """Bounded queue from the rollout worker to the trainer: back-pressure instead of loss.

    ``put`` waits while the queue is full, records ``GroupQueued`` and hands the item over; dropped groups
    travel through it too (they take no capacity and are not recorded again), so the trainer's ledger
    sees every end in order.
    """

    @property
    def capacity(self) -> int: ...
    async def put(self, item: RolloutGroup | DroppedGroup) -> None: ...


class PromptSource(Protocol):
    """The endless, seeded sequence of prompts. Sync.

    ``next`` gives the next (prompt index, prompt token ids, row) that is not done yet.
    """

    def next(self) -> tuple[int, tuple[int, ...], JsonDict]: ...


class PromptCursor(Protocol):
    """Which prompts are done (trained on, or dropped with a reason). Sync."""

    def acknowledge(self, prompt_index: int) -> None: ...
    def state(self) -> CursorState: ...


class RewardModel(Protocol):
    """Scores one group. Raises ``RewardError`` naming the function when it fails."""

    async def score(
        self, row: JsonDict, completions: Sequence[tuple[int, ...]]
    ) -> list[tuple[float | None, tuple[float | None, ...]]]:
        """For every completion: the weighted total, and each function's own value."""
        ...


class Bridge(Protocol):
    """Calls protocol coroutines from blocking code. Sync face.

    While ``call`` blocks its thread, the coroutine may run functions in that thread with
    ``in_caller`` (collectives and autograd belong to the trainer's main thread).
    """

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T: ...
    def in_caller(self, function: Callable[[], T]) -> Awaitable[T]: ...
    def close(self) -> None: ...
