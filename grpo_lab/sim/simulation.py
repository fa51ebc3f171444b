"""Runs one simulation from a seed and a tape, and proves that a second run is the same.

>>> import asyncio
>>> from grpo_lab.events import Reached
>>> async def main(context: SimContext) -> float:
...     await asyncio.sleep(60)
...     context.recorder("trainer").emit(Reached(mark="a minute"))
...     return context.now_s
>>> result = run_simulation(main)
>>> result.value, result.virtual_s, len(result.records)
(60.0, 60.0, 1)
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from grpo_lab.errors import Nondeterminism
from grpo_lab.events import Record
from grpo_lab.recorders import ListRecorder
from grpo_lab.sim.confinement import confined
from grpo_lab.sim.loop import MAX_CALLBACKS, MAX_VIRTUAL_S, VirtualLoop
from grpo_lab.sim.tape import Tape, fifo

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SimContext:
    """What a simulation's main coroutine is given.

    ``records`` is the whole trace, in the order of emission, shared by all recorders.
    """

    loop: VirtualLoop
    seed: int
    records: list[Record]

    @property
    def now_s(self) -> float:
        return self.loop.time()

    def recorder(self, actor: str) -> ListRecorder:
        """A recorder for ``actor`` that writes into ``records`` with the virtual clock. One per actor."""
        return ListRecorder(actor, self.loop.time, self.records)

    def random(self, name: str) -> random.Random:
        """A source of its own for ``name``: what others draw does not change what it gives."""
        return random.Random(f"{self.seed} {name}")


@dataclass(frozen=True, slots=True)
class SimResult(Generic[T]):
    """``tape`` is the schedule as it was taken; ``leftover_tasks`` had to be cancelled at the end."""

    value: T
    records: tuple[Record, ...]
    digest: str
    virtual_s: float
    callbacks: int
    tape: Tape
    leftover_tasks: tuple[str, ...] = ()


def run_simulation(
    main: Callable[[SimContext], Coroutine[Any, Any, T]],
    tape: Tape | None = None,
    seed: int = 0,
    *,
    max_virtual_s: float = MAX_VIRTUAL_S,
    max_callbacks: int = MAX_CALLBACKS,
    records: list[Record] | None = None,
    with_digest: bool = True,
) -> SimResult[T]:
    """Runs ``main`` in virtual time until it returns, then cancels what it left behind.

    ``records`` may be given to see the trace of a run that raised; events of its clean-up are not kept.
    ``with_digest=False`` leaves the digest empty: it takes as long as half of a fast run.

    Raises whatever ``main`` raised, ``Deadlock``, ``EscapedSimulation``, ``SimulationBoundExceeded``, or
    the first exception of a task that nobody awaited. Other failures are notes on it.
    """
    tape = fifo() if tape is None else tape
    tape.rewind()
    records = [] if records is None else records
    loop = VirtualLoop(tape, max_virtual_s, max_callbacks)
    context = SimContext(loop, seed, records)
    with confined(loop, seed), collecting_seldom():
        failure: BaseException | None = None
        try:
            value = loop.run_until_complete(main(context))
            callbacks, virtual_s = loop.callbacks, loop.time()
            leftover = loop.shutdown()
            loop.close()
        except BaseException as error:
            failure = error
            _clean_up(loop, records, error)
    if failure is not None:
        raise failure
    return SimResult(
        value,
        tuple(records),
        digest(records) if with_digest else "",
        virtual_s,
        callbacks,
        tape.canonical(),
        tuple(leftover),
    )


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Almost nothing in a simulation is cyclic garbage, and each full collection looks at the whole trace:
    left as it is, the collector takes a third of a large run.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _clean_up(loop: VirtualLoop, records: list[Record], failure: BaseException) -> None:
    """Lets the tasks of a failed run end, so that nothing leaks. What goes wrong now is only a note."""
    kept = len(records)
    for step in (loop.shutdown, loop.close):
        try:
            step()
        except BaseException as error:
            if error is not failure:
                failure.add_note(f"while cleaning up: {type(error).__name__}: {error}")
    del records[kept:]


def digest(records: Iterable[Record]) -> str:
    """SHA-256 (hex) of the records' lines as they stand in ``events.jsonl``."""
    state = hashlib.sha256()
    for record in records:
        state.update(record.to_line().encode())
        state.update(b"\n")
    return state.hexdigest()


def run_twice(
    main: Callable[[SimContext], Coroutine[Any, Any, T]],
    tape: Tape | None = None,
    seed: int = 0,
    **bounds: Any,
) -> SimResult[T]:
    """Runs the same case twice; raises ``Nondeterminism`` naming the first record that differs."""
    tape = fifo() if tape is None else tape
    first = run_simulation(main, tape, seed, **bounds)
    second = run_simulation(main, tape, seed, **bounds)
    if first.digest != second.digest or first.tape.choices != second.tape.choices:
        raise Nondeterminism(_first_difference(first, second))
    return second


def _first_difference(first: SimResult[Any], second: SimResult[Any]) -> str:
    for index, (ours, theirs) in enumerate(zip(first.records, second.records, strict=False)):
        if ours.to_line() != theirs.to_line():
            return f"two runs differ at record {index}:\n  {ours.to_line()}\n  {theirs.to_line()}"
    counts = f"{len(first.records)} and {len(second.records)} records"
    return f"two runs of the same seed and tape gave {counts}, after the same beginning"
