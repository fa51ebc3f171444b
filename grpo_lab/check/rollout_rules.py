"""What samples carry (S24, S25), and all rules about rollouts."""

from __future__ import annotations

from grpo_lab.check.conservation_rules import CONSERVATION_RULES
from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.check.staleness_rules import STALENESS_RULES
from grpo_lab.events import GroupConsumed, GroupDropped, LogprobGapMeasured, Record, SampleCompleted


class BehaviourLogprobs(Rule):
    """Where the key-value cache outlives an update (``clear_cache`` off), logprobs belong to no version, and
    only their number and finiteness are checked.
    """

    id = "S24"
    words = "each token has one finite logprob, which is what the sampling weights give"
    parameters = ("logprob_tolerance",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._tolerance: float = context.parameter("logprob_tolerance")
        self._comparable = context.declared.parameters.get("clear_cache") is not False

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        self.count()
        if event.logprobs != event.tokens:
            self.violate(
                f"sample {event.sample} has {event.tokens} tokens but {event.logprobs} logprobs", record
            )
        if not event.logprobs_finite:
            self.violate(f"sample {event.sample} has a logprob that is not a finite number", record)

    @on(LogprobGapMeasured)
    def gap(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, LogprobGapMeasured)
        if not self._comparable:
            return
        self.count()
        if not event.gap_max <= self._tolerance:
            self.violate(
                f"at equal weights (version {event.version}) the engine's logprobs differ from the trainer's "
                f"by up to {event.gap_max:.3g} over {event.tokens} tokens; the tolerance is "
                f"{self._tolerance:.3g}",
                record,
            )


class CorrectionVersions(Rule):
    """Evaluated for corrections that divide by behaviour logprobs, and samples whose tokens have versions."""

    id = "S25"
    words = "an off-policy correction divides by the logprobs of exactly the versions stored with the samples"
    capability = "token_versions"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._stored: dict[str, tuple[frozenset[int], str]] = {}

    @on(SampleCompleted)
    def completed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, SampleCompleted)
        if event.spans:
            self._stored[event.sample] = (frozenset(span[1] for span in event.spans), record.id)

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        for sample in event.samples:
            self._stored.pop(sample, None)

    @on(GroupConsumed)
    def consumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupConsumed)
        stored = [self._stored.pop(sample, None) for sample in event.samples]
        known = [item for item in stored if item is not None]
        if not event.correction_versions or len(known) < len(stored):
            return
        self.count()
        versions = frozenset().union(*(item[0] for item in known))
        if versions != set(event.correction_versions):
            self.violate(
                f"the {event.correction} correction of group {event.group} used logprobs of versions "
                f"{sorted(event.correction_versions)}, but its tokens were sampled with {sorted(versions)}",
                record,
                *(item[1] for item in known[:4]),
            )


ROLLOUT_RULES: tuple[type[Rule], ...] = (
    *STALENESS_RULES,
    *CONSERVATION_RULES,
    BehaviourLogprobs,
    CorrectionVersions,
)
