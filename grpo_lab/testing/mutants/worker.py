"""Mutants of the rollout worker: admission, requests, tags, heartbeats, and what becomes of a lost group."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from grpo_lab.errors import EngineRefused, WorkerError
from grpo_lab.events import Heartbeat, MemberDied
from grpo_lab.ports import Engine
from grpo_lab.protocol.rollout_worker import RolloutWorker
from grpo_lab.protocol.sample_request import RequestSettings, SampleLost, SampleRequester
from grpo_lab.sim.light_worker import LightWorker
from grpo_lab.sim.network import SimulatedEngine
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.clusters import Clusters
from grpo_lab.testing.mutants.mutant import Mutant
from grpo_lab.trainer.term import TrainingTerm
from grpo_lab.types import Completion, GenerateRequest, VersionSpan


class PatientTerm(TrainingTerm):
    """A trainer that waits for samples without a bound of its own, so that only the rules can tell."""

    def __init__(self, lineage: Any, args: Any, *others: Any) -> None:
        super().__init__(lineage, dataclasses.replace(args, starvation_timeout=80_000.0), *others)


class PatientActor(LightWorker):
    """A worker that is not given up when it makes no progress."""

    def _raise_if_stalled(self) -> None:
        pass


def with_requester(requester: type[SampleRequester], **settings: Any) -> dict[str, Any]:
    """A worker whose requests are made by ``requester``, with other bounds."""

    class Worker(RolloutWorker):
        requester_type = requester

        def __init__(self, *args: Any, **named: Any) -> None:
            changed = (*args[:-1], dataclasses.replace(args[-1], **settings))
            super().__init__(*changed, **named)

    return {"worker": Worker}


class NoPlaceAtZero(RolloutWorker):
    """With a staleness bound of 0 nothing may be in flight, and the worker waits for ever, heart beating.

    Field: trl#5650: the number of places in flight is the bound times the batch, so 0 gives none.
    Planted: admission leaves out the version that is being trained on.
    Exposed by: ``max_staleness=0``. L5, L4.
    """

    def _what_blocks(self) -> str:
        bound = self._settings.bound
        if bound.admits_by_bound:
            places = bound.max_staleness * bound.weight_sync_steps * bound.groups_per_step
            if len(self._under_way) >= places:
                return "bound"
        return super()._what_blocks()


class StampedAtDispatch(SampleRequester):
    """The whole sample carries the version that was current when it was sent.

    Field: prime-rl#3050, #3385: tag and sampling weights differ where a dispatch meets an update.
    Planted: one span, of the version known at dispatch.
    Exposed by: requests that are under way in a sync. S4.
    """

    async def sample(
        self, sample_id: str, group_id: str, prompt: Any, sampling: Any, term: int, version: int
    ) -> Completion:
        self.__dict__.setdefault("stamps", {})[sample_id] = (term, version)
        return await super().sample(sample_id, group_id, prompt, sampling, term, version)

    def _emit_completed(self, whole: Completion, group_id: str, term: int, duration_s: float) -> None:
        stamp = self.__dict__["stamps"].pop(whole.request_id)
        super()._emit_completed(_stamped(whole, *stamp), group_id, term, duration_s)


class StampedAtCompletion(SampleRequester):
    """The version is stamped when the sample is complete.

    Field: rllm#622: a sample that began under v and ended under v+1 counts as fresh.
    Planted: one span, of the newest version that the worker knows at completion.
    Exposed by: an update during generation. S4.
    """

    def _emit_completed(self, whole: Completion, group_id: str, term: int, duration_s: float) -> None:
        super()._emit_completed(_stamped(whole, term, self._version), group_id, term, duration_s)


def _stamped(whole: Completion, term: int, version: int) -> Completion:
    return dataclasses.replace(whole, spans=(VersionSpan(term, version, 0, len(whole.token_ids)),))


class FailureEndsTheData(RolloutWorker):
    """A rollout that failed reads as the end of the data.

    Field: verl#7010, #6090, #7611, #6395: the exception of one rollout ends the loop that makes them.
    Planted: after a lost group nothing is admitted any more.
    Exposed by: a rollout or a reward that raises. L5.
    """

    async def _give_up(self, group: Any, reason: Any, detail: str) -> None:
        await super()._give_up(group, reason, detail)
        self._over = True

    def _what_blocks(self) -> str:
        return "prompts" if self.__dict__.get("_over") else super()._what_blocks()


class LostWithoutAWord(RolloutWorker):
    """A lost group is told to nobody.

    Field: verl#7611: a cancelled rollout disappears between two queues.
    Planted: no drop, in trace or queue; its place is freed.
    Exposed by: a rollout or reward that raises. S20, L6, L8.
    """

    async def _give_up(self, group: Any, reason: Any, detail: str) -> None:
        self._lost += 1
        self._end(group)


class ReservationLeaks(RolloutWorker):
    """The place of a lost group is never freed.

    Field: NeMo-RL#3480: a reservation is given back on success only; after some failures nothing is
    admitted any more.
    Planted: a lost group stays under way.
    Exposed by: failing rollouts, with few places. L5; S20 when the worker drops the group again at its end.
    """

    def _end(self, group: Any) -> None:
        if "lost" in self.__dict__.get("_how", ""):
            self._how = ""
            self._finished += 1
            self._changed.set()
            return
        super()._end(group)

    async def _give_up(self, group: Any, reason: Any, detail: str) -> None:
        self._how = "lost"
        await super()._give_up(group, reason, detail)


class RefusalRetriedForEver(SampleRequester):
    """A 400 is retried many times with a back-off, and then kills the worker.

    Field: trl 1.16.0: one prompt that the server refuses costs 90 tries, then the run.
    Planted: 90 tries, 5 s apart, for a refusal of the request itself.
    Exposed by: one bad request. L6: it may cost its group, no more.
    """

    async def _answer(self, engine: Engine, request: GenerateRequest) -> tuple[Completion, Engine]:
        for _ in range(90):
            try:
                return await super()._answer(engine, request)
            except SampleLost as lost:
                if lost.reason != "request_refused":
                    raise
                await asyncio.sleep(5.0)
        raise WorkerError(f"{request.request_id} was refused 90 times")


class RefusesOnePrompt(SimulatedEngine):
    """Environment: prompts that begin with an odd token are refused with a 400, as one too long would be."""

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.request_id.startswith("t1.g1."):
            raise EngineRefused(f"{request.request_id}: HTTP 400: the prompt is too long", 400, "too long")
        return await super().generate(request)


class StalledLoop(RolloutWorker):
    """The worker's loop stalls for minutes without a word.

    Field: prime-rl#1713: a blocking call in the event loop; nothing names what everybody waits for.
    Planted: after the first version that it is told of, the heart stops.
    Exposed by: any run that lasts. L4.
    """

    async def _beat(self) -> None:
        while self.version == self._first_version:
            self._recorder.emit(Heartbeat(member=self._recorder.actor, progress=self._requester.tokens))
            await asyncio.sleep(self._settings.heartbeat_every_s)
        await asyncio.Event().wait()


class DeclaredDeadWhileBusy(RolloutWorker):
    """An engine that is only busy with a sync is declared dead.

    Field: open-instruct#1454: the health check waits behind the weight sync and runs out of time.
    Planted: an engine that does not answer a request within half a second is declared dead.
    Exposed by: a pause that is longer. S28: what was declared dead goes on acting.
    """

    requester_type = SampleRequester

    async def run(self) -> None:
        watch = asyncio.get_running_loop().create_task(self._watch(), name="health")
        try:
            await super().run()
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for engine in self._requester._engines:
                try:
                    async with asyncio.timeout(0.5):
                        while await engine.is_paused():
                            await asyncio.sleep(0.05)
                except TimeoutError:
                    self._recorder.emit(MemberDied(member=engine.name, detail="no answer to /health"))
                    return


class OneTooMany(RolloutWorker):
    """Admission lets one group more in than the bound allows.

    Own case: ``<=`` where ``<`` is due.
    Planted: the group that reaches the limit is still let in.
    Exposed by: a trainer slower than the engines. S19.
    """

    def _what_blocks(self) -> str:
        self._lost += 1
        try:
            return super()._what_blocks()
        finally:
            self._lost -= 1


class PartsInWrongOrder(SampleRequester):
    """The parts of a sample that pauses cut off are joined newest first.

    Own case: continuations are collected in a stack.
    Planted: the parts are reversed.
    Exposed by: pause(abort) with requests under way. S5.
    """

    def _emit_completed(self, whole: Completion, group_id: str, term: int, duration_s: float) -> None:
        spans, end = [], 0
        for span in reversed(whole.spans):
            width = span.end - span.start
            spans.append(dataclasses.replace(span, start=end, end=end + width))
            end += width
        super()._emit_completed(dataclasses.replace(whole, spans=tuple(spans)), group_id, term, duration_s)


class FirstLogprobLost(SimulatedEngine):
    """The first token of every continued sample has no logprob.

    Own case: the prompt's last logprob is cut off once more than it is there.
    Planted: the first logprob of each answer is left out.
    Exposed by: any request. S24.
    """

    async def generate(self, request: GenerateRequest) -> Completion:
        answer = await super().generate(request)
        return dataclasses.replace(answer, logprobs=answer.logprobs[1:])


class UnboundedQueue(LightWorker):
    """The queue takes whatever comes.

    Own case: its capacity was a hint.
    Planted: ``put`` never waits.
    Exposed by: a trainer slower than the engines, and little room. S23.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._queue._capacity = 10**9


