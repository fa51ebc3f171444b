"""Mutants of the engine: pauses, caches, tags and switches of weights."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.request import Request, WeightIdentity
from grpo_lab.engine.settings import RunState
from grpo_lab.events import (
    CacheHit,
)
from grpo_lab.sim.network import SimulatedEngine
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.coordinator import Patient
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.testing.mutants.worker import PATIENT
from grpo_lab.types import PauseMode


class ForgetsAsleep(EngineCore):
    """An engine that slept comes back with the weights of its disk.

    Field: trl#5312: deep sleep drops the weights, and nothing syncs after waking.
    Planted: the weights that a resume finds are those that the process began with; it says so.
    Exposed by: any pause. S2, S4.
    """

    async def resume(self, term: int = 0) -> None:
        asleep = self.is_paused and self.identity.version > 1
        await super().resume(term)
        if asleep:
            self.identity = WeightIdentity()
            self._announce_switch(0, "")


class StalePrefix(EngineCore):
    """The prefix cache is neither cleared at an update nor keyed by version.

    Field: vllm#42125, NeMo-RL#4018, lmdeploy#4917, sglang#26792: new requests attend to KV that older
    weights computed; nothing fails.
    Planted: keys without a version, and a flush that does nothing.
    Exposed by: one prefix under several versions. S17.
    """

    def __init__(self, policy: Any, recorder: Any, config: Any, **more: Any) -> None:
        config = dataclasses.replace(config, prefix_policy="shared")
        super().__init__(policy, recorder, config, **more)

    def flush_prefix_cache(self) -> None:
        pass


class StaleEncoder(EngineCore):
    """A second cache, of encoder outputs, is keyed by content alone.

    Field: vllm#48762: the prefix cache is cleared at an update, the cache of image features is not.
    Planted: the smallest such cache: the first tokens of a prompt stand for its image.
    Exposed by: content that comes again under a later version. S17.
    """

    def submit(self, prompt_token_ids: Any, *args: Any, **kwargs: Any) -> Request:
        request = super().submit(prompt_token_ids, *args, **kwargs)
        cache: dict[Any, Any] = self.__dict__.setdefault("encoded", {})
        content = tuple(prompt_token_ids[:1])
        known = cache.setdefault(content, self.identity.weights)
        if known[1]:
            self.recorder.emit(
                CacheHit(
                    engine=self.config.name,
                    request=request.request_id,
                    cache="encoder",
                    content_version=known[1],
                    version=self.identity.version,
                    tokens=len(content),
                    content_term=known[0],
                    term=self.identity.term,
                )
            )
        return request


class RetractedAreLost(EngineCore):
    """Requests that a flush retracted are in no queue any more.

    Field: sglang#32153, miles#1497: the flush wants an empty waiting queue, and the retracted requests
    are what fills it.
    Planted: after a pause(keep) with a flush the waiting queue is emptied.
    Exposed by: requests under way, more than there are places. S16, L6.
    """

    def _clear_caches(self) -> None:
        super()._clear_caches()
        self.scheduler.waiting.clear()


class FlushWaitsForItself(EngineCore):
    """A flush waits for an empty waiting queue while the engine is frozen.

    Field: sglang#32153: retracted requests go to the waiting queue, so the flush never begins.
    Planted: a pause with requests in the waiting queue never answers; nor does what comes after it.
    Exposed by: more requests than places. L6, L2, L1, L3.
    """

    async def pause(self, mode: PauseMode, clear_cache: bool = True, term: int = 0) -> None:
        await super().pause(mode, clear_cache, term)
        async with self._device:
            while self.scheduler.waiting or self._held:
                await asyncio.sleep(1.0)

    async def resume(self, term: int = 0) -> None:
        async with self._device:
            await super().resume(term)


class NamedTooEarly(EngineCore):
    """Tokens of the old weights are tagged with the new version.

    Field: prime-rl#3050, #3385: the version is published before the weights are applied.
    Planted: what requests under way have from the old weights is named after the new ones at the switch.
    Exposed by: an update with requests under way. S4.
    """

    async def switch_weights(
        self, identity: WeightIdentity, weights_hash: str, loaded: Callable[[], None]
    ) -> None:
        await super().switch_weights(identity, weights_hash, loaded)
        for request in self.scheduler.in_flight():
            if request.spans:
                request.spans[-1].identity = identity


class NamedTooLate(EngineCore):
    """The first tokens of the new weights are tagged with the old version.

    Field: prime-rl#3385, the reverse of #3050: weights are applied, and published a moment later.
    Planted: the identity moves two steps after the switch.
    Exposed by: an update with requests under way. S4.
    """

    async def switch_weights(
        self, identity: WeightIdentity, weights_hash: str, loaded: Callable[[], None]
    ) -> None:
        before = self.identity
        await super().switch_weights(identity, weights_hash, loaded)
        if not before.version:
            return
        self.identity = before
        self._after = (self._next_step + 2, identity)

    async def _step(self) -> None:
        waiting: tuple[int, WeightIdentity] | None = self.__dict__.get("_after")
        if waiting is not None and self._next_step >= waiting[0]:
            self.identity = self.__dict__.pop("_after")[1]
        await super()._step()


class FinishedWithoutAName(EngineCore):
    """New weights are served under the old label for good.

    Field: vLLM 0.32's contract: ``finish_weight_update`` without a version keeps the old one.
    Planted: a switch does not move the identity, from the second version on.
    Exposed by: any update. S4, S6, S18.
    """

    async def switch_weights(
        self, identity: WeightIdentity, weights_hash: str, loaded: Callable[[], None]
    ) -> None:
        before = self.identity
        await super().switch_weights(identity, weights_hash, loaded)
        if before.version:
            self.identity = before


class ServesUnsynced(EngineCore):
    """A new or restarted engine takes rollouts before its first sync.

    Field: miles#1724, prime-rl#1617: a recovered engine joins the router at once.
    Planted: the refusal is left out.
    Exposed by: an engine that dies and starts again. S31, S2.
    """

    def _refuse_unsynced(self, request_id: str, term: int) -> None:
        pass


class AcknowledgesAtOnce(EngineCore):
    """A pause is acknowledged while a step is still running, and weights are written under it.

    Field: NeMo-RL#2180: an in-flight forward pass overlaps the weight write.
    Planted: neither pause nor switch waits for the step in progress.
    Exposed by: an update while the engine generates. S7, S16.
    """

    async def pause(self, mode: PauseMode, clear_cache: bool = True, term: int = 0) -> None:
        if mode != "keep" or not self._stepping:
            await super().pause(mode, clear_cache, term)
            return
        self._state = RunState.FROZEN
        self._announce_pause(mode, clear_cache=False, term=term)

    async def switch_weights(
        self, identity: WeightIdentity, weights_hash: str, loaded: Callable[[], None]
    ) -> None:
        device, self._device = self._device, asyncio.Lock()
        try:
            await super().switch_weights(identity, weights_hash, loaded)
        finally:
            self._device = device


class StageBehind(EngineCore):
    """The second pipeline stage switches one step after the first.

    Field: NeMo-RL#2180: with pp 2, micro-batches of the old weights are in the second stage when the first
    has switched.
    Planted: two ranks, the second of which activates a step later.
    Exposed by: any update. S8.
    """

    def __init__(self, policy: Any, recorder: Any, config: Any, **more: Any) -> None:
        super().__init__(policy, recorder, dataclasses.replace(config, ranks=2), **more)

    def _announce_switch(self, rank: int, weights_hash: str) -> None:
        self._next_step += rank
        super()._announce_switch(rank, weights_hash)
        self._next_step -= rank


class AdmitsInTheUpdate(EngineCore):
    """Requests are admitted, and run, during the update.

    Field: torchforge#251: the door stays open while weights change.
    Planted: what arrives while the engine is paused is run at once.
    Exposed by: requests that keep coming. S16.
    """

    def submit(self, *args: Any, **kwargs: Any) -> Request:
        state = self._state
        if state is RunState.FROZEN:
            self._state = RunState.RUNNING
        try:
            return super().submit(*args, **kwargs)
        finally:
            self._state = state

    def _may_step(self) -> bool:
        return self.scheduler.has_work


class PauseRacesTheStep(EngineCore):
    """A pause waits as long as the step in progress takes, instead of for its end.

    Field: a race that only another schedule shows: step and pause are due at the same instant, and first
    in, first out always ends the step first.
    Planted: a timer of the step's length in place of the wait.
    Exposed by: schedules, no delays. S16, S7.
    """

    async def _step(self) -> None:
        self._step_began_s = asyncio.get_running_loop().time()
        await super()._step()

    def _duration_s(self, plan: Any) -> float:
        self._step_s = super()._duration_s(plan)
        return self._step_s

    async def pause(self, mode: PauseMode, clear_cache: bool = True, term: int = 0) -> None:
        if not self._stepping or mode != "keep":
            await super().pause(mode, clear_cache, term)
            return
        self.check_alive()
        self.observe_term(term)
        self._state = RunState.FROZEN
        end_s = self._step_began_s + self._step_s
        await asyncio.sleep(end_s - asyncio.get_running_loop().time())
        self._announce_pause(mode, clear_cache=False, term=term)


class ModeIgnored(SimulatedEngine):
    """The pause mode is sent where the server does not look, so its default applies.

    Field: vLLM 0.32's contract: ``mode`` in the body of ``/pause`` is ignored, and the default aborts.
    Planted: every pause is an abort.
    Exposed by: ``pause_mode`` keep or wait. S16.
    """

    async def pause(self, mode: PauseMode, clear_cache: bool, term: int) -> None:
        await super().pause("abort", clear_cache, term)


class ObeysTheDead(EngineCore):
    """An engine obeys messages of a trainer whose term is over.

    Own case: a delayed pause or update of a dead trainer arrives when its successor is at work.
    Planted: no term is refused.
    Exposed by: a delayed call, and a crash of the trainer. S12.
    """

    def observe_term(self, term: int, request: str = "") -> None:
        self.term = term or self.term


class ResumesInWordsOnly(EngineCore):
    """A resume is acknowledged, and nothing is resumed.

    Own case: the call reached a process in front of the engine.
    Planted: from the second version on, resume returns at once.
    Exposed by: any second sync. L2, S32.
    """

    async def resume(self, term: int = 0) -> None:
        if self.identity.version < 2:
            await super().resume(term)


MUTANTS = (
    Mutant("M07", ("S2", "S4"), spaces.QUIET, ForgetsAsleep, {"core": ForgetsAsleep}),
    Mutant("M09", ("S17",), spaces.MANY_PREFIXES, StalePrefix, {"core": StalePrefix}),
    Mutant("M10", ("S17",), spaces.MANY_PREFIXES, StaleEncoder, {"core": StaleEncoder}),
    Mutant("M21-a", ("S16", "L6"), spaces.CROWDED, RetractedAreLost, {"core": RetractedAreLost}),
    Mutant(
        "M21-b",
        ("L6", "L2", "L1", "L3"),
        spaces.CROWDED,
        FlushWaitsForItself,
        {"core": FlushWaitsForItself, "coordinator": Patient, **PATIENT},
    ),
    Mutant("M22-b", ("S4",), spaces.LONG_REQUESTS, NamedTooEarly, {"core": NamedTooEarly}),
    Mutant("M22-c", ("S4",), spaces.LONG_REQUESTS, NamedTooLate, {"core": NamedTooLate}),
    Mutant("M27", ("S31", "S2"), spaces.DYING_ENGINE, ServesUnsynced, {"core": ServesUnsynced}),
    Mutant("M40-a", ("S7",), spaces.LONG_REQUESTS, AcknowledgesAtOnce, {"core": AcknowledgesAtOnce}),
    Mutant("M40-b", ("S8",), spaces.QUIET, StageBehind, {"core": StageBehind}),
    Mutant("M41", ("S16",), spaces.LONG_REQUESTS, AdmitsInTheUpdate, {"core": AdmitsInTheUpdate}),
    Mutant("M44", ("S16", "S7"), spaces.SCHEDULES, PauseRacesTheStep, {"core": PauseRacesTheStep}),
    Mutant("M51", ("S4", "S6", "S18"), spaces.QUIET, FinishedWithoutAName, {"core": FinishedWithoutAName}),
    Mutant("M52", ("S16",), spaces.QUIET, ModeIgnored, {"client": ModeIgnored}),
    Mutant("M56", ("S12",), spaces.DELAYED_TERM, ObeysTheDead, {"core": ObeysTheDead}),
    Mutant("M79", ("L2",), spaces.SLOW_TRAINER, ResumesInWordsOnly, {"core": ResumesInWordsOnly, **PATIENT}),
)
