"""Syncs against a real vLLM that are cut off at a chosen step: what the kill tests are made of.

Run as a program it is the trainer that kills itself: ``python vllm_syncs.py URL MODEL TERM STEP``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from grpo_lab.protocol.coordinator import SyncSettings
from grpo_lab.protocol.timeouts import Timeouts
from grpo_lab.recorders import ListRecorder
from grpo_lab.trainer.weight_transfer import CoordinatedSync, SyncWorld, TransferSettings, fixed_canary
from grpo_lab.transport.gloo import GlooTransport
from grpo_lab.transport.shared_memory import SharedMemoryTransport
from grpo_lab.transport.vllm_http import HttpTimeouts, VllmHttpEngine

LEASE_S = 3.0
BUCKET_BYTES = 1 << 18  # several buckets, so that one can be the middle one

# In the order of a sync; "transfer" is between two buckets.
STEPS = ("connect", "pause", "start", "transfer", "update", "finish", "probation", "resume")

Trip = Callable[[str], None]


class TrippingEngine(VllmHttpEngine):
    """Calls ``trip`` with the name of each step that is done, before the next one begins."""

    trip: Trip = staticmethod(lambda step: None)

    async def init_transfer(self, info, term):
        digest = await super().init_transfer(info, term)
        self.trip("connect")
        return digest

    async def pause(self, mode, clear_cache, term):
        await super().pause(mode, clear_cache, term)
        self.trip("pause")

    async def start_update(self, sync):
        await super().start_update(sync)
        self.trip("start")

    async def update(self, sync, info):
        await super().update(sync, info)
        self.trip("update")

    async def finish_update(self, sync):
        await super().finish_update(sync)
        self.trip("finish")

    async def score(self, sequences):
        self.trip("probation")  # it was resumed for this
        return await super().score(sequences)

    async def resume(self, term):
        await super().resume(term)
        self.resumes = getattr(self, "resumes", 0) + 1
        if self.resumes % 2 == 0:  # the first of each sync is the probation's
            self.trip("resume")


class TrippingTransport(SharedMemoryTransport):
    trip: Trip = staticmethod(lambda step: None)

    async def _dispatch(self, announce):
        await super()._dispatch(announce)
        if announce.bucket == 1:
            self.trip("transfer")


class Trainer:
    """A coordinator with the weights of a model directory, moved a little before every sync."""

    def __init__(self, url: str, model: Path, term: int, *trips: Trip) -> None:
        self.trips = list(trips)
        self.transport: type[TrippingTransport] = TrippingTransport
        self.kind = "shm"
        self.progress_timeout_s = 20.0
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.recorder = ListRecorder("trainer", time.monotonic)
        self.term = term
        self.moves = 100 * term  # other weights in every sync of every term
        recorder = self.recorder

        async def engines():
            engine = TrippingEngine("engine-0", url, recorder, HttpTimeouts(lease_s=LEASE_S))
            engine.trip = self.trip
            await engine.discover()
            return (engine,)

        def transport(settings, recorder):
            if self.kind == "gloo":
                return GlooTransport(recorder)
            made = self.transport(recorder, accept_timeout_s=30.0, progress_timeout_s=self.progress_timeout_s)
            made.trip = self.trip
            return made

        settings = TransferSettings(
            sync=SyncSettings(
                attempts=2,
                canary=fixed_canary(4, 16, self.model.config.vocab_size, 1e-3),
                timeouts=Timeouts(connect_s=5.0),  # a dead engine is not waited for
            ),
            bucket_bytes=BUCKET_BYTES,
        )
        self._sync = CoordinatedSync(
            engines, self.tensors, self.score, recorder, settings, SyncWorld(transport=transport, memory=None)
        )

    def trip(self, step: str) -> None:
        for each in self.trips:
            each(step)

    def tensors(self):
        return iter(self.model.named_parameters())

    @torch.no_grad()
    def move(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)

    @torch.no_grad()
    def score(self, sequences):
        rows = []
        for ids in sequences:
            logprobs = self.model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
            rows.append(logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
        return rows

    def connect(self) -> None:
        self._sync.connect(self.term, 0)

    def sync(self):
        self.moves += 1
        self.move(self.moves)
        return self.sync_as_it_is()

    def sync_as_it_is(self):
        return self._sync.sync(self.tensors, 0)

    def close(self) -> None:
        self._sync.close()


def main(url: str, model: str, term: str, step: str) -> None:
    """One whole sync, and then one that ends with this process at ``step``."""
    armed = False

    def trip(done: str) -> None:
        if armed and done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(url, Path(model), int(term), trip)
    armed = step == "connect"
    trainer.connect()
    outcome = trainer.sync()
    print("committed" if outcome.committed else "aborted", outcome.version, flush=True)  # noqa: T201
    armed = True
    outcome = trainer.sync()
    raise SystemExit(f"step {step} never came: {outcome}")


if __name__ == "__main__":
    main(*sys.argv[1:])
