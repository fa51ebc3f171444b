"""The rollout worker as its own process, seen from the trainer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from grpo_lab.errors import ConfigError, WorkerDied, WorkerError, WorkerStalled
from grpo_lab.events import MemberDied, MemberStarted, MemberStopped
from grpo_lab.ports import Recorder
from grpo_lab.trainer.interrupts import children_born_deaf
from grpo_lab.trainer.protocols import RolloutBuffer
from grpo_lab.trainer.worker_channel import Decoder, Message, encode
from grpo_lab.trainer.worker_main import WorkerSpec, worker_main
from grpo_lab.types import DroppedGroup, RolloutGroup

STOP_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 5.0  # a worker that does not read for so long is about to be reported as stalled


class WorkerProcess:
    """Implements ``RolloutWorkerProtocol``; it is its own ``rollout_buffer``.

    Started once. A death is noticed while the trainer waits for samples, at once; a worker that lives but
    brings nothing forward for ``stale_after_s`` while the trainer waits is reported as stalled, with what
    it says it waits for.
    """

    def __init__(self, spec: WorkerSpec, recorder: Recorder, stale_after_s: float) -> None:
        self._spec = spec
        self._recorder = recorder
        self._stale_after_s = stale_after_s
        self._process: BaseProcess | None = None
        self._socket: socket.socket | None = None
        self._ended_fd = -1  # readable when the process has ended
        self._decoder = Decoder()
        self._items: deque[RolloutGroup | DroppedGroup] = deque()
        self._failure = ""  # the worker's last words
        self._said_stopped = False
        self._gone = ""  # how it ended without being asked to
        self._stopped = False
        self._closed = False
        self._progress = -1
        self._blocked_by = "start-up"
        self._moved_s = 0.0  # when progress was last seen, or the trainer began to wait
        self._waited_until_s = 0.0
        self.rollout_buffer: RolloutBuffer = self

    # -- RolloutWorkerProtocol ------------------------------------------------------------------

    def start(self) -> None:
        """Spawns the process. Raises ``ConfigError`` when something cannot be sent to it."""
        if self._process is not None:
            raise WorkerError("this rollout worker was started before; make a new one for a new run")
        packed_spec = _pack(self._spec)
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=worker_main, args=(theirs, packed_spec), name="grpo-lab-worker", daemon=True
        )
        try:
            with children_born_deaf():
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(SEND_TIMEOUT_S)
        self._process, self._socket = process, ours
        # Neither the socket nor the sentinel is enough: a child that a reward function forked holds both.
        pid_fd = getattr(os, "pidfd_open", None)
        self._ended_fd = process.sentinel if pid_fd is None else pid_fd(process.pid)
        self._moved_s = self._waited_until_s = time.monotonic()
        self._recorder.emit(MemberStarted(member=self._spec.actor, role="worker"))

    def update_model_version(self, version: int) -> None:
        self._send(Message("version", version, self._recorder.last_id))

    def fence_engines(self, names: Sequence[str]) -> None:
        """See ``FencingWorker``."""
        self._send(Message("fenced", tuple(names), self._recorder.last_id))

    def stop(self) -> None:
        """Asks the worker to end, takes what it still has to say, and makes sure that it is gone."""
        process = self._process
        if process is None or self._stopped:
            return
        self._stopped = True
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        try:
            self._send(Message("stop", None, self._recorder.last_id))
            while not self._closed and time.monotonic() < deadline_s:
                self._receive(deadline_s - time.monotonic())
            self._ends_within(max(0.1, deadline_s - time.monotonic()))
        finally:
            killed = process.is_alive()
            self._make_sure_it_is_gone(process)
        if self._said_stopped and not self._gone:
            self._recorder.emit(MemberStopped(member=self._spec.actor))
        elif killed:
            self._note_death(f"it did not stop within {STOP_TIMEOUT_S:g} s and was killed")
        else:  # nobody waited for its samples any more when it died
            self._note_death(self._failure or f"the rollout worker {_exit_words(process.exitcode)}")

    def _make_sure_it_is_gone(self, process: BaseProcess) -> None:
        for end in (process.terminate, process.kill):
            if process.is_alive():
                end()
                self._ends_within(KILL_TIMEOUT_S)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._ended_fd not in (-1, process.sentinel):
            os.close(self._ended_fd)
        self._ended_fd = -1

    # -- RolloutBuffer --------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutGroup | DroppedGroup:
        """The next item. Raises ``queue.Empty`` in time, and ``WorkerError`` as soon as there is a reason."""
        now_s = time.monotonic()
        if now_s - self._waited_until_s > 1.0:
            self._moved_s = now_s  # the trainer was busy: it only begins to wait
        deadline_s = now_s + (0.0 if not block else timeout if timeout is not None else 86_400.0)
        try:
            while not self._items:
                remaining_s = deadline_s - time.monotonic()
                self._receive(min(max(0.0, remaining_s), self._stale_after_s))
                if self._items:
                    break
                self._raise_if_gone()
                self._raise_if_stalled()
                if self._closed or time.monotonic() >= deadline_s:
                    raise queue.Empty
        finally:
            self._waited_until_s = time.monotonic()
        item = self._items.popleft()
        if isinstance(item, RolloutGroup):
            self._send(Message("taken", None, self._recorder.last_id))
        return item

    # -- inside -----------------------------------------------------------------------------------------

    def _receive(self, timeout_s: float) -> None:
        """Waits for the worker's messages, or its end, and takes in what has come."""
        if self._socket is None or self._closed:
            return
        ready = wait([self._socket, self._ended_fd], max(0.0, timeout_s))
        if self._ended_fd in ready:
            while not self._closed and wait([self._socket], 0):
                self._read(self._socket)  # everything that it said before its end is here already
            self._closed = True
        elif ready:
            self._read(self._socket)

    def _ends_within(self, timeout_s: float) -> bool:
        """Not ``Process.join``: with a timeout, that waits for the sentinel."""
        return bool(wait([self._ended_fd], timeout_s))

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            self._closed = True
        for message in self._decoder.feed(data):
            self._take(message)

    def _take(self, message: Message) -> None:
        self._recorder.observe(message.cause)
        if message.kind == "item":
            self._items.append(message.body)
            self._moved_s = time.monotonic()
        elif message.kind == "beat":
            progress, self._blocked_by = message.body
            if progress > self._progress:
                self._progress = progress
                self._moved_s = time.monotonic()
        elif message.kind == "failed":
            self._failure = message.body
        elif message.kind == "stopped":
            self._said_stopped = True

    def _raise_if_gone(self) -> None:
        process = self._process
        if self._stopped or process is None or not (self._failure or self._closed):
            return
        self._note_death(self._failure or self._how_it_died(process))
        if self._failure:
            raise WorkerError(self._failure)
        raise WorkerDied(self._gone)

    def _note_death(self, words: str) -> None:
        if not self._gone:
            self._gone = words
            self._recorder.emit(MemberDied(member=self._spec.actor, detail=words[:500]))

    def _how_it_died(self, process: BaseProcess) -> str:
        self._ends_within(KILL_TIMEOUT_S)
        how = _exit_words(process.exitcode)
        if self._progress < 0 and process.exitcode == 1:
            return (
                f"the rollout worker (pid {process.pid}) {how} before it could say why; its last lines are "
                "on stderr. Its process imports the script that trains: that needs "
                "`if __name__ == '__main__':` around what it runs"
            )
        return (
            f"the rollout worker (pid {process.pid}) {how}. Its last lines are on stderr; "
            "what it had in flight is lost"
        )

    def _raise_if_stalled(self) -> None:
        still_s = time.monotonic() - self._moved_s
        if still_s > self._stale_after_s:
            raise WorkerStalled(
                f"the rollout worker has made no progress for {still_s:.1f} s "
                f"(heartbeat_stale_after_s={self._stale_after_s:g}); it waits for: "
                f"{self._blocked_by or 'completions'}. If the engine is healthy and merely slow, raise "
                "heartbeat_stale_after_s above the time of the longest completion"
            )

    def _send(self, message: Message) -> None:
        """Small messages to a worker that reads them all the time; one that is gone is noticed in ``get``."""
        if self._socket is None:
            return
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._socket.sendall(encode(message))


def _pack(spec: WorkerSpec) -> bytes:
    """The pickled spec. Raises ``ConfigError`` naming the part that cannot be pickled."""
    try:
        return pickle.dumps(spec)
    except Exception as error:
        raise _unpicklable(spec, error) from error


def _unpicklable(spec: WorkerSpec, error: Exception) -> ConfigError:
    where = "because the rollout worker's process needs it"
    for function in spec.reward_funcs:
        if not _pickles(function):
            name = getattr(function, "__qualname__", repr(function))
            fix = f"Define it at the top level of a module, not as a lambda or inside a function ({error})"
            return ConfigError("reward_funcs", name, f"something that can be pickled, {where}", fix)
    culprit = "train_dataset" if not _pickles(spec.dataset) else "processing_class"
    part = spec.dataset if culprit == "train_dataset" else spec.tokenizer
    return ConfigError(
        culprit, type(part).__name__, f"something that can be pickled, {where}", f"Pickle says: {error}"
    )


def _pickles(part: object) -> bool:
    try:
        pickle.dumps(part)
    except Exception:
        return False
    return True


def _exit_words(code: int | None) -> str:
    if code is None:
        return "closed its connection but has not ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
