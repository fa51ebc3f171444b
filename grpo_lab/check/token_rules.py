"""Rules about the versions that tokens carry."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from grpo_lab.check.naming import Weights, weights_name
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    GroupDropped,
    MemberDied,
    MemberStarted,
    ModelStep,
    Record,
    RequestFinished,
    SampleCompleted,
    SampleDispatched,
    WeightsActivated,
    WeightsPublished,
)

_KEPT_ACTIVATIONS = 1024  # a request that spans more of them is not compared any more
_CONTINUATION = ".c"  # request n of a sample that pauses cut off is named sample.cn
_Spans = list[tuple[Weights, int]]  # weights and how many tokens in a row they sampled


@dataclass(slots=True)
class _Activations:
    """From which step on an engine (or one shard of it) ran which weights. Before the first: version 0."""

    first_steps: list[int] = field(default_factory=lambda: [-1])
    weights: list[Weights] = field(default_factory=lambda: [(0, 0)])
    events: list[str] = field(default_factory=lambda: [""])

    def add(self, first_step: int, weights: Weights, event: str) -> None:
        self.first_steps.append(first_step)
        self.weights.append(weights)
        self.events.append(event)
        if len(self.events) > _KEPT_ACTIVATIONS:
            del self.first_steps[0], self.weights[0], self.events[0]

    def at(self, step: int) -> tuple[Weights, str] | None:
        """None for a step that is too long ago."""
        place = bisect_right(self.first_steps, step) - 1
        return None if place < 0 else (self.weights[place], self.events[place])


@dataclass(slots=True)
class _Sample:
    dispatched: str
    engine: str
    version: int
    heard: _Spans = field(default_factory=list)  # from its requests, in order


class TokensNameTheirVersion(Rule):
    """A model step runs under the weights that are active then, a request's spans name those of their
    steps, and a sample carries what its requests said.

    Engines without events (weaker): a sample's versions lie between the committed one that its dispatcher
    knew (one less in rolling scope) and the newest that was published.
    """

    id = "S4"
    words = "a token's version is the one that its engine had active at that step"
    capability = "events"
    weaker = "between the version known at dispatch and the newest published one"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._lag = 1 if context.declared.parameters.get("scope") == "rolling" else 0
        self._active: dict[str, dict[int, _Activations]] = {}  # engine -> shard
        self._samples: dict[str, _Sample] = {}
        self._published: tuple[Weights, str] = ((0, 0), "")

    @on(WeightsActivated)
    def activated(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsActivated)
        shards = self._active.setdefault(event.engine, {})
        series = shards.setdefault(event.shard, _Activations())
        series.add(event.first_step, (event.term, event.version), record.id)

    @on(WeightsPublished)
    def published(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsPublished)
        self._published = max(self._published, ((event.term, event.version), record.id))

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._active.pop(event.member, None)

    @on(ModelStep)
    def stepped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ModelStep)
        series = self._active.get(event.engine, {}).get(event.shard)
        if series is None:
            return
        self.count()
        claimed = (event.term, event.version)
        for step in {event.first_step, event.last_step}:
            found = series.at(step)
            if found is not None and found[0] != claimed:
                self.violate(
                    f"{event.engine} ran step {step} under {weights_name(claimed)}, but "
                    f"{weights_name(found[0])} was active",
                    record,
                    found[1],
                )
                return

    @on(SampleDispatched)
    def dispatched(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleDispatched)
        if event.sample not in self._samples:
            self._samples[event.sample] = _Sample(record.id, event.engine, event.version)

    @on(RequestFinished)
    def finished(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestFinished)
        if not event.spans:
            return
        sample = self._samples.get(event.request)
        if sample is None:
            sample = self._samples.get(event.request.rpartition(_CONTINUATION)[0])
        if sample is not None:
            sample.heard += [((row[0], row[1]), row[3] - row[2]) for row in event.spans]
        shards = self._active.get(event.engine)
        if shards is not None:
            self.count()
            self._judge_request(event, shards[min(shards)], record)

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        sample = self._samples.pop(event.sample, None)
        if sample is None or event.version_source == "none" or not event.spans:
            return
        if sample.heard:
            self.count()
            self._judge_sample(event, sample, record)
        elif not event.provisional and not self.context.engine_can(event.engine, "events"):
            self.count()
            self._judge_range(event, sample, record)

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        for sample in event.samples:
            self._samples.pop(sample, None)

    def _judge_request(self, event: RequestFinished, series: _Activations, record: Record) -> None:
        end = 0
        for term, version, start, stop, *steps in event.spans:
            if start != end:
                self.violate(
                    f"the spans of request {event.request} on {event.engine} do not join: one ends at token "
                    f"{end}, the next begins at {start}",
                    record,
                )
                return
            end = stop
            for step in steps:
                found = series.at(step)
                if found is not None and found[0] != (term, version):
                    self.violate(
                        f"tokens {start} to {stop} of request {event.request} are tagged "
                        f"{weights_name((term, version))}, but at step {step} {event.engine} had "
                        f"{weights_name(found[0])} active",
                        record,
                        found[1],
                    )
                    return
        if end != event.tokens:
            self.violate(
                f"the spans of request {event.request} on {event.engine} cover {end} of {event.tokens} "
                "tokens",
                record,
            )

    def _judge_sample(self, event: SampleCompleted, sample: _Sample, record: Record) -> None:
        said = _merged([((row[0], row[1]), row[3] - row[2]) for row in event.spans])
        heard = _merged(sample.heard)
        if sum(tokens for _, tokens in heard) == event.tokens:
            agrees = said == heard
        else:  # requests whose answers were lost are among them
            agrees = {weights for weights, _ in said} <= {weights for weights, _ in heard}
        if not agrees:
            self.violate(
                f"sample {event.sample} carries {_described(said)}, but its requests were sampled with "
                f"{_described(heard)}",
                record,
                sample.dispatched,
            )

    def _judge_range(self, event: SampleCompleted, sample: _Sample, record: Record) -> None:
        newest, proof = self._published
        lowest = (event.term, sample.version - self._lag)
        for row in event.spans:
            weights = (row[0], row[1])
            if not lowest <= weights <= newest:
                self.violate(
                    f"sample {event.sample} from {event.engine} carries {weights_name(weights)}, but it was "
                    f"sent when {weights_name((event.term, sample.version))} was committed, and the newest "
                    f"published version is {weights_name(newest)}",
                    record,
                    sample.dispatched,
                    *((proof,) if proof else ()),
                )
                return


class VersionsOfASampleRise(Rule):
    """Within a sample, across pauses and engines, later tokens come from the same or newer weights."""

    id = "S5"
    words = "token versions of a sample never decrease"

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        if len(event.spans) > 1:
            self._judge(f"sample {event.sample}", event.spans, record)

    @on(RequestFinished)
    def finished(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestFinished)
        if len(event.spans) > 1:
            self._judge(f"request {event.request} on {event.engine}", event.spans, record)

    def _judge(self, what: str, spans: tuple[tuple[int, ...], ...], record: Record) -> None:
        self.count()
        for (*before, _, _), (*after, _, _) in zip(
            (row[:4] for row in spans), (row[:4] for row in spans[1:]), strict=False
        ):
            if after < before:
                names = f"{weights_name((before[0], before[1]))} by {weights_name((after[0], after[1]))}"
                self.violate(f"in {what}, tokens of {names} are followed", record)
                return


def _merged(spans: _Spans) -> _Spans:
    """Neighbours of one version as one; empty ones left out."""
    merged: _Spans = []
    for weights, tokens in spans:
        if merged and merged[-1][0] == weights:
            merged[-1] = (weights, merged[-1][1] + tokens)
        elif tokens:
            merged.append((weights, tokens))
    return merged


def _described(spans: _Spans) -> str:
    return ", ".join(f"{tokens} tokens of {weights_name(weights)}" for weights, tokens in spans) or "nothing"


TOKEN_RULES: tuple[type[Rule], ...] = (TokensNameTheirVersion, VersionsOfASampleRise)
