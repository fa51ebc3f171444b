"""The rollout worker as its own process, seen from the trainer."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import queue
import select
import signal
import socket
import time
from collections import deque
from multiprocessing.process import BaseProcess

from grpo_lab.errors import ConfigError, WorkerDied, WorkerError, WorkerStalled
from grpo_lab.events import MemberDied, MemberStarted, MemberStopped
from grpo_lab.ports import Recorder
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
        self._decoder = Decoder()
        self._items: deque[RolloutGroup | DroppedGroup] = deque()
        self._failure = ""
        self._stopped = False
        self._closed = False
        self._progress = -1
        self._blocked_by = "start-up"
        self._moved_s = 0.0  # when progress was last seen, or the trainer began to wait
        self._waited_until_s = 0.0
        self.rollout_buffer: RolloutBuffer = self

    # -- RolloutWorkerProtocol ------------------------------------------------------------------

    def start(self) -> None:
        """Spawns the process. Raises ``ConfigError`` when a reward function cannot be sent to it."""
        if self._process is not None:
            raise WorkerError("this rollout worker was started before; make a new one for a new run")
        _check_picklable(self._spec)
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=worker_main, args=(theirs, self._spec), name="grpo-lab-worker", daemon=True
        )
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(SEND_TIMEOUT_S)
        self._process, self._socket = process, ours
        self._moved_s = self._waited_until_s = time.monotonic()
        self._recorder.emit(MemberStarted(member=self._spec.actor, role="worker"))

    def update_model_version(self, version: int) -> None:
        self._send(Message("version", version, self._recorder.last_id))

    def stop(self) -> None:
        """Asks the worker to end, takes what it still has to say, and makes sure that it is gone."""
        process = self._process
        if process is None or self._stopped:
            return
        self._stopped = True
        self._send(Message("stop", None, self._recorder.last_id))
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while not self._closed and time.monotonic() < deadline_s:
            self._receive(deadline_s - time.monotonic())
        process.join(max(0.1, deadline_s - time.monotonic()))
        for end in (process.terminate, process.kill):
            if process.is_alive():
                end()
                process.join(KILL_TIMEOUT_S)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._recorder.emit(MemberStopped(member=self._spec.actor))

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
        """Waits for the worker's messages and takes in what has come. Its death closes the socket."""
        if self._socket is None or self._closed:
            return
        ready, _, _ = select.select([self._socket], [], [], max(0.0, timeout_s))
        if not ready:
            return
        try:
            data = self._socket.recv(1 << 20)
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

    def _raise_if_gone(self) -> None:
        if self._failure:
            raise WorkerError(self._failure)
        process = self._process
        if self._stopped or not self._closed or process is None:
            return
        process.join(KILL_TIMEOUT_S)
        how = _exit_words(process.exitcode)
        self._recorder.emit(MemberDied(member=self._spec.actor, detail=how))
        raise WorkerDied(
            f"the rollout worker (pid {process.pid}) {how}. Its last lines are on stderr; "
            "what it had in flight is lost"
        )

    def _raise_if_stalled(self) -> None:
        still_s = time.monotonic() - self._moved_s
        if still_s > self._stale_after_s:
            raise WorkerStalled(
                f"the rollout worker has made no progress for {still_s:.1f} s "
                f"(heartbeat_stale_after_s={self._stale_after_s:g}); it waits for: "
                f"{self._blocked_by or 'completions'}"
            )

    def _send(self, message: Message) -> None:
        """Small messages to a worker that reads them all the time; one that is gone is noticed in ``get``."""
        if self._socket is None:
            return
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._socket.sendall(encode(message))


def _check_picklable(spec: WorkerSpec) -> None:
    for function in spec.reward_funcs:
        try:
            pickle.dumps(function)
        except Exception as error:
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigError(
                "reward_funcs",
                name,
                "functions that can be pickled, because they run in the rollout worker's process",
                f"Define it at the top level of a module, not as a lambda or inside a function ({error})",
            ) from error


def _exit_words(code: int | None) -> str:
    if code is None:
        return "closed its connection but has not ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
