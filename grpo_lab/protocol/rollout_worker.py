"""The rollout worker: admits prompts under the staleness bound and turns them into scored groups.

A group either reaches the queue whole or ends as dropped with a reason; nothing is retried for hours,
and a run of failures with no success in between ends the worker with the last one's words.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from grpo_lab.errors import ConfigError, PhaseTimeout, RewardError, WorkerError
from grpo_lab.events import AdmissionBlocked, GroupAdmitted, GroupDropped, GroupScored, Heartbeat
from grpo_lab.ports import Engine, PromptSource, Recorder, RewardModel, SampleQueue
from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.protocol.nursery import Nursery, run_all
from grpo_lab.protocol.sample_request import RequestSettings, SampleLost, SampleRequester
from grpo_lab.types import (
    Completion,
    DroppedGroup,
    DropReason,
    JsonDict,
    RolloutGroup,
    RolloutSample,
    SamplingParams,
)

Texts = Callable[[JsonDict, Sequence[tuple[int, ...]]], tuple[str, list[str]]]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What the worker does.

    Raises ``ConfigError`` for values under which not a single group could ever run.

    Attributes:
        max_inflight: completions under way at once, over all engines.
        max_consecutive_failures: groups lost in a row (with no success) before the run ends.
        seed: sample s of prompt p always gets the seed derived from (seed, p, s).
    """

    num_generations: int
    sampling: SamplingParams
    bound: StalenessBound
    max_inflight: int
    request: RequestSettings = field(default_factory=RequestSettings)
    max_consecutive_failures: int = 8
    heartbeat_every_s: float = 1.0
    group_timeout_s: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_generations", "max_consecutive_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "an integer of at least 1")
        if self.max_inflight < self.num_generations:
            raise ConfigError(
                "max_inflight_tasks",
                self.max_inflight,
                f"at least num_generations = {self.num_generations}",
                "The completions of a group are requested together",
            )


@dataclass(frozen=True, slots=True)
class _Admitted:
    group_id: str
    number: int
    prompt_index: int
    prompt: tuple[int, ...]
    row: JsonDict
    version: int
    sample_ids: tuple[str, ...]


