"""How old a sample may be: when it is used (S18), when its prompt is let in (S19), before anything (S31)."""

from __future__ import annotations

from collections.abc import Iterable

from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    GroupAdmitted,
    GroupConsumed,
    GroupDropped,
    MicroBatchBegan,
    OptimizerStepApplied,
    Record,
    RequestAdmitted,
    RequestFinished,
    SampleCompleted,
    SampleDispatched,
    SyncBegan,
    TermBegan,
    VersionCommitted,
)

NOT_LOST = frozenset({"stale", "shutdown", "term_ended"})  # such drops free no place for another prompt


class StalenessAtConsumption(Rule):
    """Age is taken at the moment at which the gradient uses a token, against the version in force then.

    The oldest version of a sample comes from the engine's own account of the request where there is one,
    else from the completion, else from what the trainer says. The optimizer step of a version is the number
    of steps applied before its sync began; only traces without applied steps rely on what the sync says.
    """

    id = "S18"
    words = "no token is older than the staleness bound when it is trained on, and none is from the future"
    parameters = ("max_staleness",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._limit: int = context.parameter("max_staleness")
        self._limit_steps: int | None = context.declared.parameters.get("max_staleness_steps")
        self._committed: dict[int, tuple[int, str, str]] = {}  # term -> version, actor, event id
        self._applied: dict[int, int] = {}  # term -> optimizer steps applied before now
        self._sync_step: dict[tuple[int, int], int] = {}
        self._engine_first: dict[tuple[str, str], tuple[int, int, str]] = {}  # first version, tokens, id
        self._first: dict[str, tuple[int, str]] = {}  # sample -> oldest version, event id
        self._in_step: dict[str, tuple[int, str]] = {}  # group in the step -> oldest version, event id

    # -- versions and optimizer steps ---------------------------------------------------------------

    @on(TermBegan)
    def began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, TermBegan)
        self._applied = {event.term: event.optimizer_step}
        self._committed.clear()
        self._sync_step.clear()
        self._in_step.clear()

    @on(SyncBegan)
    def sync_began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SyncBegan)
        step = self._applied.get(event.term, event.optimizer_step)
        self._sync_step.setdefault((event.term, event.version), step)

    @on(VersionCommitted)
    def committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        self._committed[event.term] = (event.version, record.actor, record.id)
        self._sync_step.setdefault((event.term, event.version), event.optimizer_step)
        oldest = event.version - self._limit - 64
        if len(self._sync_step) > 2 * (self._limit + 64):
            self._sync_step = {key: step for key, step in self._sync_step.items() if key[1] >= oldest}

    @on(OptimizerStepApplied)
    def applied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, OptimizerStepApplied)
        self._applied[event.term] = event.optimizer_step + 1
        self._in_step.clear()

    # -- what the tokens were sampled with -----------------------------------------------------------

    @on(RequestFinished)
    def request_finished(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestFinished)
        if event.request_kind == "rollout" and event.spans:
            oldest = min(span[1] for span in event.spans)
            self._engine_first[event.engine, event.request] = (oldest, event.tokens, record.id)

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        told = self._engine_first.pop((event.engine, event.sample), None)
        if told is not None and told[1] == event.tokens:  # else it was continued elsewhere, or tried again
            self._first[event.sample] = (told[0], told[2])
        elif event.spans:
            self._first[event.sample] = (min(span[1] for span in event.spans), record.id)

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        self._forget(event.samples)

    def _forget(self, samples: Iterable[str]) -> None:
        for sample in samples:
            self._first.pop(sample, None)

    # -- consumption -----------------------------------------------------------------------------------

    @on(GroupConsumed)
    def consumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupConsumed)
        now, proof = self._version_now(record, event.term, event.version)
        oldest: tuple[int, str] | None = None
        for sample, said, last in zip(event.samples, event.versions_first, event.versions_last, strict=False):
            first, source = self._first.get(sample, (said, ""))
            if first != said:
                self.violate(
                    f"the trainer took sample {sample} for one of version {said}, but its first token was "
                    f"sampled with version {first}: its age is {now - first} versions, not {now - said}",
                    record,
                    source,
                )
            if last > now:
                self.violate(
                    f"sample {sample} ends with tokens of version {last}, but the trainer that consumed it "
                    f"in optimizer step {event.optimizer_step} had committed no version after {now}",
                    record,
                    *proof,
                )
            if oldest is None or first < oldest[0]:
                oldest = (first, source)
        self._forget(event.samples)
        if oldest is None:
            return
        self._in_step[event.group] = oldest
        self._compare(record, event.group, oldest, now, proof)
        self._compare_steps(record, event, oldest[0])

    @on(MicroBatchBegan)
    def micro_batch(self, record: Record) -> None:
        """The moment of consumption itself: a group planned earlier may have aged since."""
        event = record.event
        assert isinstance(event, MicroBatchBegan)
        now, proof = self._version_now(record, event.term, event.version)
        for group in event.groups:
            oldest = self._in_step.get(group)
            if oldest is not None and not 0 <= now - oldest[0] <= self._limit:
                self._compare(record, group, oldest, now, proof)

    def _version_now(self, record: Record, term: int, said: int) -> tuple[int, tuple[str, ...]]:
        """The version in force; the trainer's word counts only where no commit of its own is known."""
        version, actor, event_id = self._committed.get(term, (said, "", ""))
        if actor != record.actor:
            return said, ()
        if version != said:
            self.violate(
                f"{record.actor} computed staleness under version {said}, but version {version} had been "
                "committed by then: the decision was made too early",
                record,
                event_id,
            )
        return version, (event_id,)

    def _compare(
        self, record: Record, group: str, oldest: tuple[int, str], now: int, proof: tuple[str, ...]
    ) -> None:
        self.count()
        first, source = oldest
        age = now - first
        if age > self._limit:
            self.violate(
                f"group {group} was trained on when its oldest token (version {first}) was {age} versions "
                f"old (the trainer was at {now}); the bound is {self._limit}",
                record,
                *filter(None, (source, *proof)),
            )
        elif age < 0:
            self.violate(
                f"group {group} has a token of version {first}, newer than the trainer's version {now}: "
                f"its staleness would be {age}",
                record,
                *filter(None, (source, *proof)),
            )

    def _compare_steps(self, record: Record, event: GroupConsumed, first: int) -> None:
        sampled_at = self._sync_step.get((event.term, first))
        if self._limit_steps is None or sampled_at is None:
            return
        self.count()
        step = self._applied.get(event.term, event.optimizer_step)
        age = step - sampled_at
        if age > self._limit_steps:
            self.violate(
                f"group {event.group} was trained on in optimizer step {step}, {age} steps after the weights "
                f"of its oldest token (version {first}, synced after {sampled_at} steps); the bound is "
                f"{self._limit_steps} optimizer steps",
                record,
            )


