"""Fixtures for pytest. They come with the package (entry point ``pytest11``); nothing heavy is imported
until one of them is used.

================  ========================================================================================
``virtual_loop``  an event loop in virtual time; what a task lost, or left undone, fails the test
``simulate``      ``simulate(main, tape=None, seed=0)``: runs ``main(context)`` twice, which must agree
``cluster``       ``cluster(tape=None, **fields of Scenario)``: a whole cluster in virtual time, checked
``trace_check``   ``trace_check(trace, allow=())``: a run directory, trace file or records break no rule
================  ========================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from grpo_lab.errors import ConfigError

if TYPE_CHECKING:
    from grpo_lab.check import CheckResult
    from grpo_lab.events import Record
    from grpo_lab.sim.cluster import Outcome
    from grpo_lab.sim.loop import VirtualLoop
    from grpo_lab.sim.simulation import SimContext, SimResult
    from grpo_lab.sim.tape import Tape

SHOWN_PER_RULE = 3


def _records_of(trace: object) -> Iterator[Record]:
    """One after another, so that a long trace may be streamed."""
    from grpo_lab.events import Record  # noqa: PLC0415

    for item in trace if isinstance(trace, Iterable) else (trace,):
        if not isinstance(item, Record):
            words = "a run directory, a trace file, or records (grpo_lab.events.Record)"
            raise ConfigError("trace", item, words)
        yield item


def _require_tape(tape: object) -> None:
    from grpo_lab.sim.tape import Tape  # noqa: PLC0415

    if tape is not None and not isinstance(tape, Tape):
        raise ConfigError("tape", tape, "a grpo_lab.sim.tape.Tape, such as Tape([0, 2, 1]), or None")


@pytest.fixture
def virtual_loop() -> Iterator[VirtualLoop]:
    """Time, dates and randomness are virtual while it runs; sockets, threads and processes are refused."""
    from grpo_lab.sim.confinement import confined  # noqa: PLC0415
    from grpo_lab.sim.loop import VirtualLoop  # noqa: PLC0415

    loop = VirtualLoop()
    with confined(loop):
        yield loop
        left = loop.shutdown()
        loop.close()
    if left:
        pytest.fail(f"tasks were left when the test ended: {', '.join(left)}")


@pytest.fixture(scope="session")
def simulate() -> Callable[..., SimResult[Any]]:
    """Raises ``Nondeterminism`` when the two runs differ, else what ``main`` raised."""
    from grpo_lab.sim.simulation import run_twice  # noqa: PLC0415

    def run(
        main: Callable[[SimContext], Coroutine[Any, Any, Any]],
        tape: Tape | None = None,
        seed: int = 0,
        **bounds: Any,
    ) -> SimResult[Any]:
        if not callable(main):
            raise ConfigError(
                "main", main, "a function of one argument, the SimContext, that gives a coroutine"
            )
        _require_tape(tape)
        return run_twice(main, tape, seed, **bounds)

    return run


@pytest.fixture(scope="session")
def cluster() -> Callable[..., SimResult[Outcome]]:
    """Raises ``InvariantViolation`` for the first broken rule. ``parts`` gives classes of your own."""
    from grpo_lab.sim.parts import Parts  # noqa: PLC0415
    from grpo_lab.sim.scenario import Scenario  # noqa: PLC0415
    from grpo_lab.sim.world import simulate as run  # noqa: PLC0415

    known = [field.name for field in dataclasses.fields(Scenario)]

    def simulated(tape: Tape | None = None, parts: Any = None, **fields: Any) -> SimResult[Outcome]:
        _require_tape(tape)
        if parts is not None and not isinstance(parts, Parts):
            raise ConfigError(
                "parts", parts, "a grpo_lab.sim.parts.Parts, such as Parts(coordinator=MyCoordinator)"
            )
        for name in fields:
            if name not in known:
                raise ConfigError("field of a Scenario", name, f"one of {', '.join(known)}")
        return run(Scenario(**fields), tape, parts=parts)

    return simulated


@pytest.fixture(scope="session")
def trace_check() -> Callable[..., CheckResult]:
    """The result says how often each rule had something to check."""
    from grpo_lab.check import check_records, check_trace  # noqa: PLC0415
    from grpo_lab.check.rules import ALL_RULES  # noqa: PLC0415

    known = [rule.id for rule in ALL_RULES]

    def check(trace: Path | str | Iterable[Record], allow: Collection[str] = ()) -> CheckResult:
        if isinstance(allow, str):
            raise ConfigError("allow", allow, "a collection of rules, such as ('S17',)")
        for rule_id in allow:
            if rule_id not in known:
                raise ConfigError("allow", rule_id, f"one of {', '.join(known)}")
        if isinstance(trace, (str, Path)):
            result = check_trace(Path(trace))
        else:
            result = check_records(_records_of(trace))
        if not result.records:
            pytest.fail("the trace holds no event, so it shows nothing")
        broken = [rule for rule in result.rules if rule.violations and rule.id not in allow]
        if broken:
            lines = [f"{rule.id} ({rule.violation_count}): {rule.words}" for rule in broken]
            for place, rule in enumerate(broken):
                shown = [f"  {found.message}" for found in rule.violations[:SHOWN_PER_RULE]]
                lines[place] = "\n".join([lines[place], *shown])
            pytest.fail("the trace breaks rules:\n" + "\n".join(lines), pytrace=False)
        return result

    return check
