"""Several data-parallel trainer ranks of one run, a process each, watched by who started them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Literal

from grpo_lab.errors import GrpoLabError
from grpo_lab.harness.recipe import Recipe
from grpo_lab.harness.run_dir import RunDir
from grpo_lab.harness.training import StepSeen, train
from grpo_lab.ports import Recorder
from grpo_lab.recorders import FileRecorder, run_clock
from grpo_lab.trainer.interrupts import children_born_deaf
from grpo_lab.trainer.worker_main import die_with_parent

LAST_RANK_S = 60.0
"""When one rank has ended, the others end within this time or are stopped: a collective notices at once."""
STOP_S = 15.0

_spawning = get_context("spawn")


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What one rank needs. ``cause`` is the newest event before its first."""

    rank: int
    port: int
    recipe: Recipe
    run: RunDir
    model: Path
    urls: tuple[str, ...]
    started_s: float
    first_term: int
    cause: str


@dataclass(frozen=True, slots=True)
class RankMessage:
    """``step`` carries what a log line said; ``ended`` the rank's newest event, and what it raised."""

    kind: Literal["step", "ended"]
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    last_id: str = ""
    error: Exception | None = None


def train_ranks(
    recipe: Recipe,
    run: RunDir,
    model: Path,
    urls: tuple[str, ...],
    recorder: Recorder,
    step_seen: StepSeen,
    *,
    started_s: float,
    first_term: int,
) -> None:
    """Trains with ``recipe.trainer_ranks`` processes; returns when all have ended.

    Raises:
        GrpoLabError: a rank died; otherwise what rank 0 raised, or the first other rank that did.
    """
    port = _free_port()
    specs = [
        RankSpec(rank, port, recipe, run, model, urls, started_s, first_term, recorder.last_id)
        for rank in range(recipe.trainer_ranks)
    ]
    with _running(specs) as ranks:
        _watch(ranks, recorder, step_seen)
    silent = [rank for rank in ranks if rank.ended is None]
    errors = [rank.ended.error for rank in ranks if rank.ended is not None and rank.ended.error is not None]
    for rank in silent:  # who died is the reason; what the others raised, and that they hang, follows from it
        if not rank.stopped or not errors:
            raise GrpoLabError(f"trainer rank {rank.number} {rank.death()}")
    if errors:
        raise errors[0]


class _Rank:
    """One process, and what it said."""

    def __init__(self, spec: RankSpec) -> None:
        self.number = spec.rank
        self.ended: RankMessage | None = None
        self.stopped = False  # by us, for it did not end with the others
        self.pipe, far_end = _spawning.Pipe(duplex=False)
        self.process: SpawnProcess = _spawning.Process(
            target=rank_main, args=(spec, far_end), name=f"trainer-rank-{spec.rank}"
        )
        with children_born_deaf():
            self.process.start()
        far_end.close()

    def read(self) -> Iterator[RankMessage]:
        """What has arrived. Closes the pipe behind the last message."""
        with contextlib.suppress(EOFError, ConnectionError):
            while self.pipe.poll():
                message: RankMessage = self.pipe.recv()
                if message.kind == "ended":
                    self.ended = message
                yield message
            return
        self.pipe.close()

    def death(self) -> str:
        """How a process ended that did not say so itself."""
        code = self.process.exitcode
        if self.stopped or code is None:
            return f"did not end within {LAST_RANK_S:g} s of the first rank and was stopped"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def ask_to_stop(self) -> None:
        if self.process.exitcode is None:
            self.stopped = True
            self.process.terminate()

    def stop(self) -> None:
        """Waits after ``ask_to_stop``, then insists."""
        self.process.join(STOP_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(STOP_S)
        if not self.pipe.closed:
            self.pipe.close()


@contextlib.contextmanager
def _running(specs: list[RankSpec]) -> Iterator[list[_Rank]]:
    """All ranks; none is left behind on any path. An interrupt gives them time to end cleanly."""
    ranks: list[_Rank] = []
    try:
        for spec in specs:
            ranks.append(_Rank(spec))
        yield ranks
    finally:
        for rank in ranks:
            rank.ask_to_stop()
        for rank in ranks:
            rank.stop()


def _watch(ranks: list[_Rank], recorder: Recorder, step_seen: StepSeen) -> None:
    """Passes on what the ranks say until all have ended, or one has and the others do not follow."""
    deadline_s: float | None = None
    while open_pipes := {rank.pipe: rank for rank in ranks if not rank.pipe.closed}:
        remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready = wait(list(open_pipes), remaining_s)
        if not ready:
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            for message in open_pipes[pipe].read():
                if message.kind == "step":
                    step_seen(message.step, message.metrics)
                else:
                    recorder.observe(message.last_id)
            if pipe.closed and deadline_s is None:
                deadline_s = time.monotonic() + LAST_RANK_S
    for rank in ranks:
        rank.process.join(STOP_S)


def rank_main(spec: RankSpec, pipe: Connection) -> None:
    """Entry of a rank's process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us decides what Ctrl-C means
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.rank),
        WORLD_SIZE=str(spec.recipe.trainer_ranks),
        LOCAL_WORLD_SIZE=str(spec.recipe.trainer_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec.port),
    )
    actor = "trainer" if spec.rank == 0 else f"trainer-r{spec.rank}"
    error: Exception | None = None

    def step_seen(step: int, metrics: dict[str, float]) -> None:
        if spec.rank == 0:
            pipe.send(RankMessage("step", step, metrics))

    with FileRecorder(actor, spec.run.events, run_clock(spec.started_s)) as recorder:
        recorder.observe(spec.cause)
        try:
            train(spec.recipe, spec.run, spec.model, spec.urls, recorder, step_seen, spec.first_term)
        except GrpoLabError as failure:
            error = failure
        except KeyboardInterrupt:
            error = GrpoLabError(f"trainer rank {spec.rank} was asked to stop")
        except Exception as failure:  # it may not survive pickling, its words do
            error = GrpoLabError(f"{type(failure).__name__}: {failure}")
    pipe.send(RankMessage("ended", last_id=recorder.last_id, error=error))
    pipe.close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
