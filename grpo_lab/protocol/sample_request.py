"""One completion from dispatch to its last token: retries, engine choice, partial continuations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from grpo_lab.errors import (
    EngineError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    PhaseTimeout,
    WorkerError,
)
from grpo_lab.events import SampleCompleted, SampleDispatched
from grpo_lab.ports import Engine, Recorder
from grpo_lab.protocol.timeouts import bounded
from grpo_lab.types import Completion, DropReason, GenerateRequest, SamplingParams, VersionSpan

BUSY_STATUSES = frozenset({429, 502, 503, 504})
STALE_TERM_STATUS = 409
OUT_OF_SERVICE_STATUS = 503
FINITE_LOGPROBS = 1e30
CONTINUATION_SEED_STRIDE = 1_000_003  # a continued sample must not draw the same random numbers again


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Bounds of one request.

    Attributes:
        timeout_s: one answer, including the time that the engine is paused.
        retries: further tries after a time-out or a 5xx, before the group is given up.
        retry_delay_s: between tries; also the pace at which an absent engine is looked for.
        engine_gone_after_s: when nothing but refused connections has come for so long, the run ends.
        avoid_s: an engine that could not be reached, did not answer, or is out of service (503) gets no
            request for so long while another one is there.
        max_continuations: how often a sample that pause(abort) cut off is taken up again.
        commit_s: until provisional tokens are committed or lost; None is ``timeout_s``. Rolling it must be a
            whole sync: the first engine is ahead until the last has had its turn.
    """

    timeout_s: float = 60.0
    retries: int = 2
    retry_delay_s: float = 0.25
    engine_gone_after_s: float = 10.0
    avoid_s: float = 30.0
    max_continuations: int = 32
    commit_s: float | None = None


