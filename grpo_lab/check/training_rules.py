"""What is trained on, and that a crash changes nothing about it (S26, S27).

A *lineage* is the sequence of optimizer steps that the current weights consist of. A term that restores a
checkpoint goes back to its cut: the steps after it are discarded, and may be done again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice

from grpo_lab.check.rule import Context, Rule, on
from grpo_lab.events import (
    CheckpointSaved,
    GroupAdmitted,
    GroupConsumed,
    GroupDropped,
    OptimizerStepApplied,
    Record,
    SyncBegan,
    TermBegan,
    VersionCommitted,
)

_KEPT_CHECKPOINTS = 64
_KEPT_DROPS = 10_000  # prompts below the low-water mark that a late cut may still lack
_KEPT_PROMPTS = 1_000  # that one message counts
_NOT_DONE = frozenset({"shutdown", "term_ended"})  # a resumed run takes these prompts up again


class StepsAppliedOnce(Rule):
    """Steps are counted from 0; ``TermBegan`` and ``SyncBegan`` carry the number applied before."""

    id = "S26"
    words = (
        "each optimizer step is applied exactly once in the surviving lineage, crashes and resumes included"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._term = 0
        self._next: int | None = None  # the step that comes next in this lineage
        self._proof = ""

    @on(TermBegan)
    def began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, TermBegan)
        begins_anew = event.optimizer_step == 0 and event.base_version == 0
        if self._next is not None and not begins_anew:
            self.count()
            if event.optimizer_step > self._next:
                self.violate(
                    f"term {event.term} begins after {event.optimizer_step} optimizer steps, but only "
                    f"{self._next} had been applied",
                    record,
                    self._proof,
                )
            elif event.optimizer_step < self._next and not event.checkpoint:
                self.violate(
                    f"term {event.term} restores no checkpoint, yet it counts {event.optimizer_step} "
                    f"optimizer steps where {self._next} had been applied: steps would be applied twice",
                    record,
                    self._proof,
                )
        self._term, self._next, self._proof = event.term, event.optimizer_step, record.id

    @on(OptimizerStepApplied)
    def applied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, OptimizerStepApplied)
        self.count()
        step, expected = event.optimizer_step, self._next
        if event.term < self._term:
            self.violate(
                f"{record.actor} applied optimizer step {step} in term {event.term}, although term "
                f"{self._term} had begun: two trainers change one lineage",
                record,
                self._proof,
            )
            return
        if expected is not None and step < expected:
            self.violate(
                f"optimizer step {step} was applied in term {event.term} although steps up to "
                f"{expected - 1} had been applied: it counts twice",
                record,
                self._proof,
            )
        elif expected is not None and step > expected:
            self.violate(
                f"optimizer step {step} was applied in term {event.term} although step {expected} comes "
                "next: steps are missing",
                record,
                self._proof,
            )
        self._next, self._proof = step + 1, record.id

    @on(SyncBegan)
    def sync_began(self, record: Record) -> None:
        """The number of steps behind a version is what staleness in optimizer steps rests on."""
        event = record.event
        assert isinstance(event, SyncBegan)
        if self._next is None or event.term != self._term:
            return
        self.count()
        if event.optimizer_step != self._next:
            self.violate(
                f"the sync of version {event.version} says that its weights have had {event.optimizer_step} "
                f"optimizer steps, but {self._next} had been applied",
                record,
                self._proof,
            )


@dataclass(slots=True)
class _Prompts:
    """Which prompts have ended in this lineage: all below ``low``, and those in ``above``.

    ``dropped`` are those that ended without training, as far as a cut may still lack them.
    """

    low: int
    above: set[int]
    dropped: set[int]

    def ended(self, prompt: int) -> bool:
        return prompt < self.low or prompt in self.above

    def trained(self, prompt: int) -> bool:
        return self.ended(prompt) and prompt not in self.dropped

    def end(self, prompt: int, *, dropped: bool) -> None:
        if self.ended(prompt):
            return
        self.above.add(prompt)
        if dropped:
            self.dropped.add(prompt)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1
        if len(self.dropped) > 2 * _KEPT_DROPS:
            self.dropped = {one for one in self.dropped if one >= self.low - _KEPT_DROPS}

    def not_covered_by(self, low: int, done: frozenset[int]) -> list[int]:
        """Trained prompts that a cut does not list as done, the first of them."""
        between = chain(range(low, self.low), sorted(self.above))
        forgotten = (one for one in between if one not in done and one >= low and one not in self.dropped)
        return list(islice(forgotten, _KEPT_PROMPTS))

    def not_ended_of(self, low: int, done: frozenset[int]) -> list[int]:
        """Prompts that a cut lists as done and that are not, the first of them."""
        listed = chain(range(self.low, low), sorted(done))
        return list(islice((one for one in listed if not self.ended(one)), _KEPT_PROMPTS))


class ResumeIsOneCut(Rule):
    """A checkpoint is compared with what had been done when it was saved, a resume with its checkpoint, and
    the prompts of the new term with both. What resumes another trace's checkpoint is compared with its own
    prompts only.
    """

    id = "S27"
    words = (
        "a resume continues one consistent cut (weights, version, step, prompts) in a higher term, and no "
        "prompt is trained on twice or skipped"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._saved: dict[str, tuple[CheckpointSaved, str]] = {}
        self._term = 0
        self._term_id = ""
        self._prompts: _Prompts | None = None
        self._in_step: dict[int, str] = {}  # prompt -> event that consumed it
        self._version: int | None = None  # committed in this term
        self._steps = 0
        self._next_prompt = 0
        self._skip: frozenset[int] = frozenset()

    @on(CheckpointSaved)
    def saved(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, CheckpointSaved)
        self._saved.pop(event.checkpoint, None)
        self._saved[event.checkpoint] = (event, record.id)
        if len(self._saved) > _KEPT_CHECKPOINTS:
            del self._saved[next(iter(self._saved))]
        if event.term == self._term:
            self._compare_progress(event, record)
            self._compare_cursor(f"checkpoint {event.checkpoint}", event, record)

    @on(TermBegan)
    def began(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, TermBegan)
        if self._term:
            self.count()
            if event.term <= self._term:
                self.violate(
                    f"term {event.term} began after term {self._term}: a trainer that starts again needs a "
                    "higher one",
                    record,
                    self._term_id,
                )
        saved, saved_id = self._saved.get(event.checkpoint, (None, ""))
        done = frozenset(event.prompts_done)
        if saved is not None:
            self._compare_cut(event, saved, record, saved_id)
        begins_anew = event.base_version == 0 and event.optimizer_step == 0
        if not event.checkpoint and self._prompts is not None and not begins_anew:
            self._compare_cursor(f"term {event.term}", event, record)
        self._prompts = _Prompts(event.prompt_low_water, set(done), set())
        self._term, self._term_id = event.term, record.id
        self._in_step.clear()
        self._version, self._steps = None, event.optimizer_step
        self._next_prompt, self._skip = event.prompt_low_water, done

    @on(GroupAdmitted)
    def admitted(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupAdmitted)
        if event.term != self._term:
            return
        while self._next_prompt in self._skip:
            self._next_prompt += 1
        self.count()
        if event.prompt_index > self._next_prompt:
            self.violate(
                f"group {event.group} takes up prompt {event.prompt_index} although prompt "
                f"{self._next_prompt} comes next in term {event.term}: prompts were skipped",
                record,
                self._term_id,
            )
        elif event.prompt_index < self._next_prompt:
            self.violate(
                f"group {event.group} takes up prompt {event.prompt_index}, which is already done or under "
                f"way in term {event.term}",
                record,
                self._term_id,
            )
        self._next_prompt = max(self._next_prompt, event.prompt_index + 1)

    @on(GroupConsumed)
    def consumed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupConsumed)
        if event.term != self._term or self._prompts is None:
            return
        self.count()
        prompt = event.prompt_index
        if self._prompts.trained(prompt) or prompt in self._in_step:
            self.violate(
                f"group {event.group} trains on prompt {prompt} (its place in the endless prompt sequence), "
                "which was trained on before in this lineage",
                record,
                self._in_step.get(prompt, self._term_id),
            )
        self._in_step[prompt] = record.id

    @on(GroupDropped)
    def dropped(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, GroupDropped)
        if event.term == self._term and self._prompts is not None and event.reason not in _NOT_DONE:
            self._prompts.end(event.prompt_index, dropped=True)

    @on(OptimizerStepApplied)
    def applied(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, OptimizerStepApplied)
        if event.term != self._term or self._prompts is None:
            return
        for prompt in self._in_step:
            self._prompts.end(prompt, dropped=False)
        self._in_step.clear()
        self._steps = event.optimizer_step + 1

    @on(VersionCommitted)
    def committed(self, record: Record) -> None:
        event = record.event
        assert isinstance(event, VersionCommitted)
        self._version = event.version if event.term == self._term else self._version

    def _compare_progress(self, event: CheckpointSaved, record: Record) -> None:
        self.count()
        version = event.version if self._version is None else self._version
        if (event.version, event.optimizer_step) != (version, self._steps):
            self.violate(
                f"checkpoint {event.checkpoint} says version {event.version} after {event.optimizer_step} "
                f"optimizer steps, but version {version} was committed and {self._steps} steps were applied",
                record,
            )

    def _compare_cut(self, event: TermBegan, saved: CheckpointSaved, record: Record, saved_id: str) -> None:
        pairs = {
            "weight version": (event.base_version, saved.version),
            "optimizer steps": (event.optimizer_step, saved.optimizer_step),
            "first prompt not done": (event.prompt_low_water, saved.prompt_low_water),
            "prompts done above it": (sorted(event.prompts_done), sorted(saved.prompts_done)),
        }
        if event.restored_weights_hash and saved.weights_hash:
            pairs["weights hash"] = (event.restored_weights_hash, saved.weights_hash)
        self.count(len(pairs))
        for name, (ours, theirs) in pairs.items():
            if ours != theirs:
                self.violate(
                    f"term {event.term} resumed from {event.checkpoint} with {name} {ours}, but {theirs} was "
                    "saved there",
                    record,
                    saved_id,
                )

    def _compare_cursor(self, what: str, event: CheckpointSaved | TermBegan, record: Record) -> None:
        if self._prompts is None:
            return
        self.count()
        done = frozenset(event.prompts_done)
        again = self._prompts.not_covered_by(event.prompt_low_water, done)
        if again:
            self.violate(
                f"{what} does not list prompts {again[:6]} as done, although an applied optimizer step was "
                "trained on them: they would be trained on twice",
                record,
                self._term_id,
            )
        lost = self._prompts.not_ended_of(event.prompt_low_water, done)
        if lost:
            self.violate(
                f"{what} lists prompts {lost[:6]} as done, although no applied optimizer step was trained on "
                "them and they were not dropped: they would be skipped",
                record,
                self._term_id,
            )


TRAINING_RULES: tuple[type[Rule], ...] = (StepsAppliedOnce, ResumeIsOneCut)
