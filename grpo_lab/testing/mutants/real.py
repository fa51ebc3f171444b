"""Mutants in the real world: real processes and seconds, shared memory and gloo; caught from the trace."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from grpo_lab.check import Checker, read_parts
from grpo_lab.engine.failures import UpdateError
from grpo_lab.engine.rl_state import RlState
from grpo_lab.events import Record
from grpo_lab.protocol.rollout_worker import RolloutWorker
from grpo_lab.sim.scenario import Failure
from grpo_lab.testing.mutants import planting
from grpo_lab.testing.mutants.coordinator import ForgetsToResume
from grpo_lab.testing.mutants.engine import AcknowledgesAtOnce
from grpo_lab.testing.mutants.landing import NothingMoved
from grpo_lab.testing.mutants.mutant import Finding, Mutant, Only
from grpo_lab.testing.mutants.packer import WaitsForNoSlot
from grpo_lab.testing.mutants.trainer import LastSampleLeftOut, Prefetches
from grpo_lab.testing.mutants.worker import StampedAtCompletion
from grpo_lab.trainer.term import TrainingTerm
from grpo_lab.trainer.trainer import AsyncGRPOTrainer
from grpo_lab.transport.gloo import GlooTransport
from grpo_lab.transport.shared_memory import SharedMemoryTransport
from grpo_lab.types import SyncId

BOUND_S = 240.0  # of a machine that does much else; on a quiet one a run takes ten seconds

ENGINE_UPDATES = ("engine", "grpo_lab.engine.updates:RlState")
ENGINE_CORE = ("engine", "grpo_lab.cli.serving:EngineCore")
WORKER = ("worker", "grpo_lab.trainer.worker_main:RolloutWorker")
TERM = ("trainer", "grpo_lab.trainer.trainer:TrainingTerm")
TRAINER = ("trainer", "grpo_lab.harness.training:AsyncGRPOTrainer")
COORDINATOR = ("trainer", "grpo_lab.trainer.weight_transfer:Coordinator")
SHARED_MEMORY = ("trainer", "grpo_lab.transport.receivers:SharedMemoryTransport")
GLOO = ("trainer", "grpo_lab.transport.receivers:GlooTransport")

Parts = dict[tuple[str, str], type]


class SeedsAsCases:
    """The part of a fixture whose case is the seed of a run: nothing in it can be made smaller or be kept."""

    def size(self, case: int) -> tuple[int, ...]:
        return (case,)

    def smaller(self, case: int, fails: Callable[[int], bool]) -> int:
        return case

    def saved(self, case: int, finding: Finding, protocol: str) -> Failure | None:
        return None


@dataclass(frozen=True)
class RealRuns(SeedsAsCases):
    """One small run a case. ``recipe`` are fields of a recipe; ``environment`` is there with and without a
    mutant.
    """

    name: str
    recipe: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[tuple[str, str], type], ...] = ()
    repeats: bool = False

    def cases(self) -> st.SearchStrategy[int]:
        """Seeds."""
        return st.integers(0, 3)

    def run(self, case: int, plant: Any, only: Only, passed_over: Callable[[str], None]) -> Finding | None:
        parts: Parts = {**dict(self.environment), **(plant or {})}
        plants = [(*place, f"{part.__module__}:{part.__qualname__}") for place, part in parts.items()]
        with tempfile.TemporaryDirectory(prefix="grpo-lab-mutant-") as out:
            recipe = {**dict(self.recipe), "seed": case, "out": out, "model": str(untrained_model(out))}
            said = _run(plants, recipe)
            events = Path(out, "latest", "events")
            if not events.is_dir():
                raise RuntimeError(f"a real run wrote no trace:\n{said}")
            records = list(read_parts(events))
        return judged(records, only, passed_over)


def judged(records: list[Record], only: Only, passed_over: Callable[[str], None]) -> Finding | None:
    """The first violation, in the order of the trace, with the trace up to there; all others are told of."""
    checker = Checker()
    violations = [(place, item) for place, record in enumerate(records, 1) for item in checker.feed(record)]
    told = {id(item) for _, item in violations}
    at_the_end = [item for rule in checker.finish().rules for item in rule.violations if id(item) not in told]
    found: Finding | None = None
    for place, item in [*violations, *((len(records), item) for item in at_the_end)]:
        if found is None and (only is None or item.rule in only):
            found = Finding(item.rule, item.message, item.event_ids, records[:place])
        else:
            passed_over(item.rule)
    return found


def _run(plants: planting.Plants, recipe: dict[str, Any]) -> str:
    """Ends within ``BOUND_S``, with everything that it started."""
    command = [sys.executable, "-m", planting.ENTRY, "trainer", json.dumps(plants), json.dumps(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(  # noqa: S603 - our own entry
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            said, _ = process.communicate(timeout=BOUND_S)
        except subprocess.TimeoutExpired:  # also that is an outcome: the trace says what it waits for
            said = f"no end within {BOUND_S:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return said[-4000:]


def untrained_model(out: str) -> Path:
    """An untrained model: these runs are not about learning."""
    from grpo_lab.tasks import get_task  # noqa: PLC0415
    from grpo_lab.tasks.tiny_model import TinyModelSpec, build_model, no_progress_bars  # noqa: PLC0415

    path = Path(out, "model")
    network, tokenizer = build_model(TinyModelSpec(num_layers=1, hidden_size=32), get_task("sort_digits"), 0)
    with no_progress_bars():
        network.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


# --- what is planted beside the parts of the simulated mutants ---------------------------------------------


class SlotTooEarlyInMemory(WaitsForNoSlot, SharedMemoryTransport):
    """A ring slot in shared memory is packed again before its readers have ended.

    Field: vllm-ascend#12713: one event for two slots.
    Planted: the sender does not wait for a slot.
    Exposed by: more buckets than slots. S10.
    """


class SlotTooEarlyOverGloo(WaitsForNoSlot, GlooTransport):
    """A buffer of gloo's ring is packed again before it has been sent.

    Field: vllm-ascend#12713: one event for two slots.
    Planted: the sender does not wait for a slot.
    Exposed by: more buckets than slots. S10.
    """


class SendsWhatItWas(AsyncGRPOTrainer):
    """What is trained is not what is sent.

    Field: verl#7495: the adapter is trained and the base model is sent; the policy stays where it was.
    Planted: every tensor that is sent is a copy from before training.
    Exposed by: any second version. D5.
    """

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if "before" not in self.__dict__:
            self.before = copies_of(super().named_tensors())
        return iter(self.before)


def copies_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """What is tied stays so: the engine would refuse another plan."""
    copies: dict[int, torch.Tensor] = {}
    return [(name, copies.setdefault(tensor.data_ptr(), tensor.clone())) for name, tensor in tensors]


class StampsAtCompletion(RolloutWorker):
    """The version is stamped when the sample is complete.

    Field: rllm#622: a sample that began under v and ended under v+1 counts as fresh.
    Planted: one span, of the newest version that the worker knows at completion.
    Exposed by: an update during generation. S4.
    """

    requester_type = StampedAtCompletion


class LastSampleIsLeftOut(TrainingTerm):
    """The last sample of a group is left out.

    Own case: a batch that is cut to a multiple of its micro-batches.
    Planted: groups lose their last sample when a step is formed.
    Exposed by: any step. S21.
    """

    buffer_type = LastSampleLeftOut


class RefusesTheSecond(RlState):
    """Environment: an engine that cannot load the second version."""

    async def finish(self, label: str | None, sync: SyncId | None = None, term: int = 0) -> None:
        if sync is not None and sync.version == 2:
            await self._drop("out of memory")
            raise UpdateError("CUDA out of memory: injected")
        await super().finish(label, sync, term)


SMALL: dict[str, Any] = {
    "reward": f"{planting.ENTRY}:distinct_characters",
    "steps": 2,
    "prompts_per_step": 2,
    "num_generations": 2,
    "heldout_prompts": 0,
    "bucket_bytes": 4096,
    "max_inflight": 16,
    "queue_capacity": 8,
    "ramp_steps": 0,
    "max_completion_length": 16,
}


def _runs(name: str, environment: Parts | None = None, **recipe: Any) -> RealRuns:
    fields = {**SMALL, **recipe}
    return RealRuns(name, tuple(fields.items()), tuple((environment or {}).items()))


IN_MEMORY = _runs("real, shared memory")
OVER_GLOO = _runs("real, gloo", transport="gloo")
FREE = _runs(
    "real, free admission", staleness_policy="drop", max_staleness=0, steps=4, max_completion_length=64
)
REFUSED = _runs("real, a refused update", {ENGINE_UPDATES: RefusesTheSecond}, sync_attempts=1)

REAL_MUTANTS = (
    Mutant("M13-shm", ("S9",), IN_MEMORY, NothingMoved, {ENGINE_UPDATES: NothingMoved}),
    Mutant("M13-gloo", ("S9",), OVER_GLOO, NothingMoved, {ENGINE_UPDATES: NothingMoved}),
    Mutant("M14-real", ("D5",), IN_MEMORY, SendsWhatItWas, {TRAINER: SendsWhatItWas}),
    Mutant("M16-shm", ("S10",), IN_MEMORY, SlotTooEarlyInMemory, {SHARED_MEMORY: SlotTooEarlyInMemory}),
    Mutant("M16-gloo", ("S10",), OVER_GLOO, SlotTooEarlyOverGloo, {GLOO: SlotTooEarlyOverGloo}),
    Mutant("M23-real", ("S4",), FREE, StampsAtCompletion, {WORKER: StampsAtCompletion}),
    Mutant("M28-real", ("S32", "L2"), REFUSED, ForgetsToResume, {COORDINATOR: ForgetsToResume}),
    Mutant("M34-real", ("S18",), FREE, Prefetches, {TERM: Prefetches}),
    Mutant("M40-real", ("S7", "S16"), FREE, AcknowledgesAtOnce, {ENGINE_CORE: AcknowledgesAtOnce}),
    Mutant("M60-real", ("S21",), IN_MEMORY, LastSampleIsLeftOut, {TERM: LastSampleIsLeftOut}),
)