class AdmissionBound(Rule):
    """With G groups a step, k steps a sync and a bound of eta versions, prompt n (counted from 0, lost groups
    left out) is used in step n // G of its term, which is n // (G k) versions after the term's first. Let in
    under version d, it keeps the bound if n < (eta + d - first + 1) G k; a window of W needs W - 1 places.
    """

    id = "S19"
    words = "no more prompts are let in than the staleness bound allows under the committed version"
    parameters = ("max_staleness", "weight_sync_steps", "groups_per_step", "staleness_policy", "window")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._policy: str = context.parameter("staleness_policy")
        self._first: dict[int, int] = {}  # term -> its first version
        self._committed: dict[int, tuple[int, str]] = {}
        self._admitted: dict[int, int] = {}

    @on(TermBegan)
    def began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, TermBegan)
        self._first = {event.term: event.base_version + 1}
        self._committed.clear()
        self._admitted.clear()

    @on(VersionCommitted)
    def committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        self._first.setdefault(event.term, event.version)
        self._committed[event.term] = (event.version, record.id)

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        if event.reason not in NOT_LOST and event.term in self._admitted:
            self._admitted[event.term] -= 1

    @on(GroupAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupAdmitted)
        number = self._admitted[event.term] = self._admitted.get(event.term, 0) + 1
        if self._policy not in ("admission", "window") or event.term not in self._committed:
            return
        self.count()
        newest, proof = self._committed[event.term]
        first = self._first[event.term]
        limit = self._limit(min(event.version, newest) - first)
        if event.version > newest:
            self.violate(
                f"prompt group {event.group} was let in under version {event.version}, but no version after "
                f"{newest} had been committed",
                record,
                proof,
            )
        elif number > limit:
            self.violate(
                f"prompt group {event.group} is number {number} of term {event.term} that was let in and not "
                f"lost; under version {event.version} (the term's first was {first}) {limit} are allowed, "
                "more would be too old when they are used",
                record,
                proof,
            )

    def _limit(self, versions: int) -> int:
        parameters = self.context.declared.parameters
        sync_steps = parameters["weight_sync_steps"]
        steps = (parameters["max_staleness"] + versions + 1) * sync_steps
        if parameters.get("max_staleness_steps") is not None:
            steps = min(steps, versions * sync_steps + parameters["max_staleness_steps"] + 1)
        overtaking = parameters["window"] - 1 if self._policy == "window" else 0
        return int(steps * parameters["groups_per_step"] - overtaking)


class NoRolloutBeforeInitialCommit(Rule):
    """Canary and evaluation requests are other kinds and may come before."""

    id = "S31"
    words = "no rollout request is sent or taken before the first weights of its term are committed"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._committed: set[int] = set()
        self._began: dict[int, str] = {}

    @on(TermBegan)
    def began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, TermBegan)
        self._began[event.term] = record.id

    @on(VersionCommitted)
    def committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        self._committed.add(event.term)

    @on(SampleDispatched)
    def dispatched(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleDispatched)
        self.count()
        if event.term not in self._committed:
            self._early(f"sample {event.sample} was sent to {event.engine}", event.term, record)

    @on(RequestAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, RequestAdmitted)
        if event.request_kind != "rollout":
            return
        self.count()
        term = event.request_term or event.term  # of the sender, if it named one
        if term not in self._committed and (term or not self._committed):
            self._early(f"{event.engine} took rollout request {event.request}", term, record)
        elif event.weight_version == 0:
            self.violate(
                f"{event.engine} took rollout request {event.request} although no synced weights were active "
                "on it: it has yet to receive its first weights",
                record,
            )

    def _early(self, what: str, term: int, record: Record) -> None:
        self.violate(
            f"{what} before any weight version of term {term} was committed",
            record,
            *filter(None, (self._began.get(term, ""),)),
        )


STALENESS_RULES: tuple[type[Rule], ...] = (
    StalenessAtConsumption,
    AdmissionBound,
    NoRolloutBeforeInitialCommit,
)
