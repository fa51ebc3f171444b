"""Which groups an optimizer step consumes, so that the staleness bound holds when it does."""

from __future__ import annotations

from collections.abc import Callable

from grpo_lab.errors import WorkerError
from grpo_lab.events import GroupDropped, GroupTaken
from grpo_lab.ports import PromptCursor, Recorder
from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.types import DroppedGroup, DropReason, RolloutGroup


class GroupBuffer:
    """Takes finished groups from the queue and forms optimizer steps from them.

    ``admission`` consumes in dispatch order; ``window`` lets a group be overtaken at most
    ``window - 1`` times; ``drop`` consumes in order of completion; ``freshest`` takes the youngest
    first. Whatever the policy, nothing older than the bound is returned: it is dropped as ``stale``,
    and groups are consumed or dropped whole.

    A dropped group's prompt is acknowledged at once, except at a shutdown, after which a resumed run
    takes it up again. That of a consumed group is the caller's to acknowledge, when the optimizer step
    that used it has been applied.

    Args:
        step_of_version: the number of optimizer steps that had been applied to a version's weights.
    """

    def __init__(
        self,
        bound: StalenessBound,
        recorder: Recorder,
        cursor: PromptCursor,
        *,
        term: int,
        step_of_version: Callable[[int], int],
    ) -> None:
        self._bound = bound
        self._recorder = recorder
        self._cursor = cursor
        self._term = term
        self._step_of_version = step_of_version
        self._ready: dict[int, RolloutGroup] = {}
        self._unjudged: list[RolloutGroup] = []  # taken since staleness was judged last
        self._judged_at: tuple[int, int] | None = None  # version and optimizer step
        self._next_number = 0  # the lowest number that is neither consumed nor lost
        self._ended: set[int] = set()  # numbers above it that are
        self._overtaken: dict[int, int] = {}

    @property
    def have(self) -> int:
        """Groups that are here, usable or not."""
        return len(self._ready)

    def add(self, item: RolloutGroup | DroppedGroup) -> None:
        """Takes one item from the queue. A group of an older term ends as ``term_ended``.

        Raises ``WorkerError`` for a number that came before: it would be trained on twice.
        """
        if item.term == self._term and not self._is_new(item.number):
            raise WorkerError(
                f"group {item.group_id} has number {item.number}, which came before in term {item.term}; "
                "a rollout worker must number the groups of a term 0, 1, 2, ... and send each once"
            )
        if isinstance(item, DroppedGroup):
            if item.term == self._term and item.reason != "shutdown":
                self._cursor.acknowledge(item.prompt_index)
                self._end(item.number)
            return
        self._recorder.emit(GroupTaken(term=item.term, group=item.group_id))
        if item.term != self._term:
            # Its prompt belongs to the older term's sequence, so the cursor does not move.
            self._emit_drop(item, "term_ended", f"generated in term {item.term}, now {self._term}")
            return
        self._ready[item.number] = item
        self._unjudged.append(item)

    def assemble(self, version: int, optimizer_step: int) -> tuple[RolloutGroup, ...] | None:
        """The groups of the step that begins now, or None while too few are here."""
        self._drop_stale(version, optimizer_step)
        if len(self._ready) < self._bound.groups_per_step:
            return None
        chosen = self._choose()
        if len(chosen) < self._bound.groups_per_step:
            return None
        groups = tuple(self._ready.pop(number) for number in chosen)
        self._count_overtaking(chosen)
        for number in chosen:
            self._end(number)
        return groups

    def drain(self, reason: DropReason = "shutdown") -> None:
        """Drops everything that is left."""
        for group in list(self._ready.values()):
            self._drop(group, reason, "left over when the run ended")

    def staleness(self, group: RolloutGroup, version: int, optimizer_step: int) -> tuple[int, int]:
        """Age of the group's oldest token if it is consumed now: in versions, and in optimizer steps."""
        first = group.version_first
        return version - first, optimizer_step - self._step_of_version(first)

    def _choose(self) -> list[int]:
        need = self._bound.groups_per_step
        if self._bound.policy == "drop":
            return list(self._ready)[:need]
        if self._bound.policy == "freshest":
            order = sorted(self._ready, key=lambda number: (-self._ready[number].version_first, number))
            return order[:need]
        return self._in_dispatch_order(need)

    def _in_dispatch_order(self, need: int) -> list[int]:
        """Ready numbers in order; none overtakes an unfinished group that was overtaken enough."""
        chosen: list[int] = []
        patience: int | None = None  # how many more may overtake the least patient unfinished group
        number, last = self._next_number, max(self._ready, default=-1)
        while number <= last and len(chosen) < need:
            if number in self._ready:
                if patience is not None:
                    if patience == 0:
                        break
                    patience -= 1
                chosen.append(number)
            elif number not in self._ended:
                left = self._bound.window - 1 - self._overtaken.get(number, 0)
                patience = left if patience is None else min(patience, left)
            number += 1
        return chosen

    def _count_overtaking(self, chosen: list[int]) -> None:
        if not self._bound.admits_by_bound:
            return
        for number in range(self._next_number, max(chosen)):
            if number not in self._ended and number not in chosen:
                passed = sum(1 for other in chosen if other > number)
                self._overtaken[number] = self._overtaken.get(number, 0) + passed

    def _drop_stale(self, version: int, optimizer_step: int) -> None:
        """Judges all when they have aged, else those that have come since: this runs for every group."""
        limit_steps = self._bound.max_staleness_steps
        aged = self._judged_at != (version, optimizer_step)
        groups = list(self._ready.values()) if aged else self._unjudged
        self._judged_at, self._unjudged = (version, optimizer_step), []
        for group in groups:
            versions, steps = self.staleness(group, version, optimizer_step)
            if versions > self._bound.max_staleness:
                self._drop(group, "stale", f"{versions} versions old, bound {self._bound.max_staleness}")
            elif limit_steps is not None and steps > limit_steps:
                self._drop(group, "stale", f"{steps} optimizer steps old, bound {limit_steps}")

    def _drop(self, group: RolloutGroup, reason: DropReason, detail: str) -> None:
        del self._ready[group.number]
        self._emit_drop(group, reason, detail)
        if reason != "shutdown":
            self._cursor.acknowledge(group.prompt_index)
        self._end(group.number)

    def _is_new(self, number: int) -> bool:
        return number >= self._next_number and number not in self._ended and number not in self._ready

    def _end(self, number: int) -> None:
        self._ended.add(number)
        self._overtaken.pop(number, None)
        while self._next_number in self._ended:
            self._ended.remove(self._next_number)
            self._next_number += 1

    def _emit_drop(self, group: RolloutGroup, reason: DropReason, detail: str) -> None:
        self._recorder.emit(
            GroupDropped(
                term=group.term,
                group=group.group_id,
                prompt_index=group.prompt_index,
                samples=tuple(sample.sample_id for sample in group.samples),
                reason=reason,
                detail=detail,
            )
        )
