"""Detectors: figures that look wrong although no rule of the protocol was broken, with their thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    EngineFailed,
    FaultInjected,
    GroupConsumed,
    GroupDropped,
    LogprobGapMeasured,
    MemoryMeasured,
    OptimizerStepApplied,
    Record,
    SampleCompleted,
    SyncAborted,
    SyncBegan,
    SyncEnded,
    TermBegan,
    WeightsPublished,
)

D1_MEAN_SHARE = 0.5  # of the tolerance that single tokens have
D2_MIN_MEASUREMENTS, D2_GROWTH = 32, 0.05
D2_STEADY = 0.6  # Kendall's tau: trainers without a leak had up to 0.5 over 40 syncs, a steady leak has 1
D2_KEPT = 256
D3_MIN_GROUPS, D3_MIN_DROPPED, D3_BIAS, D3_ERRORS = 64, 16, 0.05, 4.0
D4_MIN_SYNCS, D4_SHARE, D4_SECONDS = 10, 0.5, 0.2


class LogprobGapSystematic(Rule):
    """S24 looks at the worst token; a mean near its tolerance means that the sides compute different things.
    ``exp(mean gap)`` is about the importance ratio that such a token has at equal weights.
    """

    id = "D1"
    words = f"at equal weights the mean logprob gap stays below {D1_MEAN_SHARE:g} of the tolerance"
    parameters = ("logprob_tolerance",)

    @on(LogprobGapMeasured)
    def measured(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, LogprobGapMeasured)
        if self.context.declared.parameters.get("clear_cache") is False:
            return
        limit = D1_MEAN_SHARE * self.context.parameter("logprob_tolerance")
        self.count()
        if not event.gap_mean <= limit:
            self.violate(
                f"at equal weights (version {event.version}) the logprobs of engine and trainer differ by "
                f"{event.gap_mean:.3g} on average over {event.tokens} tokens (ratio "
                f"{math.exp(event.gap_mean):.4g} instead of 1); the limit is {limit:.3g}",
                record,
            )


@dataclass(slots=True)
class _Memory:
    """Every ``stride``-th measurement, so that a long run needs no more memory than a short one."""

    seen: int = 0
    stride: int = 1
    kept: list[tuple[int, int, str]] = field(default_factory=list)  # bytes, which measurement, event id

    def add(self, resident_bytes: int, event_id: str) -> None:
        self.seen += 1
        if self.seen % self.stride:
            return
        self.kept.append((resident_bytes, self.seen, event_id))
        if len(self.kept) >= D2_KEPT:
            self.kept = self.kept[1::2]
            self.stride *= 2

    def second_half(self) -> list[tuple[int, int, str]]:
        return [one for one in self.kept if one[1] > self.seen / 2]


def _trend(measured: Sequence[tuple[int, int, str]]) -> tuple[float, float]:
    """How steadily the values rise, from -1 to 1 (Kendall 1938, tau-a), and the median of the slopes of all
    pairs, in bytes a measurement (Theil 1950, Sen 1968): neither is moved by peaks.
    """
    pairs = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in combinations(measured, 2)]
    signs = sum((rise > 0) - (rise < 0) for rise, _ in pairs)
    return signs / len(pairs), median(rise / apart for rise, apart in pairs)


class MemoryGrows(Rule):
    """A leak still grows steadily in the second half of a run. Allocators that warm up have filled by then;
    afterwards the memory of a trainer goes up and down by a tenth, as it pleases them.
    """

    id = "D2"
    words = (
        f"a member's memory does not grow from sync to sync: not steadily, at {D2_GROWTH:.0%} or more over "
        "the run, in its second half"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._memory: dict[str, _Memory] = {}

    @on(MemoryMeasured)
    def measured(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, MemoryMeasured)
        self._memory.setdefault(event.member, _Memory()).add(event.resident_bytes, record.id)

    def finish(self, last: Record | None) -> None:
        for member, memory in self._memory.items():
            if memory.seen < D2_MIN_MEASUREMENTS:
                continue
            self.count()
            half = memory.second_half()
            steadiness, slope = _trend(half)
            before = median(value - slope * (number - half[0][1]) for value, number, _ in half)
            if steadiness >= D2_STEADY and slope * memory.seen > D2_GROWTH * before:
                after = before + slope * (half[-1][1] - half[0][1])
                self.violate(
                    f"the memory of {member} still grew in the second half of the run, steadily from "
                    f"{before / 2**20:.1f} to {after / 2**20:.1f} MiB, about {slope / 2**10:.1f} KiB a sync",
                    None,
                    half[0][2],
                    half[len(half) // 2][2],
                    half[-1][2],
                )


@dataclass(slots=True)
class _Moments:
    """Count, mean and sum of squared deviations (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    @property
    def error_squared(self) -> float:
        return self.squares / max(1, self.count - 1) / max(1, self.count)


class ConsumedLikeDispatched(Rule):
    """Compares the mean completion length of consumed groups with that of all groups that completed. What was
    dropped because the run or term ended says nothing about the policy and is left out. Prompts are seen by
    the length of their answers only: the events do not name a prompt's row.
    """

    id = "D3"
    words = f"what is trained on is as long as what was generated, within {D3_BIAS:.0%}"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._lengths: dict[str, list[int]] = {}
        self._consumed, self._dropped = _Moments(), _Moments()
        self._last_drop = ""

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        self._lengths.setdefault(event.group, []).append(event.tokens)

    @on(GroupConsumed, GroupDropped)
    def ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupConsumed | GroupDropped)
        lengths = self._lengths.pop(event.group, None)
        if lengths is None:
            return
        mean = sum(lengths) / len(lengths)
        if isinstance(event, GroupConsumed):
            self._consumed.add(mean)
        elif event.reason not in ("shutdown", "term_ended") and len(lengths) == len(event.samples):
            self._dropped.add(mean)
            self._last_drop = record.id

    def finish(self, last: Record | None) -> None:
        used, lost = self._consumed, self._dropped
        if used.count + lost.count < D3_MIN_GROUPS or used.count == 0:
            return
        self.count()
        if lost.count < D3_MIN_DROPPED:
            return  # so few cannot move the mean
        everything = (used.count * used.mean + lost.count * lost.mean) / (used.count + lost.count)
        bias = used.mean / everything - 1 if everything else 0.0
        error = math.sqrt(used.error_squared + lost.error_squared)
        if abs(bias) > D3_BIAS and abs(used.mean - lost.mean) > D3_ERRORS * error:
            self.violate(
                f"the {used.count} groups that were trained on have {used.mean:.1f} tokens a sample on "
                f"average, the {lost.count} dropped ones {lost.mean:.1f}: training sees completions that are "
                f"{abs(bias):.0%} {'shorter' if bias < 0 else 'longer'} than what was generated",
                None,
                self._last_drop,
            )