class SampleLost(Exception):
    """This sample, and with it its group, ends here. Internal to the worker."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: DropReason = reason
        self.detail = detail


class _OutOfService(Exception):
    """The engine was fenced while it had the request."""


class SampleRequester:
    """Sends samples to the least busy engine and brings back whole completions.

    ``version`` is the newest one that is known to be committed. Tokens of a newer one are *provisional*:
    they are given out when it has been committed, and lost (``canary_failed``) when their engine is fenced.
    """

    def __init__(
        self, engines: Sequence[Engine], settings: RequestSettings, recorder: Recorder, version: int
    ) -> None:
        self._engines = tuple(engines)
        self._settings = settings
        self._recorder = recorder
        self._avoid_until_s = {engine.name: 0.0 for engine in engines}
        self._fenced: set[str] = set()
        self._fencings = dict.fromkeys(self._avoid_until_s, 0)  # how often each was put out of service
        self._asking: dict[str, dict[str, asyncio.Timeout]] = {engine.name: {} for engine in engines}
        self._version = version
        self._news = asyncio.Event()
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens received so far: a measure of progress."""
        return self._tokens

    def update_model_version(self, version: int) -> None:
        """``version`` is committed."""
        self._version = max(self._version, version)
        self._news.set()

    def fence(self, names: Iterable[str]) -> None:
        """Exactly these engines are out of service: they get no request, and what they have is asked for
        elsewhere. Others that were, have come back. Names that are not known are ignored.
        """
        before, self._fenced = self._fenced, {name for name in names if name in self._asking}
        for name, requests in self._asking.items():
            if name in self._fenced and name not in before:
                self._fencings[name] += 1
                for scope in requests.values():
                    scope.reschedule(asyncio.get_running_loop().time())
            elif name in before and name not in self._fenced:
                self._avoid_until_s[name] = 0.0
        self._news.set()

    async def sample(
        self,
        sample_id: str,
        group_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        term: int,
        version: int,
    ) -> Completion:
        """The completion, continued where a pause cut it off. Raises ``SampleLost`` or ``WorkerError``."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        engine = self._least_busy()
        self._recorder.emit(
            SampleDispatched(
                term=term,
                sample=sample_id,
                group=group_id,
                engine=engine.name,
                version=version,
                request=sample_id,
            )
        )
        parts: list[Completion] = []
        for continuation in range(self._settings.max_continuations + 1):
            request = _request(sample_id, prompt, parts, sampling, term, continuation)
            part, engine = await self._answer(engine, request)
            await self._committed(part, engine)
            if part.finish_reason == "abort" and len(part.token_ids) >= request.sampling.max_tokens:
                part = replace(part, finish_reason="length")  # nothing is left to continue
            parts.append(part)
            if part.finish_reason != "abort":
                break
            engine = self._least_busy()
        else:
            raise SampleLost("aborted", f"cut off {len(parts)} times")
        whole = _join(sample_id, parts)
        self._emit_completed(whole, group_id, term, loop.time() - started_s)
        return whole

    async def _committed(self, part: Completion, engine: Engine) -> None:
        """Returns when no token of ``part`` is provisional. Raises ``SampleLost``."""
        newest = max((span.version for span in part.spans), default=0)
        fencings = self._fencings[engine.name]
        settings = self._settings
        limit_s = settings.timeout_s if settings.commit_s is None else settings.commit_s
        try:
            async with asyncio.timeout(limit_s):
                while newest > self._version:
                    self._news.clear()
                    await self._news.wait()
                    # First: the engine may have been fenced, and the version committed without it.
                    if self._fencings[engine.name] != fencings:
                        raise SampleLost(
                            "canary_failed", f"version {newest} on {engine.name}, which is out of service"
                        )
        except TimeoutError:
            raise SampleLost(
                "canary_failed", f"version {newest} of {engine.name} was not committed within {limit_s:g} s"
            ) from None

    async def _answer(self, engine: Engine, request: GenerateRequest) -> tuple[Completion, Engine]:
        """One answer and whose it is, within the retries. A refusal of the request itself is final."""
        loop = asyncio.get_running_loop()
        absent_since_s: float | None = None
        failures = 0
        while True:
            try:
                completion = await self._ask(engine, request)
                self._tokens += len(completion.token_ids)
                return completion, engine
            except _OutOfService:
                engine = self._least_busy()
                continue  # no fault of the request
            except EngineRefused as error:
                if error.status == STALE_TERM_STATUS:
                    raise WorkerError(f"{engine.name} serves a newer term: {error}") from error
                if error.status not in BUSY_STATUSES and error.status < 500:
                    raise SampleLost("request_refused", str(error)) from error
                if error.status == OUT_OF_SERVICE_STATUS:
                    self._avoid(engine)  # it answers so fast that it would always be the least busy one
                failures += 1
                last: Exception = error
            except EngineUnreachable as error:
                absent_since_s = loop.time() if absent_since_s is None else absent_since_s
                if loop.time() - absent_since_s >= self._settings.engine_gone_after_s:
                    raise WorkerError(
                        f"{engine.name} has been gone for {self._settings.engine_gone_after_s:g} s: {error}"
                    ) from error
                self._avoid(engine)
                last = error
            except (EngineTimeout, PhaseTimeout) as error:
                self._avoid(engine)
                failures += 1
                last = error
            except EngineError as error:
                failures += 1
                last = error
            if not isinstance(last, EngineUnreachable):
                absent_since_s = None  # somebody is there
            if failures > self._settings.retries:
                raise SampleLost("request_failed", f"{failures} tries: {last}")
            await asyncio.sleep(self._settings.retry_delay_s)
            engine = self._least_busy(unless=engine.name)

    async def _ask(self, engine: Engine, request: GenerateRequest) -> Completion:
        asking, what = self._asking[engine.name], f"{request.request_id} on {engine.name}"
        try:
            async with asyncio.timeout(None) as scope:  # ``fence`` ends it
                asking[request.request_id] = scope
                completion = await bounded(engine.generate(request), self._settings.timeout_s, what)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise _OutOfService(what) from error
        finally:
            del asking[request.request_id]
        if not all(span.version for span in completion.spans):
            self._avoid(engine)
            raise EngineError(f"{engine.name} serves weights of no sync: it has restarted")
        return completion

    def _avoid(self, engine: Engine) -> None:
        now_s = asyncio.get_running_loop().time()
        self._avoid_until_s[engine.name] = now_s + self._settings.avoid_s

    def _least_busy(self, unless: str = "") -> Engine:
        """Ties go to the first engine, so that the choice depends on nothing but load and behaviour.

        A dead engine fails so fast that it would always be the least busy one: hence ``_avoid``. Raises
        ``WorkerError`` when all engines are out of service.
        """
        now_s = asyncio.get_running_loop().time()
        serving = [engine for engine in self._engines if engine.name not in self._fenced]
        if not serving:
            raise WorkerError(f"all engines are out of service: {', '.join(sorted(self._fenced))}")
        candidates = [engine for engine in serving if engine.name != unless] or serving
        best, least = candidates[0], (True, math.inf)
        for engine in candidates:
            name = engine.name
            load = (self._avoid_until_s[name] > now_s, len(self._asking[name]))
            if load < least:
                best, least = engine, load
        return best

    def _emit_completed(self, whole: Completion, group_id: str, term: int, duration_s: float) -> None:
        finite = abs(sum(whole.logprobs)) < FINITE_LOGPROBS  # one that is not makes the sum so
        self._recorder.emit(
            SampleCompleted(
                term=term,
                sample=whole.request_id,
                group=group_id,
                engine=whole.engine,
                finish_reason=whole.finish_reason,
                tokens=len(whole.token_ids),
                logprobs=len(whole.logprobs),
                logprobs_finite=finite,
                spans=tuple((span.term, span.version, span.start, span.end) for span in whole.spans),
                version_source=whole.version_source if whole.spans else "none",
                duration_s=duration_s,
            )
        )


def _request(
    sample_id: str,
    prompt: tuple[int, ...],
    parts: Sequence[Completion],
    sampling: SamplingParams,
    term: int,
    continuation: int,
) -> GenerateRequest:
    done = tuple(chain.from_iterable(part.token_ids for part in parts))
    seed = None if sampling.seed is None else sampling.seed + continuation * CONTINUATION_SEED_STRIDE
    rest = replace(
        sampling,
        max_tokens=sampling.max_tokens - len(done),
        min_tokens=max(0, sampling.min_tokens - len(done)),
        seed=seed,
    )
    request_id = f"{sample_id}.c{continuation}" if continuation else sample_id
    return GenerateRequest(request_id, prompt + done, rest, "rollout", term)


def _join(sample_id: str, parts: Sequence[Completion]) -> Completion:
    """Parts in order as one completion, neighbouring spans of one version merged."""
    if len(parts) == 1 and parts[0].request_id == sample_id:
        return parts[0]
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.spans:
            moved = replace(span, start=span.start + offset, end=span.end + offset)
            last = spans[-1] if spans else None
            if last is not None and (last.term, last.version, last.kv_version) == (
                moved.term,
                moved.version,
                moved.kv_version,
            ):
                spans[-1] = replace(last, end=moved.end)
            else:
                spans.append(moved)
        offset += len(part.token_ids)
    return Completion(
        request_id=sample_id,
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        finish_reason=parts[-1].finish_reason,
        spans=tuple(spans),
        engine=parts[-1].engine,
        version_source=parts[-1].version_source,
    )
