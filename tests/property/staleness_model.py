"""Worker, queue and trainer without time: a drawn number decides which of the possible things happens next.

The parts under test are the real ``StalenessBound`` and ``GroupBuffer``; around them is what the rollout
worker and the training run do with them. ``Simulation.run`` raises ``AssertionError`` for whatever a run must
not do.
"""

from collections import Counter
from dataclasses import dataclass, field

from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.protocol.cursor import PromptCursorLedger
from grpo_lab.protocol.staleness import GroupBuffer
from grpo_lab.recorders import ListRecorder
from grpo_lab.types import DroppedGroup, RolloutGroup, RolloutSample

FIRST_VERSION = 5  # a resumed run: numbers that start at 0 hide mistakes
FIRST_STEP = 13


@dataclass
class Simulation:
    """``choices`` are read in order, 0 past their end: which event of the possible ones comes next.

    ``max_running`` groups are under way; one in ``lost_every`` (0: none) is lost when it ends;
    one in ``slow_every`` ends only when nothing else can happen any more (heavy-tailed lengths).
    """

    bound: StalenessBound
    choices: list[int]
    steps: int
    max_running: int = 6
    lost_every: int = 0
    slow_every: int = 0
    buffer_class: type[GroupBuffer] = GroupBuffer

    version: int = FIRST_VERSION
    step: int = FIRST_STEP
    told: int = FIRST_VERSION  # what the worker knows
    admitted: int = 0
    lost: int = 0
    running: dict[int, int] = field(default_factory=dict)  # number -> version of its first token
    queue: list = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    staleness: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self):
        self.cursor = PromptCursorLedger()
        self.recorder = ListRecorder("trainer", lambda: 0.0)
        self.buffer = self.buffer_class(
            self.bound, self.recorder, self.cursor, term=1, step_of_version=self._step_of_version
        )
        self._position = 0
        self._ended = 0

    def run(self):
        """Until ``steps`` optimizer steps are done; an assertion fails when nothing can happen any more."""
        # Policies that discard may do so for long under an unkind schedule, so past its end it is fair.
        limit = len(self.choices) + 60 * self.steps * self.bound.groups_per_step + 600
        for _ in range(limit):
            if self.step - FIRST_STEP >= self.steps:
                return self.finish()
            possible = self._possible()
            assert possible, f"deadlock: {self.describe()}"
            possible[self._choose(len(possible))]()
        raise AssertionError(f"no progress: {self.describe()}")

    def finish(self):
        """The end of a run: what is under way or queued is dropped, and everything must have ended once."""
        for item in self.queue:
            self.buffer.add(item)
        self.buffer.drain()
        for record in self.recorder.records:
            if record.event.kind == "group_dropped":
                number = int(record.event.group.partition(".g")[2])
                assert number not in self.dropped, f"group {number} was dropped twice"
                self.dropped[number] = record.event.reason
        ends = Counter([*self.consumed, *self.dropped, *self.running])
        assert ends == Counter(range(self.admitted)), f"ends that are not one each: {ends}"
        return self

    def describe(self):
        return (
            f"version {self.version}, worker knows {self.told}, step {self.step}, admitted {self.admitted}, "
            f"lost {self.lost}, running {sorted(self.running)}, ready {self.buffer.have}, {self.bound}"
        )

    # -- what can happen -------------------------------------------------------------------------------

    def _possible(self):
        """Fair in this order: choice 0 trains first, then ends the oldest group, then admits."""
        possible = []
        if self.queue:
            possible.append(self._take)
        elif self._wants_groups():
            possible.append(self._train)
        if self.told < self.version:
            possible.append(self._tell)
        quick = [number for number in sorted(self.running) if not self._is_slow(number)]
        possible += [lambda number=number: self._end_group(number) for number in quick]
        if self._may_admit():
            possible.append(self._admit)
        if not possible and self.running:
            possible.append(lambda: self._end_group(min(self.running)))
        return possible

    def _is_slow(self, number):
        return self.slow_every > 0 and number % self.slow_every == 0

    def _wants_groups(self):
        return self.buffer.have >= self.bound.groups_per_step and self._assembled_in_vain != self._state()

    _assembled_in_vain = None

    def _state(self):
        return (self.version, self.step, self.buffer.have, self._ended)

    def _may_admit(self):
        limit = self.bound.admission_limit(self.told - FIRST_VERSION)
        return len(self.running) < self.max_running and (limit is None or self.admitted - self.lost < limit)

    def _admit(self):
        # The engine serves the trainer's version, also when the worker has not been told of it yet.
        self.running[self.admitted] = self.version
        self.admitted += 1

    def _end_group(self, number):
        self._ended += 1
        first = self.running.pop(number)
        group_id, samples = f"t1.g{number}", (f"t1.g{number}.s0",)
        if self.lost_every and self._ended % self.lost_every == 0:
            self.lost += 1
            self.dropped[number] = "request_failed"
            self.queue.append(DroppedGroup(group_id, number, number, 1, samples, "request_failed"))
            return
        sample = RolloutSample(samples[0], (1,), (2,), (-1.0,), 1.0, first, self.version)
        self.queue.append(RolloutGroup(group_id, number, number, 1, (sample,), first))

    def _take(self):
        self.buffer.add(self.queue.pop(0))

    def _tell(self):
        self.told = self.version

    def _train(self):
        groups = self.buffer.assemble(self.version, self.step)
        if groups is None:
            self._assembled_in_vain = self._state()
            return
        assert len(groups) == self.bound.groups_per_step
        for group in groups:
            assert group.number not in self.consumed, f"group {group.number} was consumed twice"
            age = self.version - group.version_first
            age_steps = self.step - self._step_of_version(group.version_first)
            self.staleness.append((age, age_steps))
            assert 0 <= age <= self.bound.max_staleness, f"group {group.number} is {age} versions old"
            limit = self.bound.max_staleness_steps
            assert limit is None or age_steps <= limit, f"group {group.number} is {age_steps} steps old"
            self.consumed.append(group.number)
        for group in groups:
            self.cursor.acknowledge(group.prompt_index)
        self.step += 1
        if (self.step - FIRST_STEP) % self.bound.weight_sync_steps == 0:
            self.version += 1

    def _step_of_version(self, version):
        return FIRST_STEP + (version - FIRST_VERSION) * self.bound.weight_sync_steps

    def _choose(self, count):
        if self._position >= len(self.choices):
            return 0
        self._position += 1
        return self.choices[self._position - 1] % count


def overtakings(simulation):
    """For every number: how many higher ones were consumed while it was not (consumed or lost)."""
    counts = Counter()
    for place, number in enumerate(simulation.consumed):
        before = simulation.consumed[:place]
        counts[number] = sum(1 for other in before if other > number)
    return counts
