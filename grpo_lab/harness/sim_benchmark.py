"""How fast whole clusters run in virtual time: workloads, cases, and one measured row a case.

A case is a whole run of ``sim.world``: engines, rollout worker, coordinator with its weight syncs, and the
light trainer. Nothing is left out, but the checker may be (a row says so).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_lab.events import ModelStep, Record, RequestFinished
from grpo_lab.sim.scenario import EngineMode, Scenario
from grpo_lab.sim.world import simulate

GENERATIONS = 8
SLOTS = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of completions: log-normal with this mean, sigma 0.8, cut at four times the mean.

    A step of a full engine (64 slots) takes about 35 ms with ``long`` completions and 25 ms with ``short``
    ones: 15 ms, 0.15 ms a sequence, 30 us a prompt token, 20 ns a context token, 10 % of jitter.
    """

    name: str
    mean_tokens: int

    def scenario(self, engines: int, slots: int, mode: EngineMode, steps: int) -> Scenario:
        """A batch is as many samples as the cluster has slots; three batches are in flight or wait."""
        places = engines * slots
        groups = max(1, places // GENERATIONS)
        blocks_per_slot = (2 * self.mean_tokens + 256) // 16
        return Scenario(
            engines=engines,
            slots=slots,
            prompts_per_step=groups,
            generations=GENERATIONS,
            max_inflight=3 * groups * GENERATIONS,
            queue_capacity=4 * groups,
            max_staleness=4,
            lengths="lognormal",
            mean_tokens=self.mean_tokens,
            max_tokens=4 * self.mean_tokens,
            prompt_tokens=256,
            kv_blocks=max(slots, 4) * blocks_per_slot,
            cache_outputs=False,
            batch_tokens=2048,
            token_s=0.015,
            context_token_s=2e-8,
            step_jitter=0.1,
            step_s=self.mean_tokens * 0.03 / 4,
            engine_mode=mode,
            checkpoint_every_steps=0,
            steps=steps,
        )


LONG, MEDIUM, SHORT = Workload("long", 8192), Workload("medium", 2048), Workload("short", 512)


@dataclass(frozen=True, slots=True)
class Case:
    workload: Workload
    engines: int
    slots: int
    mode: EngineMode
    steps: int
    checked: bool = False


@dataclass(frozen=True, slots=True)
class SimRow:
    """One measured run.

    Attributes:
        wall_s: with whatever else this machine did; cpu_s: of this process alone.
        tokens: generated; samples: finished or aborted requests; events: records of the trace.
        model_steps: of all engines; loop_callbacks: of the virtual event loop.
        sequences: mean number in a model step.
    """

    workload: str
    mean_tokens: int
    engines: int
    slots: int
    mode: EngineMode
    checker: bool
    optimizer_steps: int
    weight_syncs: int
    virtual_s: float
    wall_s: float
    cpu_s: float
    tokens: int
    samples: int
    events: int
    model_steps: int
    loop_callbacks: int
    sequences: float

    @property
    def speed(self) -> float:
        """Virtual seconds a wall second."""
        return self.virtual_s / self.wall_s

    @property
    def cpu_speed(self) -> float:
        """Virtual seconds a second of one core: what a machine with nothing else to do shows."""
        return self.virtual_s / self.cpu_s

    @property
    def token_ns(self) -> float:
        """Nanoseconds of one core a generated token."""
        return self.cpu_s / self.tokens * 1e9


def cases(quick: bool) -> Iterator[Case]:
    """Cluster sizes in event mode; batch sizes; the two modes beside each other; the checker on."""
    for engines in (1, 4, 16) if quick else (1, 4, 16, 64, 256):
        yield Case(LONG, engines, SLOTS, "event", 1 if engines > SLOTS else 3)
    yield Case(LONG, 16, SLOTS, "event", 3, checked=True)
    yield Case(MEDIUM, 16, SLOTS, "event", 3)
    yield Case(SHORT, 16, SLOTS, "event", 3)
    for slots in (8, 16) if quick else (8, 16, 32, 128):
        yield Case(LONG, 1, slots, "event", 3)
        yield Case(SHORT, 1, slots, "event", 3)
    for slots in (8, SLOTS) if quick else (8, 16, SLOTS):
        yield Case(SHORT, 1, slots, "step", 3)
    yield Case(SHORT, 1, SLOTS, "event", 3)


def measure(case: Case) -> SimRow:
    """Runs the case. Raises ``InvariantViolation`` when a checked run breaks a rule."""
    scenario = case.workload.scenario(case.engines, case.slots, case.mode, case.steps)
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = simulate(scenario, checked=case.checked)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    steps, sequences, samples = _counted(result.records)
    return SimRow(
        workload=case.workload.name,
        mean_tokens=case.workload.mean_tokens,
        engines=case.engines,
        slots=case.slots,
        mode=case.mode,
        checker=case.checked,
        optimizer_steps=result.value.optimizer_steps,
        weight_syncs=result.value.version,
        virtual_s=result.virtual_s,
        wall_s=wall_s,
        cpu_s=cpu_s,
        tokens=result.value.measures.tokens,
        samples=samples,
        events=len(result.records),
        model_steps=steps,
        loop_callbacks=result.callbacks,
        sequences=sequences / steps,
    )


def _counted(records: tuple[Record, ...]) -> tuple[int, int, int]:
    """Model steps, their sequences together, and requests that ended."""
    steps = sequences = samples = 0
    for record in records:
        event = record.event
        if isinstance(event, ModelStep):
            count = event.last_step - event.first_step + 1
            steps, sequences = steps + count, sequences + count * event.sequences
        elif isinstance(event, RequestFinished):
            samples += 1
    return steps, sequences, samples
