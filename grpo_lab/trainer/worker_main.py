"""What runs in the rollout worker's process: an asyncio loop around the protocol's worker."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.errors import GrpoLabError
from grpo_lab.events import GroupQueued
from grpo_lab.ports import Recorder
from grpo_lab.protocol.nursery import Nursery
from grpo_lab.protocol.rollout_worker import RolloutSettings, RolloutWorker
from grpo_lab.recorders import FileRecorder, NullRecorder, run_clock
from grpo_lab.trainer.dataset import PromptSequence, RewardFunctions
from grpo_lab.trainer.worker_channel import Message, encode, read_messages
from grpo_lab.transport.engines import connect_some
from grpo_lab.types import CursorState, DroppedGroup, RolloutGroup

LAST_WORDS_TIMEOUT_S = 600.0  # a trainer in a long step reads them after it; one that is gone ends the wait

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything the worker needs, sent to it once. ``started_s`` is the run's start on this host's clock,
    ``cause`` the trainer's newest event before the worker's first, ``fenced`` names engines out of service.
    """

    term: int
    version: int
    cursor: CursorState
    engine_urls: tuple[str, ...]
    settings: RolloutSettings
    queue_capacity: int
    dataset: Any
    reward_funcs: tuple[Callable[..., Any], ...]
    reward_weights: tuple[float, ...] | None
    reward_timeout_s: float
    tokenizer: Any
    chat_template_kwargs: Mapping[str, Any] | None
    max_prompt_tokens: int | None
    prompt_seed: int
    events_dir: str | None
    started_s: float
    engine_wait_s: float
    fenced: tuple[str, ...] = ()
    actor: str = "worker"
    cause: str = ""


def worker_main(end: socket.socket, packed_spec: bytes) -> None:
    """Entry of the process; ``packed_spec`` is a pickled ``WorkerSpec``.

    It is unpacked here, so that what fails in it (a reward function's module that cannot be imported)
    reaches the trainer in its own words. Exit code 0 after a stop, 3 after a failure that was reported.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what Ctrl-C means
    try:
        spec: WorkerSpec = pickle.loads(packed_spec)  # noqa: S301 - from the trainer that started us
        recorder = _make_recorder(spec)
        recorder.observe(spec.cause)
    except Exception as error:
        words = f"the rollout worker could not start: {type(error).__name__}: {error}"
        end.sendall(encode(Message("failed", words)))
        raise
    code = _run(end, spec, recorder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a reward function may still run in its thread, and sys.exit would wait for it


def _make_recorder(spec: WorkerSpec) -> FileRecorder | NullRecorder:
    if spec.events_dir is None:
        return NullRecorder(spec.actor)
    return FileRecorder(spec.actor, Path(spec.events_dir), run_clock(spec.started_s))


def _run(end: socket.socket, spec: WorkerSpec, recorder: Recorder) -> int:
    try:
        return asyncio.new_event_loop().run_until_complete(_main(end, spec, recorder))
    except Exception:
        traceback.print_exc()
        return 1


async def _main(end: socket.socket, spec: WorkerSpec, recorder: Recorder) -> int:
    reader, writer = await asyncio.open_connection(sock=end)
    send = _Sender(writer, recorder)
    try:
        await _serve(reader, send, spec, recorder)
        send("stopped")
        return 0
    except GrpoLabError as error:
        send("failed", f"{type(error).__name__}: {error}")
        return error.exit_code
    except Exception as error:  # whatever it is, the trainer must hear of it
        send("failed", f"the rollout worker failed: {type(error).__name__}: {error}")
        raise
    finally:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_TIMEOUT_S):
                writer.close()
                await writer.wait_closed()


async def _serve(reader: asyncio.StreamReader, send: _Sender, spec: WorkerSpec, recorder: Recorder) -> None:
    engines = await connect_some(spec.engine_urls, recorder, spec.engine_wait_s, spec.fenced)
    sample_queue = ChannelQueue(spec.queue_capacity, send, recorder)
    rewards = RewardFunctions(
        spec.reward_funcs, spec.tokenizer, weights=spec.reward_weights, timeout_s=spec.reward_timeout_s
    )
    worker = RolloutWorker(
        engines,
        PromptSequence(
            spec.dataset,
            spec.tokenizer,
            spec.prompt_seed,
            spec.cursor,
            spec.chat_template_kwargs,
            spec.max_prompt_tokens,
        ),
        rewards,
        sample_queue,
        recorder,
        spec.settings,
        term=spec.term,
        version=spec.version,
        heartbeat=lambda progress, blocked_by: send("beat", (progress, blocked_by)),
        texts=rewards.texts,
    )
    worker.fence_engines(spec.fenced)
    try:
        async with Nursery("worker process", timeout_s=float("inf")) as nursery:
            listening = nursery.start(_listen(reader, worker, sample_queue, recorder), name="listen")
            await worker.run()
            listening.cancel()
    finally:
        for engine in engines:
            await engine.close()


async def _listen(
    reader: asyncio.StreamReader, worker: RolloutWorker, sample_queue: ChannelQueue, recorder: Recorder
) -> None:
    """The trainer's wishes. A trainer that is gone needs no more samples."""
    while messages := await read_messages(reader):
        for message in messages:
            recorder.observe(message.cause)
            if message.kind == "version":
                worker.update_model_version(message.body)
            elif message.kind == "fenced":
                worker.fence_engines(message.body)
            elif message.kind == "taken":
                sample_queue.taken()
            elif message.kind == "stop":
                worker.stop()
    worker.stop()


class _Sender:
    """Writes messages; the stream's own buffer takes what the trainer does not read yet."""

    def __init__(self, writer: asyncio.StreamWriter, recorder: Recorder) -> None:
        self._writer = writer
        self._recorder = recorder

    def __call__(self, kind: Any, body: Any = None) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(Message(kind, body, self._recorder.last_id)))


class ChannelQueue:
    """Port ``SampleQueue``: a group waits here until the trainer has taken enough of those before it."""

    def __init__(self, capacity: int, send: Callable[..., None], recorder: Recorder) -> None:
        self._capacity = capacity
        self._send = send
        self._recorder = recorder
        self._depth = 0
        self._room = asyncio.Event()

    @property
    def capacity(self) -> int:
        return self._capacity

    async def put(self, item: RolloutGroup | DroppedGroup) -> None:
        if isinstance(item, RolloutGroup):
            while self._depth >= self._capacity:
                self._room.clear()
                await self._room.wait()
            self._depth += 1
            self._recorder.emit(
                GroupQueued(term=item.term, group=item.group_id, number=item.number, depth=self._depth)
            )
        self._send("item", item)

    def taken(self) -> None:
        self._depth -= 1
        self._room.set()


def die_with_parent() -> None:
    """Linux: SIGKILL this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
