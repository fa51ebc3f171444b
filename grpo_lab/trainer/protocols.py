"""What the trainer asks of the parts that can be injected.

``RolloutWorkerProtocol`` and ``WeightTransferProtocol`` are the public seams of ``AsyncGRPOTrainer``.
``WeightSync`` is the narrower face that the trainer itself drives; an injected weight transfer is
put behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.types import CursorState, DroppedGroup, RolloutGroup

NamedTensors = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Gives a fresh iterator over the trainer's (name, tensor) pairs, in a fixed order, gathered lazily."""


class RolloutBuffer(Protocol):
    """Where the trainer takes groups from; ``queue.Queue`` is one."""

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutGroup | DroppedGroup:
        """Raises ``queue.Empty`` after ``timeout`` seconds, ``WorkerDied`` or ``WorkerStalled`` at once."""
        ...


class RolloutWorkerProtocol(Protocol):
    """Produces rollout groups from ``start`` until ``stop``. ``stop`` is quick and may be called twice."""

    rollout_buffer: RolloutBuffer

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, version: int) -> None: ...


class FencingWorker(Protocol):
    """What a worker may offer besides: it is told which engines are out of service, before the version that
    was committed without them. The others serve, also those that were named before: they have restarted, and
    hold that version. A worker that does not offer it finds out by its requests' time-outs.
    """

    def fence_engines(self, names: Sequence[str]) -> None: ...


class WeightTransferProtocol(Protocol):
    """Moves weights to the engines: init, then (pause, send, resume) for each sync, then destroy."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a rollout worker must know to begin: identity, first version, which prompts are done, and which
    engines are out of service already.
    """

    term: int
    version: int
    cursor: CursorState
    fenced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncOutcome:
    """``committed`` is False when the sync failed but enough engines live on the previous version;
    ``fenced`` names those that are out of service.
    """

    version: int
    committed: bool
    phases_s: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    fenced: tuple[str, ...] = ()


class WeightSync(Protocol):
    """One training run's weight syncs: ``connect`` once, ``sync`` often, ``close`` on every path.

    ``sync`` raises ``SyncError`` when training cannot go on. All ranks call every method together.
    """

    def connect(self, term: int, base_version: int) -> None: ...
    def sync(self, named_tensors: NamedTensors, optimizer_step: int) -> SyncOutcome: ...
    def close(self) -> None: ...


WorkerFactory = Callable[[WorkerStart], RolloutWorkerProtocol]


class TermSettings(Protocol):
    """What a training run reads of its configuration; ``AsyncGRPOConfig`` has it all."""

    @property
    def staleness_bound(self) -> StalenessBound: ...
    @property
    def staleness_policy(self) -> str: ...
    @property
    def groups_per_step(self) -> int: ...
    @property
    def queue_maxsize(self) -> int: ...
    @property
    def starvation_timeout(self) -> float: ...
    @property
    def sync_attempts(self) -> int: ...
    @property
    def final_sync(self) -> bool: ...
