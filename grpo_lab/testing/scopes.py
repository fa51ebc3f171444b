"""All schedules of small scopes: one or two engines, two versions, one fault, one interruption.

A random search can only say that it found nothing. Here every order of the first decisions of the sync
under test is tried, for every fault at every call, over the real coordinator and engines, every rule
checked; and what was covered is counted against the table of all transitions.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

from grpo_lab.check import Violation
from grpo_lab.errors import ConfigError, GrpoLabError, InvariantViolation, TraceError
from grpo_lab.events import Record
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import Fault, Scenario
from grpo_lab.sim.simulation import SimContext, SimResult, run_simulation
from grpo_lab.sim.tape import Tape
from grpo_lab.sim.world import RunBroken, violation_error
from grpo_lab.testing.coverage import Coverage
from grpo_lab.testing.small_world import OnTrial, SmallWorld, Unstaged, small_scenario
from grpo_lab.types import SyncScope, SyncState

Abilities = Literal["full", "on-trial", "unstaged"]
INTERRUPTED_STATES = (
    SyncState.PAUSING,
    SyncState.PAUSED,
    SyncState.TRANSFERRING,
    SyncState.LOADED,
    SyncState.PROBATION,
    SyncState.RESUMING,
    SyncState.ABORTING,
)
IN_LATER_TURN = "-in-later-turn"
CANCELS = tuple(f"cancelled-{state.value}" for state in INTERRUPTED_STATES)
LATER_CANCELS = tuple(name + IN_LATER_TURN for name in CANCELS if name != "cancelled-aborting")
INTERRUPTIONS = ("", *CANCELS, "closed-paused", "closed-loaded", "broken-source")
MAX_CALLBACKS = 200_000
MAX_VIRTUAL_S = 7_200.0


@dataclass(frozen=True, slots=True)
class Scope:
    """One small case: v1 is synced in peace, then v2 under the fault and the interruption, then a last sync.

    Attributes:
        abilities: ``on-trial`` engines score only when resumed (with a canary: PROBATION); ``unstaged``
            ones lose their weights when an update fails.
        fault: strikes the ``occurrence``-th call, counted from the beginning (v1 included).
        sync_scope: ``rolling``: the engines of the second sync take turns.
        interruption: ``cancelled-<state>``: the sync is cancelled as soon as it is in that state
            (``-in-later-turn``: for the second time, which a rolling sync is in its second turn);
            ``closed-...``: the trainer closes after that step; ``broken-source``: parameters cannot be read.
    """

    engines: int = 1
    abilities: Abilities = "full"
    canary: bool = True
    fault: Fault | None = None
    interruption: str = ""
    sync_attempts: int = 2
    sync_scope: SyncScope = "global"

    def __post_init__(self) -> None:
        known = (*INTERRUPTIONS, *LATER_CANCELS)
        if self.interruption not in known:
            raise ConfigError("interruption", self.interruption, f"one of {', '.join(known)}")
        if self.abilities not in get_args(Abilities):
            raise ConfigError("abilities", self.abilities, f"one of {get_args(Abilities)}")
        _ = self.scenario  # its own checks

    @property
    def scenario(self) -> Scenario:
        faults = () if self.fault is None else (self.fault,)
        return small_scenario(
            *faults,
            engines=self.engines,
            canary=self.canary,
            sync_attempts=self.sync_attempts,
            sync_scope=self.sync_scope,
            steps=3,
        )

    def parts(self, parts: Parts) -> Parts:
        """The same with engines of these abilities."""
        client = {"full": parts.client, "on-trial": OnTrial, "unstaged": Unstaged}[self.abilities]
        abilities = replace(
            parts.abilities,
            score_while_paused=self.abilities != "on-trial",
            staged=self.abilities != "unstaged",
        )
        return replace(parts, client=client, abilities=abilities)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        """Raises ``TraceError`` for what is no scope."""
        try:
            fault = row["fault"]
            return cls(**{**row, "fault": None if fault is None else Fault(**fault)})
        except (TypeError, KeyError, ConfigError) as error:
            raise TraceError(f"not a scope of this version: {error}") from error

    def __str__(self) -> str:
        fault = self.fault
        words = [f"{self.engines} engines" if self.engines > 1 else "1 engine", self.abilities]
        words += [self.sync_scope] if self.sync_scope != "global" else []
        if fault is not None:
            words.append(f"{fault.kind} at {fault.call} {fault.occurrence} of {fault.target}")
        if self.interruption:
            words.append(self.interruption)
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class ScopeOutcome:
    """``struck``: faults that did (0 or 1)."""

    committed: int
    struck: int


def run_scope(
    scope: Scope,
    tape: Tape | None = None,
    *,
    parts: Parts | None = None,
    records: list[Record] | None = None,
) -> SimResult[ScopeOutcome]:
    """Runs one case under one schedule.

    Raises ``InvariantViolation`` for a broken rule or a transition that the table does not have, or what
    else ended the simulation. ``records`` may be given to see the trace of such a run.
    """
    records = [] if records is None else records
    drives: list[_Drive] = []

    async def main(context: SimContext) -> ScopeOutcome:
        drives.append(_Drive(scope, context, (parts or Parts()), records))
        return await drives[0].run()

    try:
        result = run_simulation(
            main, tape, max_virtual_s=MAX_VIRTUAL_S, max_callbacks=MAX_CALLBACKS, records=records
        )
    except RunBroken:
        result = None
    if result is None:
        violation = drives[0].world.watch.violation
        assert violation is not None
        raise violation_error(violation)
    coverage = Coverage()
    coverage.add(records)
    if coverage.undeclared:
        before, after = coverage.undeclared[0]
        raise InvariantViolation(f"transition {before.value} -> {after.value} is in no table", "transitions")
    return result


class _Drive:
    """The trainer of a scope: what it does, in order."""

    def __init__(self, scope: Scope, context: SimContext, parts: Parts, records: list[Record]) -> None:
        self._scope = scope
        self._context = context
        self.world = SmallWorld(scope.scenario, context.loop.time, records, scope.parts(parts))

    async def run(self) -> ScopeOutcome:
        tape = self._context.loop.tape
        tape.hold()
        world = self.world
        world.start()
        broken = asyncio.get_running_loop().create_task(world.watch.stop.wait(), name="watch")
        with suppress(GrpoLabError):  # a trainer that cannot go on ends
            await world.connect()
            await world.sync()
            for index in range(self._scope.engines):
                world.generate(index)
            await asyncio.sleep(0)
            world.step()
            tape.go_on()
            await self._sync_under_test()
            tape.hold()
            await self._recover()
        broken.cancel()
        await world.stop()
        if world.watch.violation is not None:
            raise RunBroken
        return ScopeOutcome(world.committed, world.faults.struck)

    async def _sync_under_test(self) -> None:
        world, interruption = self.world, self._scope.interruption
        coordinator = world.the_coordinator
        world.source_broken = interruption == "broken-source"
        try:
            if interruption.startswith("closed-"):
                await world.following(coordinator.pause(world.optimizer_step))
                if interruption == "closed-loaded":
                    await world.following(coordinator.transfer())
                await world.following(coordinator.close())
            else:
                await self._until_cancelled(interruption)
        finally:
            world.source_broken = False

    async def _until_cancelled(self, interruption: str) -> None:
        world = self.world
        loop = asyncio.get_running_loop()
        sync = loop.create_task(world.sync(), name="sync under test")
        awaited = interruption.removesuffix(IN_LATER_TURN)
        to_pass = 1 if interruption.endswith(IN_LATER_TURN) else 0

        def cancel(state: SyncState) -> None:
            nonlocal to_pass
            if awaited == f"cancelled-{state.value}":
                to_pass -= 1
                if to_pass < 0:
                    loop.call_soon(sync.cancel)

        world.recorder.on_state = cancel
        try:
            await asyncio.gather(sync, return_exceptions=True)
        finally:
            world.recorder.on_state = None
        if not sync.cancelled():
            sync.result()

    async def _recover(self) -> None:
        """Faults are over. One sync (in a new term after an interruption) may still meet what a fault left in
        a connection; the version must move with the next one at the latest.
        """
        world = self.world
        await world.faults.over(0.0)
        world.end_faults()
        before = world.committed
        if self._scope.interruption and world.the_coordinator.state is not SyncState.DISCONNECTED:
            await world.following(world.the_coordinator.close())
        if not world.the_coordinator.engines.view:
            return
        if world.the_coordinator.state is SyncState.DISCONNECTED:
            await world.connect()
        for _ in range(2):
            world.step()
            if (await world.sync()).committed:
                break
        if world.committed != before + 1 and world.watch.violation is None:
            words = f"no fault strikes any more, yet two syncs left version {before} at {world.committed}"
            last = (world.recorder.last_id,)
            world.watch.break_off(Violation("convergence", words, last, self._context.now_s))
