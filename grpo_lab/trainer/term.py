"""One training run, from connecting to the engines to letting go of them."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.errors import GrpoLabError, SyncError, WorkerStalled
from grpo_lab.events import StepPlanned, TermBegan, TrainerStarved, VersionAnnounced
from grpo_lab.ports import Recorder
from grpo_lab.protocol.cursor import PromptCursorLedger
from grpo_lab.protocol.staleness import GroupBuffer
from grpo_lab.trainer.protocols import (
    NamedTensors,
    RolloutWorkerProtocol,
    SyncOutcome,
    TermSettings,
    WeightSync,
    WorkerFactory,
    WorkerStart,
)
from grpo_lab.types import CursorState, DroppedGroup, RolloutGroup

_LOOK_EVERY_S = 1.0  # a waiting trainer looks at its deadline this often
_DRAIN_S = 5.0  # for what a stopped worker had in its queue


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a training run begins: after what, in which term.

    ``version`` is the last committed one and ``optimizer_step`` the number of steps applied before.
    """

    term: int = 1
    version: int = 0
    optimizer_step: int = 0
    cursor: CursorState = dataclasses.field(default_factory=CursorState)
    checkpoint: str = ""


class TrainingTerm:
    """A run of ``train()``: begin -> start_worker -> (next_groups, step_applied, sync)* -> close.

    ``begin`` and ``start_worker`` do nothing when called again. On ranks other than 0, ``make_worker`` is
    None: they take part in syncs only.
    """

    cursor_type: ClassVar[type[PromptCursorLedger]] = PromptCursorLedger
    buffer_type: ClassVar[type[GroupBuffer]] = GroupBuffer

    def __init__(
        self,
        lineage: Lineage,
        args: TermSettings,
        recorder: Recorder,
        weight_sync: WeightSync,
        make_worker: WorkerFactory | None,
        named_tensors: NamedTensors,
    ) -> None:
        self.lineage = lineage
        self.version = lineage.version
        self.optimizer_step = lineage.optimizer_step
        self.synced_step = -1  # steps that had been applied at the last commit
        self._args = args
        self._recorder = recorder
        self._weight_sync = weight_sync
        self._make_worker = make_worker
        self._named_tensors = named_tensors
        self._worker: RolloutWorkerProtocol | None = None
        self._fenced: tuple[str, ...] = ()
        self._told: tuple[str, ...] = ()  # what the worker knows of them
        self._steps_of: dict[int, int] = {}
        self._cursor = self.cursor_type(lineage.cursor)
        self._buffer = self.buffer_type(
            args.staleness_bound,
            recorder,
            self._cursor,
            term=lineage.term,
            step_of_version=self.step_of_version,
        )

    @property
    def term(self) -> int:
        return self.lineage.term

    @property
    def cursor(self) -> CursorState:
        return self._cursor.state()

    @property
    def weights_are_version(self) -> bool:
        """Whether the parameters are still exactly those of the committed version."""
        return self.synced_step == self.optimizer_step

    def step_of_version(self, version: int) -> int:
        """Optimizer steps that had been applied to a version's weights (older terms: at their end)."""
        return self._steps_of.get(version, self.lineage.optimizer_step)

    def begin(self, weights_hash: str) -> SyncOutcome | None:
        """Connects, and syncs the current weights. ``weights_hash``: of weights from a checkpoint, or ""."""
        if self.version > self.lineage.version:
            return None
        if self._is_main:
            self._recorder.emit(
                TermBegan(
                    term=self.term,
                    base_version=self.lineage.version,
                    optimizer_step=self.lineage.optimizer_step,
                    prompt_low_water=self.lineage.cursor.low_water,
                    prompts_done=self.lineage.cursor.done,
                    checkpoint=self.lineage.checkpoint,
                    restored_weights_hash=weights_hash,
                )
            )
        self._weight_sync.connect(self.term, self.lineage.version)
        return self._sync_until_committed()

    def start_worker(self) -> None:
        """Starts the rollout worker. Raises ``SyncError`` when no version was committed before (S31)."""
        if self._make_worker is None or self._worker is not None:
            return
        if self.version == self.lineage.version:
            raise SyncError("the rollout worker must not start before the initial weight sync")
        start = WorkerStart(self.term, self.version, self.cursor, self._fenced)
        self._worker, self._told = self._make_worker(start), self._fenced
        self._worker.start()

    def sync(self) -> SyncOutcome:
        """Publishes the current weights and announces their version once it is committed."""
        outcome = self._sync_until_committed()
        if self._worker is not None:
            self._recorder.emit(VersionAnnounced(term=self.term, version=self.version))
            fence = getattr(self._worker, "fence_engines", None)  # optional, see FencingWorker
            if fence is not None and (outcome.fenced or self._told):
                fence(outcome.fenced)
                self._told = outcome.fenced
            self._worker.update_model_version(self.version)
        return outcome

    def next_groups(self) -> tuple[tuple[RolloutGroup, ...], float]:
        """The groups of the optimizer step that begins now, and the seconds waited for them.

        Raises:
            WorkerStalled: no further usable group within ``starvation_timeout``.
            WorkerDied: from the worker's buffer.
        """
        began = time.monotonic()
        deadline = began + self._args.starvation_timeout
        if self._args.staleness_policy == "freshest":
            self._take_what_is_there()
        most = self._buffer.have
        starved = False
        while (groups := self._buffer.assemble(self.version, self.optimizer_step)) is None:
            if self._buffer.have > most:  # a group that was lost or too old brings the step no nearer
                most, deadline = self._buffer.have, time.monotonic() + self._args.starvation_timeout
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WorkerStalled(self._starvation())
            try:
                self._take(min(left_s, _LOOK_EVERY_S) if starved else 0.0)
            except queue.Empty:
                if not starved:
                    starved = True
                    self._emit_starved()
        self._recorder.emit(
            StepPlanned(
                term=self.term,
                optimizer_step=self.optimizer_step,
                version=self.version,
                groups=tuple(group.group_id for group in groups),
            )
        )
        return groups, time.monotonic() - began

    def _take_what_is_there(self) -> None:
        """The freshest can only be chosen among the groups that are seen; how many stays bounded."""
        try:
            while self._buffer.have < self._args.queue_maxsize:
                self._take(0.0)
        except queue.Empty:
            return

    def step_applied(self, groups: tuple[RolloutGroup, ...]) -> None:
        """The step that consumed ``groups`` changed the parameters: their prompts are done."""
        self.optimizer_step += 1
        if self._is_main:
            for group in groups:
                self._cursor.acknowledge(group.prompt_index)

    def close(self, error: BaseException | None) -> tuple[Lineage, BaseException | None]:
        """Ends the run, whatever happened: worker, final sync if asked, weight transfer, left-over groups.

        Each is attempted although another failed; the first error wins and the others are added to it
        as notes. Returns where a next run would begin, and that error.
        """
        cursor = self.cursor  # before left-over groups: their prompts were not trained on
        ended_normally = error is None
        error = self._attempt("stopping the rollout worker", self._stop_worker, error)
        if ended_normally and self._args.final_sync and not self.weights_are_version:
            # Whatever stopping raised on this rank: the others are in the sync already.
            error = self._attempt("the final weight sync", self._sync_until_committed, error)
        error = self._attempt("closing the weight transfer", self._weight_sync.close, error)
        error = self._attempt("dropping the groups that were left", self._drop_rest, error)
        return Lineage(self.term, self.version, self.optimizer_step, cursor), error

    @property
    def _is_main(self) -> bool:
        return self._make_worker is not None

    def _sync_until_committed(self) -> SyncOutcome:
        """A sync that commits nothing leaves admission waiting for its version, so it is repeated at once."""
        for _ in range(self._args.sync_attempts):
            outcome = self._weight_sync.sync(self._named_tensors, self.optimizer_step)
            self._fenced = outcome.fenced
            if outcome.committed:
                self.version = outcome.version
                self.synced_step = self._steps_of[self.version] = self.optimizer_step
                return outcome
        raise SyncError(
            f"{self._args.sync_attempts} weight syncs in a row committed no version after {self.version}; "
            "the engines' answers are in the trace"
        )

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    def _drop_rest(self) -> None:
        deadline_s = time.monotonic() + _DRAIN_S
        try:
            while self._worker is not None and time.monotonic() < deadline_s:
                self._take(0.0)
        except (queue.Empty, GrpoLabError):
            pass  # a stopped worker may say so; whatever it still held is its own to report
        finally:
            self._buffer.drain("shutdown")

    def _take(self, timeout_s: float) -> None:
        if self._worker is None:
            raise WorkerStalled("there is no rollout worker in this run")
        item = self._worker.rollout_buffer.get(timeout=timeout_s)
        if item.term == 0:
            # A worker that was injected may not know the term; what it gives now belongs to this one.
            item = _of_term(item, self.term)
        self._buffer.add(item)

    def _emit_starved(self) -> None:
        self._recorder.emit(
            TrainerStarved(
                term=self.term,
                optimizer_step=self.optimizer_step,
                have_groups=self._buffer.have,
                need_groups=self._args.groups_per_step,
            )
        )

    def _starvation(self) -> str:
        return (
            f"optimizer step {self.optimizer_step} has {self._buffer.have} of {self._args.groups_per_step} "
            f"groups, and no further usable one came within {self._args.starvation_timeout:g} s "
            "(starvation_timeout). See the dropped groups in the trace for the reason"
        )

    @staticmethod
    def _attempt(
        what: str, function: Callable[[], object], error: BaseException | None
    ) -> BaseException | None:
        try:
            function()
        except BaseException as failure:  # also an interrupt: the remaining attempts must still run
            if error is None:
                return failure
            error.add_note(f"Then {what} failed: {failure!r}")
        return error


def _of_term(item: RolloutGroup | DroppedGroup, term: int) -> RolloutGroup | DroppedGroup:
    return dataclasses.replace(item, term=term)


def announcing(worker: RolloutWorkerProtocol) -> WorkerFactory:
    """An injected worker is told its first version the way it is told every other."""

    def make(start: WorkerStart) -> RolloutWorkerProtocol:
        worker.update_model_version(start.version)
        return worker

    return make