class CompletedTwice(SampleRequester):
    """A sample whose request was tried again is completed by both answers.

    Own case: the first try was slow, not lost; both of its answers are taken.
    Planted: a sample that was asked for more than once is told of twice.
    Exposed by: a request that fails once. S14.
    """

    async def _ask(self, engine: Engine, request: GenerateRequest) -> Completion:
        tries = self.__dict__.setdefault("tries", {})
        tries[request.request_id] = tries.get(request.request_id, 0) + 1
        return await super()._ask(engine, request)

    def _emit_completed(self, whole: Completion, group_id: str, term: int, duration_s: float) -> None:
        super()._emit_completed(whole, group_id, term, duration_s)
        if self.__dict__["tries"].get(whole.request_id, 0) > 1:
            super()._emit_completed(whole, group_id, term, duration_s)


STAYING = {"term": PatientTerm, "worker_actor": PatientActor}
"""Nobody gives the run up because samples do not come."""
PATIENT = {
    **STAYING,
    **with_requester(SampleRequester, group_timeout_s=80_000.0, request=RequestSettings(timeout_s=80_000.0)),
}
"""Neither trainer nor worker ever gives up waiting."""

BAD_REQUEST = Clusters("one bad request", spaces.QUIET.scenarios, environment={"client": RefusesOnePrompt})

