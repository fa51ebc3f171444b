"""State machines for Hypothesis: the coordinator and the engine, in virtual time, whatever is asked of them.

Subclass one to put parts of your own to the test, and give pytest its ``TestCase``::

    class MyCoordinatorMachine(CoordinatorMachine):
        parts = Parts(coordinator=MyCoordinator)

    TestMyCoordinator = MyCoordinatorMachine.TestCase

A failing example prints as a program of rule calls. Every record is checked as it is written; a broken rule
is raised by the step that broke it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, suppress
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grpo_lab.check.rules import ALL_RULES
from grpo_lab.errors import EngineRefused, GrpoLabError, InvariantViolation
from grpo_lab.events import WeightsPublished
from grpo_lab.sim.confinement import confined
from grpo_lab.sim.loop import VirtualLoop
from grpo_lab.sim.parts import Parts
from grpo_lab.sim.scenario import CALL_FAULTS, CRASHES, Fault
from grpo_lab.sim.tape import Tape
from grpo_lab.sim.world import violation_error
from grpo_lab.testing.small_world import SmallWorld, small_scenario
from grpo_lab.testing.strategies import tapes
from grpo_lab.types import Bucket, PauseMode, SyncId, SyncState

T = TypeVar("T")

_AT_REST = (SyncState.RUNNING, SyncState.DISCONNECTED, SyncState.FENCED)
_CALLS = st.sampled_from(("pause", "start_update", "update", "finish_update", "resume", "score", "health"))
_KINDS = st.sampled_from((*CALL_FAULTS, *CRASHES))
_STATES = st.sampled_from([state for state in SyncState if state not in (SyncState.DISCONNECTED,)])
_MAX_VIRTUAL_S = 100_000.0
ENGINE_RULES = frozenset({"S2", "S4", "S5", "S7", "S8", "S9", "S12", "S14", "S16", "S17", "S24"})


class VirtualMachine(RuleBasedStateMachine):
    """A small world on a virtual loop of its own. ``parts`` are what is tested."""

    parts: ClassVar[Parts] = Parts()
    only: ClassVar[frozenset[str] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._around = ExitStack()
        self.world: SmallWorld | None = None

    def begin(self, engines: int, tape: Tape, **scenario: Any) -> None:
        """Makes the world and starts its engines."""
        tape.rewind()
        self.loop = VirtualLoop(tape, max_virtual_s=_MAX_VIRTUAL_S)
        self._around.enter_context(confined(self.loop))
        self.world = SmallWorld(
            small_scenario(engines=engines, **scenario), self.loop.time, [], self.parts, self.only
        )
        self.run(self._started())

    @property
    def the_world(self) -> SmallWorld:
        assert self.world is not None
        return self.world

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Until ``work`` is done, in virtual time."""
        return self.loop.run_until_complete(work)

    @invariant()
    def no_rule_is_broken(self) -> None:
        if self.world is not None and self.world.watch.violation is not None:
            raise violation_error(self.world.watch.violation)

    def teardown(self) -> None:
        """Whatever the example did, what it left behind must end."""
        with self._around:
            if self.world is None:
                return
            broken = self.world.watch.violation
            try:
                if broken is None:
                    self.run(self.world.stop())
            finally:
                self.loop.shutdown()
                self.loop.close()
        if broken is None:
            self.no_rule_is_broken()

    async def _started(self) -> None:
        self.the_world.start()


