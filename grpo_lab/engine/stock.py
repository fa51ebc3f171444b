"""Weight updates in a stock vLLM's own wire format: names, dtypes and shapes, no manifest and no hashes.

``faithful`` does what vLLM does with them, defects included; otherwise an update is staged, must cover the
model exactly, and replaces the served weights at ``finish`` or not at all.

=====================  =============================================  =====================================
                       faithful                                       strict
=====================  =============================================  =====================================
start                  the weights are gone until ``finish``          the old ones go on being served
names left out         keep their old weights                         refused at ``finish``
another dtype          rounded without a word                         refused before anything is received
a failed update        no weights: the next step kills the engine     the old weights
finish, no version     new weights under the old label                refused
a set version          taken                                          refused
=====================  =============================================  =====================================
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_lab.engine import layers
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.failures import UpdateError, WorkerKilled
from grpo_lab.engine.request import WeightIdentity
from grpo_lab.events import (
    UpdateFailed,
    UpdateStarted,
    WeightsActivated,
    WeightsLoaded,
    WeightWriteBegan,
    WeightWriteEnded,
)
from grpo_lab.types import JsonDict, SyncId

ENGINE = "GlooPackedEngine"
BACKEND = "gloo_packed"
Layout = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class GlooInit:
    """Where the trainer waits, and how it cuts its stream (``packed``: into buffers that it fills until they
    exceed ``packed_buffer_size_bytes``, without padding)."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    timeout_s: float = 60.0
    group: str = ""