class FixedWaits(Rule):
    """A sleep somewhere in a sync shows as time that no phase explains. A sync in which something failed, or
    was made to, waited for that.
    """

    id = "D4"
    words = (
        f"over {D4_MIN_SYNCS} or more syncs, no more than {D4_SHARE:.0%} of their time and {D4_SECONDS:g} s "
        "each lie outside the named phases"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._syncs = 0
        self._total_s = self._unexplained_s = 0.0
        self._worst: tuple[float, str] = (0.0, "")
        self._disturbed = False

    @on(SyncBegan)
    def began(self, record: Record) -> None:
        self._disturbed = False

    @on(EngineFailed, FaultInjected, SyncAborted)
    def disturbed(self, record: Record) -> None:
        self._disturbed = True

    @on(SyncEnded)
    def ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncEnded)
        total_s = event.phases_s.get("total")
        if self._disturbed or event.outcome != "committed" or total_s is None or len(event.phases_s) < 2:
            return
        named_s = sum(seconds for phase, seconds in event.phases_s.items() if phase != "total")
        unexplained_s = max(0.0, total_s - named_s)
        self._syncs += 1
        self._total_s += total_s
        self._unexplained_s += unexplained_s
        self._worst = max(self._worst, (unexplained_s, record.id))

    def finish(self, last: Record | None) -> None:
        if self._syncs < D4_MIN_SYNCS:
            return
        self.count(self._syncs)
        each_s = self._unexplained_s / self._syncs
        if each_s > D4_SECONDS and self._unexplained_s > D4_SHARE * self._total_s:
            self.violate(
                f"{self._unexplained_s:.1f} s of the {self._total_s:.1f} s of {self._syncs} syncs lie in no "
                f"named phase, {each_s:.2f} s each: something waits for a fixed time",
                None,
                self._worst[1],
            )


class PayloadChanges(Rule):
    """Weaker with a narrow wire format: a very small step may round to the same bytes."""

    id = "D5"
    words = "when the parameters changed, the published bytes change"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._published: tuple[tuple[int, int], tuple[int, ...], str] | None = None
        self._changed_by = ""

    @on(TermBegan)
    def began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, TermBegan)
        from_nothing = event.base_version == 0 and event.optimizer_step == 0
        if event.checkpoint or from_nothing:  # the weights may be those of an earlier version again
            self._published, self._changed_by = None, ""

    @on(OptimizerStepApplied)
    def applied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, OptimizerStepApplied)
        if event.changed:
            self._changed_by = record.id

    @on(WeightsPublished)
    def published(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsPublished)
        if not event.bucket_hashes:
            return
        version = (event.term, event.version)
        if self._published is not None and self._published[0] != version and self._changed_by:
            self.count()
            if self._published[1] == event.bucket_hashes:
                self.violate(
                    f"version {event.version} was published with the very bytes of version "
                    f"{self._published[0][1]}, although an optimizer step had changed the parameters in "
                    "between: what is trained is not what is sent",
                    record,
                    self._published[2],
                    self._changed_by,
                )
        if self._published is None or self._published[0] != version:
            self._changed_by = ""
        self._published = (version, event.bucket_hashes, record.id)


METRIC_RULES: tuple[type[Rule], ...] = (
    LogprobGapSystematic,
    MemoryGrows,
    ConsumedLikeDispatched,
    FixedWaits,
    PayloadChanges,
)