class CoordinatorMachine(VirtualMachine):
    """Syncs, whole or in steps, faults at any call, interruptions in any state, and new terms."""

    only = frozenset(rule.id for rule in ALL_RULES) - {"D4"}  # time passes between two steps of a sync here
    minutes_left = 0

    @initialize(
        engines=st.integers(1, 3),
        tape=tapes(30),
        canary=st.booleans(),
        attempts=st.integers(1, 2),
        scope=st.sampled_from(("global", "rolling")),
    )
    def connect_first(self, engines: int, tape: Tape, canary: bool, attempts: int, scope: str) -> None:
        self.minutes_left = 2
        self.begin(engines, tape, canary=canary, sync_attempts=attempts, sync_scope=scope)
        self.run(self.the_world.connect())

    @rule(kind=_KINDS, engine=st.integers(0, 2), call=_CALLS, occurrence=st.integers(1, 2))
    def arm_a_fault(self, kind: str, engine: int, call: str, occurrence: int) -> None:
        world = self.the_world
        target = f"engine-{engine % len(world.hosts)}"
        world.faults.arm(Fault(kind, target, call, occurrence, 25.0 if kind == "delay" else 0.5))

    @rule(engine=st.integers(0, 2))
    def generate(self, engine: int) -> None:
        async def send() -> None:
            self.the_world.generate(engine)

        self.run(send())

    @rule(seconds=st.sampled_from((0.01, 1.0)))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @precondition(lambda self: self.minutes_left > 0 and self.state in _AT_REST)
    @rule()
    def a_minute_passes(self) -> None:
        """Whoever has begun a sync owes its end, and who has failed in one another, within some minutes."""
        self.minutes_left -= 1
        self.run(asyncio.sleep(60.0))

    @precondition(lambda self: self.state is SyncState.RUNNING)
    @rule()
    def sync(self) -> None:
        before = self.the_world.committed
        self.the_world.step()
        self._allowing_failure(self.the_world.sync())
        assert self.the_world.committed in (before, before + 1), "the version moves by one"

    @precondition(lambda self: self.state is SyncState.RUNNING)
    @rule(state=_STATES)
    def interrupted_sync(self, state: SyncState) -> None:
        world = self.the_world

        async def sync() -> None:
            task = asyncio.get_running_loop().create_task(world.sync(), name="sync")
            world.recorder.on_state = lambda entered: entered is state and task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        world.step()
        self._allowing_failure(sync())
        world.recorder.on_state = None

    @precondition(lambda self: self.state is SyncState.RUNNING)
    @rule()
    def first_step(self) -> None:
        world = self.the_world
        world.step()
        self._allowing_failure(world.following(world.the_coordinator.pause(world.optimizer_step)))

    @precondition(lambda self: self.state in (SyncState.PAUSED, SyncState.PAUSING))
    @rule()
    def second_step(self) -> None:
        self._allowing_failure(self.the_world.following(self.the_world.the_coordinator.transfer()))

    @precondition(lambda self: self.state in (SyncState.LOADED, SyncState.PROBATION, SyncState.ABORTING))
    @rule()
    def last_step(self) -> None:
        self._allowing_failure(self.the_world.following(self.the_world.the_coordinator.resume()))

    @rule()
    def new_term(self) -> None:
        world = self.the_world
        self._allowing_failure(world.following(world.the_coordinator.close()))
        self._allowing_failure(world.connect())

    @property
    def state(self) -> SyncState | None:
        coordinator = self.world.coordinator if self.world is not None else None
        return None if coordinator is None else coordinator.state

    @invariant()
    def at_rest_nobody_in_service_lags_behind(self) -> None:
        """Against the engines themselves, not against what the trace says of them."""
        world = self.world
        if world is None or self.state is not SyncState.RUNNING:
            return
        engines = world.the_coordinator.engines
        for name in set(engines.names) - set(engines.inherited):  # those wait for the term's first sync
            at = world.hosts[name].incarnation
            held = at.core.identity.version if at is not None else 0
            if held and held != world.committed:
                raise InvariantViolation(f"{name} serves v{held}, committed is v{world.committed}", "S3")

    def _allowing_failure(self, work: Coroutine[Any, Any, Any]) -> None:
        """A sync that fails for good is an answer too."""

        with suppress(GrpoLabError):
            self.run(work)


