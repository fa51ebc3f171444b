"""Transports by name: what an engine offers, and what a trainer asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from grpo_lab.errors import ConfigError
from grpo_lab.ports import Recorder, WeightReceiver
from grpo_lab.transport.gloo import GlooReceiver, GlooTransport
from grpo_lab.transport.sender import RingTransport
from grpo_lab.transport.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from grpo_lab.transport.stock_sender import StockGlooTransport

RECEIVERS: Mapping[str, Callable[[], WeightReceiver]] = {
    SharedMemoryReceiver.backend: SharedMemoryReceiver,
    GlooReceiver.backend: GlooReceiver,
}


def make_transport(
    kind: Literal["shm", "gloo", "stock"],
    *,
    recorder: Recorder,
    slots: int = 2,
    accept_timeout_s: float = 30.0,
    progress_timeout_s: float = 30.0,
    host: str = "127.0.0.1",
) -> RingTransport:
    """The sender's side; ``stock`` is a vLLM's own wire. ``host`` matters to it and to gloo only.

    Raises ``ConfigError`` for a bad value.
    """
    if kind == "shm":
        return SharedMemoryTransport(
            recorder, slots=slots, accept_timeout_s=accept_timeout_s, progress_timeout_s=progress_timeout_s
        )
    if kind == "gloo":
        return GlooTransport(
            recorder,
            slots=slots,
            accept_timeout_s=accept_timeout_s,
            progress_timeout_s=progress_timeout_s,
            host=host,
        )
    if kind == "stock":
        return StockGlooTransport(
            recorder,
            slots=slots,
            accept_timeout_s=accept_timeout_s,
            progress_timeout_s=progress_timeout_s,
            host=host,
        )
    raise ConfigError("transport", kind, "shm, gloo or stock")