MUTANTS = (
    Mutant("M05", ("L5", "L4"), spaces.QUIET, NoPlaceAtZero, {"worker": NoPlaceAtZero, **STAYING}),
    Mutant("M22-a", ("S4",), spaces.LONG_REQUESTS, StampedAtDispatch, with_requester(StampedAtDispatch)),
    Mutant("M23", ("S4",), spaces.LONG_REQUESTS, StampedAtCompletion, with_requester(StampedAtCompletion)),
    Mutant(
        "M29-a",
        ("L5", "L1", "L6"),
        spaces.BUSY_ENGINE,
        FailureEndsTheData,
        {"worker": FailureEndsTheData, **STAYING},
    ),
    Mutant(
        "M29-b",
        ("S20", "L6", "L8"),
        spaces.BUSY_ENGINE,
        LostWithoutAWord,
        {"worker": LostWithoutAWord, **STAYING},
    ),
    Mutant(
        "M30-b", ("S20", "L5"), spaces.BUSY_ENGINE, ReservationLeaks, {"worker": ReservationLeaks, **STAYING}
    ),
    Mutant(
        "M37",
        ("L6",),
        BAD_REQUEST,
        RefusalRetriedForEver,
        {**with_requester(RefusalRetriedForEver, group_timeout_s=3600.0), **STAYING},
    ),
    Mutant("M33", ("L4",), spaces.SLOW_TRAINER, StalledLoop, {"worker": StalledLoop}),
    Mutant("M42", ("S28", "L4"), spaces.QUIET, DeclaredDeadWhileBusy, {"worker": DeclaredDeadWhileBusy}),
    Mutant("M54", ("S5",), spaces.LONG_REQUESTS, PartsInWrongOrder, with_requester(PartsInWrongOrder)),
    Mutant("M58-b", ("S14",), spaces.BUSY_ENGINE, CompletedTwice, with_requester(CompletedTwice)),
    Mutant("M59", ("S19",), spaces.QUIET, OneTooMany, {"worker": OneTooMany}),
    Mutant("M62", ("S23",), spaces.FREE_ADMISSION, UnboundedQueue, {"worker_actor": UnboundedQueue}),
    Mutant("M74", ("S24",), spaces.QUIET, FirstLogprobLost, {"client": FirstLogprobLost}),
)