class EngineMachine(VirtualMachine):
    """One engine: requests, pauses, and updates in every order, also in orders that must be refused.

    The model is what a client of the engine can know: whether it is paused, which update is open and how far
    it has come, and which weights it serves.
    """

    only = ENGINE_RULES

    @initialize(tape=tapes(30))
    def join_first(self, tape: Tape) -> None:
        self.begin(1, tape)
        self.paused = False
        self.open: SyncId | None = None
        self.received = False
        self.served = "default"
        self.next_version = 1
        self.run(self._join())

    @rule()
    def generate(self) -> None:
        async def send() -> None:
            self.the_world.generate(0)
            await asyncio.sleep(0)

        self.run(send())

    @rule(seconds=st.sampled_from((0.005, 0.02, 1.0)))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(mode=st.sampled_from(("keep", "abort", "wait")), clear_cache=st.booleans())
    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self.run(self._client.pause(mode, clear_cache, 1))
        self.paused = True

    @rule()
    def resume(self) -> None:
        self.run(self._client.resume(1))
        self.paused = False

    @rule()
    def start_update(self) -> None:
        sync = SyncId(1, self.next_version)
        self.next_version += 1
        self.run(self._client.start_update(sync))  # a newer one supersedes
        self.open, self.received = sync, False

    @precondition(lambda self: self.open is not None)
    @rule(older=st.booleans())
    def start_twice(self, older: bool) -> None:
        """The same again is the retry of a lost answer; an older one is refused while this one is open."""
        assert self.open is not None
        if older and self.open.version > 1:
            self._refused(self._client.start_update(SyncId(1, self.open.version - 1)))
        elif not self.received:
            self.run(self._client.start_update(self.open))

    @precondition(lambda self: self.open is not None and not self.received)
    @rule()
    def receive(self) -> None:
        assert self.open is not None
        self.run(self._move(self.open))
        self.received = True

    @rule()
    def finish(self) -> None:
        sync = self.open
        if sync is None:
            self._refused(self._client.finish_update(SyncId(1, self.next_version)))
        elif not self.received:
            self._refused(self._client.finish_update(sync))
        else:
            self.run(self._client.finish_update(sync))
            self.served = str(sync)
        self.open, self.received = None, False

    @rule()
    def abandon(self) -> None:
        self.run(self._client.abandon_update(SyncId(1, self.next_version)))
        self.open, self.received = None, False

    @rule()
    def restart(self) -> None:
        """The process dies and comes back with what it had on disk."""
        self.run(self._restart())
        self.paused, self.open, self.received, self.served = False, None, False, "default"

    @invariant()
    def it_says_what_it_does(self) -> None:
        if self.world is None:
            return
        paused, served = self.run(self._asked())
        assert paused is self.paused, (
            f"is_paused says {paused}, but the last that was asked for is {self.paused}"
        )
        assert served == self.served, f"weight_info says {served}, but {self.served} was finished last"

    def teardown(self) -> None:
        """Once it is resumed, the engine owes an answer to every request."""
        lost: list[str] = []
        if self.world is not None and self.world.watch.violation is None:
            self.resume()
            lost = self.run(self.world.unanswered())
        super().teardown()
        assert not lost, f"never answered: {', '.join(lost)}"

    @property
    def _client(self) -> Any:
        return self.the_world.clients[0]

    async def _asked(self) -> tuple[bool, str]:
        return await self._client.is_paused(), await self._client.weight_info()

    async def _restart(self) -> None:
        host = self.the_world.hosts["engine-0"]
        host.crash("killed by SIGKILL")
        await asyncio.sleep(0)
        host.start()
        await self._join()

    async def _join(self) -> None:
        world, client = self.the_world, self._client
        await world.transport.close()
        await world.transport.open([client.name], world.source.plan)
        await client.init_transfer(world.transport.init_info(client.name), 1)
        await world.transport.accept()

    async def _move(self, sync: SyncId) -> None:
        world = self.the_world
        await world.source.begin(sync)
        update = self._client.update(sync, world.transport.update_info(sync))
        receiving = asyncio.get_running_loop().create_task(update, name="update")
        await world.transport.send(sync, self._published(sync))
        await receiving

    async def _published(self, sync: SyncId) -> AsyncIterator[Bucket]:
        world = self.the_world
        buckets: list[Bucket] = []
        while (bucket := await world.source.next()) is not None:
            buckets.append(bucket)
            if len(buckets) == world.source.num_buckets:
                world.recorder.emit(
                    WeightsPublished(
                        term=sync.term,
                        version=sync.version,
                        attempt=sync.attempt,
                        plan_digest=world.source.plan_digest,
                        tensors=world.source.num_tensors,
                        bucket_nbytes=tuple(each.nbytes for each in buckets),
                        bucket_hashes=tuple(each.hash64 for each in buckets),
                    )
                )
            yield bucket

    def _refused(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self.run(work)
        except EngineRefused:
            return
        raise AssertionError("the engine did what it has to refuse")