class RolloutWorker:
    """Runs until ``stop``. Everything it decides, it decides on the loop that runs it.

    Admission, in order: stop asked; the staleness bound (``admission_limit``); ``max_inflight``; queue
    capacity, because a finished group keeps its place among those under way until the queue has taken it.

    Every admitted group ends once: the queue takes it, or it is dropped with a reason. Those that are
    under way when the worker ends, for whatever reason, are dropped as ``shutdown``.

    ``heartbeat`` is called with a progress count that rises with every token and finished group, so
    that a worker that lives but does nothing can be told from one that waits for admission
    (``blocked_by``). ``texts`` gives what people read in a table of samples: prompt and completions.
    """

    requester_type: ClassVar[type[SampleRequester]] = SampleRequester

    def __init__(
        self,
        engines: Sequence[Engine],
        prompts: PromptSource,
        rewards: RewardModel,
        queue: SampleQueue,
        recorder: Recorder,
        settings: RolloutSettings,
        *,
        term: int,
        version: int,
        heartbeat: Callable[[int, str], None],
        texts: Texts | None = None,
    ) -> None:
        self._requester = self.requester_type(engines, settings.request, recorder, version)
        self._prompts = prompts
        self._rewards = rewards
        self._queue = queue
        self._recorder = recorder
        self._settings = settings
        self._term = term
        self._first_version = version
        self._heartbeat = heartbeat
        self._texts = _no_texts if texts is None else texts
        self._changed = asyncio.Event()
        self._stopping = False
        self._number = 0
        self._lost = 0
        self._under_way: dict[str, _Admitted] = {}
        self._finished = 0
        self._consecutive_failures = 0
        self.version = version
        self.blocked_by = ""

    def update_model_version(self, version: int) -> None:
        """Told after every commit; admission counts from it."""
        self.version = max(self.version, version)
        self._requester.update_model_version(version)
        self._changed.set()

    def fence_engines(self, names: Sequence[str]) -> None:
        """Exactly these engines are out of service: what they are asked for is asked for elsewhere. One that
        is not named any more has come back with the newest weights.
        """
        self._requester.fence(names)

    def stop(self) -> None:
        """In-flight samples end as dropped(shutdown). Does not wait."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Raises ``WorkerError`` when it cannot go on, for instance when the engine is gone."""
        try:
            async with Nursery("rollout worker", timeout_s=math.inf) as nursery:
                nursery.start(self._beat(), name="heartbeat")
                while not self._stopping:
                    self.blocked_by = self._what_blocks()
                    if self.blocked_by:
                        self._recorder.emit(AdmissionBlocked(term=self._term, by=self.blocked_by))
                        await self._wait_for_change()
                    else:
                        group = self._admit()
                        nursery.start(self._run_group(group), name=group.group_id)
                nursery.cancel()
        finally:
            # Not in the groups' own tasks: one that is cancelled before its first step runs no code.
            for group in self._under_way.values():
                self._emit_dropped(group, "shutdown", "in flight when the worker ended")
            self._under_way.clear()

    # -- admission ---------------------------------------------------------------------------------

    def _what_blocks(self) -> str:
        limit = self._settings.bound.admission_limit(self.version - self._first_version)
        if limit is not None and self._number - self._lost >= limit:
            return "bound"
        if (len(self._under_way) + 1) * self._settings.num_generations > self._settings.max_inflight:
            return "inflight"
        return ""

    async def _wait_for_change(self) -> None:
        """Until something may have unblocked admission; ``stop`` always does."""
        before = self.blocked_by
        while not self._stopping and self._what_blocks() == before:
            self._changed.clear()
            await self._changed.wait()

    def _admit(self) -> _Admitted:
        prompt_index, prompt, row = self._prompts.next()
        group_id = f"t{self._term}.g{self._number}"
        samples = tuple(f"{group_id}.s{index}" for index in range(self._settings.num_generations))
        group = _Admitted(group_id, self._number, prompt_index, prompt, row, self.version, samples)
        self._number += 1
        self._under_way[group_id] = group
        self._recorder.emit(
            GroupAdmitted(
                term=self._term,
                group=group_id,
                number=group.number,
                prompt_index=prompt_index,
                samples=samples,
                version=self.version,
                admitted=self._number - self._lost,
                running=len(self._under_way),
            )
        )
        return group

    # -- one group -----------------------------------------------------------------------------------

    async def _run_group(self, group: _Admitted) -> None:
        try:
            completions = await self._generate(group)
            finished = await self._score(group, completions)
            await self._queue.put(finished)
        except SampleLost as lost:
            await self._give_up(group, lost.reason, lost.detail)
        except RewardError as error:
            await self._give_up(group, "reward_failed", str(error))
        except PhaseTimeout as error:
            await self._give_up(group, "request_failed", str(error))
        else:
            self._end(group)
            self._consecutive_failures = 0

    def _end(self, group: _Admitted) -> None:
        """The group's place is free again."""
        del self._under_way[group.group_id]
        self._finished += 1
        self._changed.set()

    async def _generate(self, group: _Admitted) -> list[Completion]:
        settings = self._settings
        requests = []
        for index, sample_id in enumerate(group.sample_ids):
            seed = sample_seed(settings.seed, group.prompt_index, index)
            sampling = replace(settings.sampling, seed=seed)
            request = self._requester.sample(
                sample_id, group.group_id, group.prompt, sampling, self._term, group.version
            )
            requests.append((sample_id, request))
        return await run_all(group.group_id, requests, settings.group_timeout_s)

    async def _score(self, group: _Admitted, completions: Sequence[Completion]) -> RolloutGroup:
        scores = await self._rewards.score(group.row, [item.token_ids for item in completions])
        totals = tuple(total for total, _ in scores)
        self._recorder.emit(GroupScored(term=self._term, group=group.group_id, rewards=totals))
        if all(total is None for total in totals):
            raise SampleLost("reward_failed", "every reward function returned None for every sample")
        prompt_text, texts = self._texts(group.row, [item.token_ids for item in completions])
        samples = tuple(
            RolloutSample(
                sample_id=sample_id,
                prompt_token_ids=group.prompt,
                completion_token_ids=completion.token_ids,
                behaviour_logprobs=completion.logprobs,
                reward=total,
                version_first=completion.spans[0].version if completion.spans else group.version,
                version_last=completion.spans[-1].version if completion.spans else self.version,
                finish_reason=completion.finish_reason,
                spans=completion.spans,
                rewards=each,
                prompt_text=prompt_text,
                completion_text=text,
            )
            for sample_id, completion, (total, each), text in zip(
                group.sample_ids, completions, scores, texts, strict=True
            )
        )
        return RolloutGroup(
            group.group_id, group.number, group.prompt_index, self._term, samples, group.version
        )

    async def _give_up(self, group: _Admitted, reason: DropReason, detail: str) -> None:
        self._lost += 1
        self._emit_dropped(group, reason, detail)
        self._end(group)
        await self._queue.put(
            DroppedGroup(
                group.group_id, group.number, group.prompt_index, self._term, group.sample_ids, reason, detail
            )
        )
        self._consecutive_failures += 1
        if self._consecutive_failures >= self._settings.max_consecutive_failures:
            raise WorkerError(
                f"{self._consecutive_failures} groups in a row were lost; the last one ({group.group_id}) "
                f"as {reason}: {detail}"
            )

    def _emit_dropped(self, group: _Admitted, reason: DropReason, detail: str) -> None:
        self._recorder.emit(
            GroupDropped(
                term=self._term,
                group=group.group_id,
                prompt_index=group.prompt_index,
                samples=group.sample_ids,
                reason=reason,
                detail=detail[:500],
            )
        )

    async def _beat(self) -> None:
        while True:
            progress = self._requester.tokens + self._finished
            self._recorder.emit(Heartbeat(member=self._recorder.actor, progress=progress))
            self._heartbeat(progress, self.blocked_by)
            await asyncio.sleep(self._settings.heartbeat_every_s)


def _no_texts(row: JsonDict, completions: Sequence[tuple[int, ...]]) -> tuple[str, list[str]]:
    return "", [""] * len(completions)


def sample_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """A seed for one sample, spread over 62 bits by the splitmix64 finaliser (Steele et al., 2014)."""
    mask = (1 << 64) - 1
    value = (seed * 0x9E3779B97F4A7C15 + prompt_index * 0xD1B54A32D192ED03 + sample_index) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 2
