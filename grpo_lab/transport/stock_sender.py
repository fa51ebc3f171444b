"""A trainer's end of a stock vLLM's wire, as a transport like the others: what arrives is taken on trust.

The wire has no manifest, no hashes and no slots. Buckets are unpacked into tensors here (host memory of the
model's size, once), which are broadcast in the plan's order when the last bucket has come. What an engine
made of them is for the canary to say.
"""

from __future__ import annotations

import mmap

import torch

from grpo_lab.packing import BucketPlan, Unpacker
from grpo_lab.ports import Recorder
from grpo_lab.transport.frames import Announce, Begin
from grpo_lab.transport.sender import RingTransport, Session
from grpo_lab.transport.stock import BACKEND, StockGlooSender, update_info
from grpo_lab.types import JsonDict, SyncId


class StockGlooTransport(RingTransport):
    """Sender to engines of a ``gloo_packed`` weight transfer; see ``RingTransport`` for its life.

    ``buffer_bytes`` is the size at which a buffer of the stream is closed, told to the engines as well. Every
    wait of the broadcast itself is bounded by ``progress_timeout_s``.
    """

    backend = BACKEND

    def __init__(
        self,
        recorder: Recorder,
        *,
        host: str = "127.0.0.1",
        slots: int = 2,
        buffer_bytes: int = 64 << 20,
        accept_timeout_s: float = 30.0,
        progress_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(
            recorder, slots=slots, accept_timeout_s=accept_timeout_s, progress_timeout_s=progress_timeout_s
        )
        self._host, self._buffer_bytes = host, buffer_bytes
        self._sender: StockGlooSender | None = None
        self._unpacker: Unpacker | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def init_info(self, member: str) -> JsonDict:
        """In vLLM's own form: the member's rank instead of its name, no plan, no token."""
        session = self._require_session()
        return self._required_sender().init_info(session.members.index(member))

    def update_info(self, sync: SyncId) -> JsonDict:
        self._require_session()
        return update_info(self._tensors)

    async def _allocate(self, session: Session) -> str:
        plan = BucketPlan.from_json(session.plan)
        self._unpacker = Unpacker(plan)
        self._tensors = {
            tensor.name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.wire_dtype))
            for tensor in plan.tensors
        }
        size = session.geometry.slot_bytes  # whole pages: what an anonymous mapping has
        self._ring = [memoryview(mmap.mmap(-1, size)) for _ in range(self.slots)]
        self._sender = StockGlooSender(
            host=self._host,
            engines=len(session.members),
            buffer_bytes=self._buffer_bytes,
            timeout_s=self.progress_timeout_s,
        )
        self._sender.open()
        return f"stock gloo store of {len(session.members)} engines"

    def _rendezvous(self, member: str) -> JsonDict:
        return {}

    async def _wait_joined(self, session: Session) -> None:
        await self._required_sender().accept()

    async def _begin(self, begin: Begin) -> None:
        """Nothing announces a send on this wire but the update's own call."""

    async def _dispatch(self, announce: Announce) -> None:
        session, unpacker = self._require_session(), self._unpacker
        assert unpacker is not None
        memory = self._ring[announce.slot][: announce.nbytes]
        unpacker.unpack(announce.bucket, memory, self._tensors)
        if announce.bucket == session.geometry.num_buckets - 1:
            await self._required_sender().send(list(self._tensors.values()))
        for member in session.members:
            session.board.release(member, announce.slot, announce.bucket)

    async def _release(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = self._unpacker = None
        self._tensors = {}

    def _required_sender(self) -> StockGlooSender:
        assert self._sender is not None, "open() makes it"
        return self._sender
