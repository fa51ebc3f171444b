"""Rules about how an engine switches weights: not in a step, on all shards at once, with fresh caches."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.check.naming import Weights, weights_name
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.check.token_rules import TOKEN_RULES
from grpo_lab.events import (
    CacheHit,
    MemberDied,
    MemberStarted,
    ModelStep,
    Record,
    RequestFinished,
    WeightsActivated,
    WeightWriteBegan,
    WeightWriteEnded,
)

_Shard = tuple[str, str, int]  # actor, engine, shard: numbers are compared within one actor only


@dataclass(slots=True)
class _Write:
    """A write of served weights, from event to event; ``ended_seq`` is None while it goes on."""

    weights: Weights
    began: str
    ended_seq: int | None = None


class NoStepDuringAWrite(Rule):
    """A step happened from ``began_seq`` to its own record; no write of that shard lies in between."""

    id = "S7"
    words = "no model step overlaps a weight write on that engine"
    capability = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._writes: dict[_Shard, _Write] = {}  # the newest of each shard

    @on(WeightWriteBegan)
    def write_began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightWriteBegan)
        shard = (record.actor, event.engine, event.shard)
        self._writes[shard] = _Write((event.term, event.version), record.id)

    @on(WeightWriteEnded)
    def write_ended(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightWriteEnded)
        write = self._writes.get((record.actor, event.engine, event.shard))
        if write is not None:
            write.ended_seq = record.seq

    @on(ModelStep)
    def stepped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ModelStep)
        write = self._writes.get((record.actor, event.engine, event.shard))
        if write is None:
            return
        self.count()
        if write.ended_seq is None or write.ended_seq >= event.began_seq:
            shard = f" (shard {event.shard})" if event.shard else ""
            self.violate(
                f"steps {event.first_step} to {event.last_step} of {event.engine}{shard} overlap the write "
                f"of {weights_name(write.weights)}",
                record,
                write.began,
            )

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        for shard in [shard for shard in self._writes if shard[1] == event.member]:
            del self._writes[shard]


class ShardsSwitchTogether(Rule):
    """All shards (ranks, pipeline stages) of an engine activate a version at the same step."""

    id = "S8"
    words = "all ranks of an engine switch between the same two steps"
    capability = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._shards: dict[str, dict[int, tuple[Weights, int, str]]] = {}  # weights, first step, event

    @on(WeightsActivated)
    def activated(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, WeightsActivated)
        shards = self._shards.setdefault(event.engine, {})
        weights = (event.term, event.version)
        for shard, (other, first_step, proof) in shards.items():
            if shard != event.shard and other == weights:
                self.count()
                if first_step != event.first_step:
                    self.violate(
                        f"shard {event.shard} of {event.engine} switches to {weights_name(weights)} at step "
                        f"{event.first_step}, but shard {shard} does at step {first_step}",
                        record,
                        proof,
                    )
                    break
        shards[event.shard] = (weights, event.first_step, record.id)

    @on(ModelStep)
    def stepped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, ModelStep)
        shards = self._shards.get(event.engine)
        if shards is None or len(shards) < 2 or event.shard not in shards:
            return
        self.count()
        weights, _, own = shards[event.shard]
        for shard, (other, first_step, proof) in shards.items():
            if other > weights and event.last_step >= first_step:
                self.violate(
                    f"shard {event.shard} of {event.engine} ran step {event.last_step} on "
                    f"{weights_name(weights)}, but shard {shard} is on {weights_name(other)} from step "
                    f"{first_step} on",
                    record,
                    own,
                    proof,
                )
                return

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        self._shards.pop(event.member, None)


class CachesKeepToTheirVersion(Rule):
    """Neither a hit in a cache nor the KV of a request is older than the weights that sample from it.

    It may be where the run declared so (``prefix_policy`` shared, or ``clear_cache`` off without a policy);
    then the tokens say how old their KV is.
    """

    id = "S17"
    words = "after an activation no cached work of an older version serves a new request, unless declared"
    parameters = ("clear_cache",)
    capability = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        policy = context.declared.parameters.get("prefix_policy")
        self._keeps_kv = not context.parameter("clear_cache")
        self._shared = self._keeps_kv if policy is None else policy == "shared"
        self._older: dict[tuple[str, str], tuple[int, str]] = {}  # (engine, request) -> version, hit

    @on(CacheHit)
    def hit(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, CacheHit)
        self.count()
        content, weights = (event.content_term, event.content_version), (event.term, event.version)
        if content == weights:
            return
        if self._shared:
            self._older.setdefault((event.engine, event.request), (event.content_version, record.id))
            return
        self.violate(
            f"request {event.request} on {event.engine} reuses {event.tokens} tokens of the {event.cache} "
            f"cache that {weights_name(content)} computed, under {weights_name(weights)}",
            record,
        )

    @on(RequestFinished)
    def finished(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestFinished)
        if self._older:
            self._require_told(event, record)
        if self._keeps_kv or self._shared or event.kv_version is None or not event.spans:
            return
        self.count()
        first = event.spans[0][1]
        if event.kv_version < first:
            self.violate(
                f"request {event.request} on {event.engine} was sampled by version {first} from its first "
                f"token on, over KV of version {event.kv_version}",
                record,
            )

    @on(MemberDied, MemberStarted)
    def emptied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, (MemberDied, MemberStarted))
        for key in [key for key in self._older if key[0] == event.member]:
            del self._older[key]

    def _require_told(self, event: RequestFinished, record: Record) -> None:
        older = self._older.pop((event.engine, event.request), None)
        if older is None or not event.tokens:
            return
        self.count()
        version, proof = older
        if event.kv_version is None or event.kv_version > version:
            said = "none" if event.kv_version is None else f"{event.kv_version}"
            self.violate(
                f"request {event.request} on {event.engine} reused work of version {version}, but says of "
                f"its oldest KV's version: {said}",
                record,
                proof,
            )


ENGINE_RULES: tuple[type[Rule], ...] = (
    *TOKEN_RULES,
    NoStepDuringAWrite,
    ShardsSwitchTogether,
    CachesKeepToTheirVersion,
)