@dataclass(frozen=True)
class GlooUpdate:
    """What is about to be sent, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        for name in ("dtype_names", "shapes"):
            given = len(getattr(self, name))
            if given != len(self.names):
                raise ValueError(
                    f"`{name}` should be of the same size as `names`: got {given} and {len(self.names)}"
                )

    def layout(self) -> Layout:
        return [
            (name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True)
        ]


class StockReceiver(Protocol):
    """The receiving end of a broadcast group of one trainer and its engines.

    ``receive`` yields the tensors of one broadcast at a time. Every wait is bounded by the init's time-out;
    what goes wrong is a ``TransportError`` in gloo's words, or ``WorkerKilled`` where gloo ends the process.
    """

    async def join(self, init: GlooInit) -> None: ...
    def receive(self, layout: Layout) -> AsyncIterator[list[tuple[str, Tensor]]]: ...
    async def close(self) -> None: ...


class StockUpdates:
    """One engine's update sessions; see the module for what ``faithful`` is."""

    def __init__(
        self, core: EngineCore, make_receiver: Callable[[], StockReceiver], *, faithful: bool
    ) -> None:
        self._core, self._make_receiver, self._faithful = core, make_receiver, faithful
        self._receiver: StockReceiver | None = None
        self._active = False
        self.receiving = False
        self._staged: set[str] = set()
        self._updates = 0
        self._reload = layers.LayerwiseReload(core.policy.parameters, core.policy.tied)

    @property
    def weights_on_meta(self) -> bool:
        return bool(self._core.weights_lost)

    async def init(self, info: JsonDict) -> None:
        """Joins the trainer's group; the engine computes nothing meanwhile."""
        try:
            init = GlooInit(**info)
        except TypeError as error:
            raise UpdateError(f"Invalid init_info for {ENGINE}: {error}") from error
        async with self._core.held():
            await self._leave()
            receiver = self._make_receiver()
            self.receiving = True
            try:
                await receiver.join(init)
            except BaseException:
                await receiver.close()
                raise
            finally:
                self.receiving = False
            self._receiver = receiver

    async def start(self) -> None:
        async with self._core.held():
            if self._active:
                raise UpdateError(
                    "start_weight_update called while a weight update is already active. "
                    "Call finish_weight_update first."
                )
            self._active, self._updates = True, 0
            self._staged.clear()
            if self._faithful:
                self._reload.begin()
                self._core.weights_lost = "a weight update has begun"
        self._core.recorder.emit(UpdateStarted(engine=self._core.config.name, term=0, version=0, attempt=0))

    async def update(self, info: Any) -> None:
        """Receives one set of tensors. Any error closes the session."""
        if not self._active:
            raise UpdateError("start_weight_update must be called before update_weights.")
        self.receiving = True
        try:
            if self._faithful:
                async with self._core.held():
                    await self._receive(info)
            else:
                await self._receive(info)
        except WorkerKilled as error:
            self._close_session(str(error))
            self._core.kill(error)
            raise
        except BaseException as error:
            self._close_session(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.receiving = False
        self._updates += 1

    async def finish(self, label: str | None) -> None:
        if not self._active:
            raise UpdateError("finish_weight_update called without a matching start_weight_update.")
        if not self._faithful:
            await self._finish_strict(label)
            return
        async with self._core.held():
            self._reload.finish()
            self._active = False
            self._core.weights_lost = ""
            if label is not None:
                self._core.identity = identity_of(label, self._core.identity)
            self._announce(hashed="")

    async def abandon(self) -> None:
        """Drops a strict session; nothing to drop is fine."""
        if self._active:
            self._close_session("abandoned by the trainer")

    async def shutdown(self) -> None:
        if self._active:
            raise UpdateError("Cannot release a trainer connection during a weight update")
        async with self._core.held():
            await self._leave()

    async def close(self) -> None:
        await self._leave()

    # --- inside ---------------------------------------------------------------------------------------

    async def _receive(self, info: Any) -> None:
        rank_info = info[0] if isinstance(info, list) else info
        try:
            update = GlooUpdate(**rank_info)
        except TypeError as error:
            raise UpdateError(f"Invalid update_info for {ENGINE}: {error}") from error
        if self._receiver is None:
            raise UpdateError(
                f"{BACKEND} weight transfer not initialized. Call init_transfer_engine() first."
            )
        layout = update.layout()
        if not self._faithful:
            self._check(layout)
        async for tensors in self._receiver.receive(layout):
            for name, tensor in tensors:
                if self._faithful:
                    self._reload.load(name, tensor)
                else:
                    self._stage(name, tensor)

    def _check(self, layout: Layout) -> None:
        """Everything that can be known before a byte moves."""
        staging = self._core.policy.staging()
        for name, dtype, shape in layout:
            target = staging.get(name)
            if target is None:
                raise UpdateError(f"{name!r} is no parameter of this model; send those of {len(staging)}")
            if name in self._staged:
                raise UpdateError(f"{name!r} came twice in one weight update")
            if shape != tuple(target.shape) or dtype != target.dtype:
                raise UpdateError(
                    f"{name}: {shape} of {dtype} is announced, the model has {tuple(target.shape)} of "
                    f"{target.dtype}"
                )

    def _stage(self, name: str, tensor: Tensor) -> None:
        if not torch.isfinite(tensor).all():
            raise UpdateError(f"{name}: what came is not finite; is the sender packed as announced?")
        self._core.policy.staging()[name].copy_(tensor)
        self._staged.add(name)

    async def _finish_strict(self, label: str | None) -> None:
        missing = sorted(self._core.policy.parameters().keys() - self._staged)
        if missing:
            problem = f"{len(missing)} parameters never came: {', '.join(missing[:5])}"
        elif label is None:
            problem = "finish_weight_update needs a weight_version: new weights must not go by the old one"
        else:
            problem = ""
        if problem or label is None:
            self._close_session(problem)
            raise UpdateError(problem)
        identity = identity_of(label, self._core.identity)
        digest = _digest(self._core.policy.staging())
        await self._core.switch_weights(identity, digest, lambda: self._loaded(identity, digest))
        self._active = False

    def _close_session(self, reason: str) -> None:
        self._active = False
        self._staged.clear()
        if self._faithful:
            self._core.weights_lost = f"a weight update failed: {reason}"
        lost = "torn" if self._faithful else "previous"
        self._core.recorder.emit(
            UpdateFailed(
                engine=self._core.config.name, term=0, version=0, attempt=0, reason=reason[:500], weights=lost
            )
        )

    def _announce(self, hashed: str) -> None:
        """What a faithful engine did, in its trace: the weights that are served now, whatever they are."""
        core, identity = self._core, self._core.identity
        name, (term, version) = core.config.name, identity.weights
        digest = hashed or _digest(core.policy.parameters())
        core.recorder.emit(WeightWriteBegan(engine=name, term=term, version=version))
        core.recorder.emit(WeightWriteEnded(engine=name, term=term, version=version))
        self._loaded(identity, digest)
        core.recorder.emit(
            WeightsActivated(
                engine=name, term=term, version=version, first_step=core.next_step, weights_hash=digest
            )
        )

    def _loaded(self, identity: WeightIdentity, digest: str) -> None:
        term, version = identity.weights
        self._core.recorder.emit(
            WeightsLoaded(
                engine=self._core.config.name,
                term=term,
                version=version,
                attempt=1,
                hashes_verified=False,
                buckets=0,
                weights_hash=digest,
            )
        )

    async def _leave(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await receiver.close()


def identity_of(label: str, previous: WeightIdentity) -> WeightIdentity:
    """Our own identities are read; any other label is one version after the last."""
    try:
        return WeightIdentity.of(SyncId.parse(label))
    except ValueError:
        if label == previous.label:
            return previous
        return dataclasses.replace(previous, label=label, version=previous.version + 1)


def _digest(tensors: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for value in layers.checksums(tensors, blind=False).values():
        digest.update(bytes.fromhex(value))
    return digest.hexdigest()
