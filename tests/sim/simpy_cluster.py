"""The same cluster once more, in SimPy, written from the description alone: no code of grpo_lab, no trace.

A rollout worker admits groups while ``admitted < (eta + versions + 1) G`` and while its places last; the
samples of a group wait for a place in the batch of an engine; a batch makes one token for each of its n
sequences in ``token_s (1 + 0.01 n + 0.002 m)`` seconds, m being the tokens whose keys and values are not
there yet; when all samples of a group are done it is scored and queued; the trainer takes G groups in order
of arrival, computes for ``step_s`` and syncs, which freezes the engines and clears their keys and values.
"""

from dataclasses import dataclass, field
from statistics import fmean

import simpy

PROMPT_TOKENS = 6.5 + 20 / 4  # 1 to 12, and 20 more for every fourth
BUCKETS, WEIGHT_BYTES = 4, 4 * 384


@dataclass
class Reference:
    """What a run came to: ``stays_s`` are of groups, from dispatch to consumption."""

    virtual_s: float = 0.0
    staleness: list[int] = field(default_factory=list)
    stays_s: list[float] = field(default_factory=list)
    steps: int = 0

    @property
    def steps_per_s(self):
        return self.steps / self.virtual_s

    @property
    def mean_staleness(self):
        return fmean(self.staleness)

    @property
    def mean_stay_s(self):
        return fmean(self.stays_s)


class Engine:
    """A sequence is [tokens made, event of its end, tokens to compute first, version of its first token]."""

    def __init__(self, env, slots, token_s, tokens, version):
        self.env, self.slots, self.token_s, self.tokens = env, slots, token_s, tokens
        self.version = version
        self.waiting, self.running = [], []
        self.paused = False
        self.stepping = False
        self.changed = env.event()
        env.process(self.run())

    def poke(self):
        changed, self.changed = self.changed, self.env.event()
        changed.succeed()

    def generate(self):
        done = self.env.event()
        self.waiting.append([0, done, PROMPT_TOKENS, 0])
        self.poke()
        return done

    def clear(self):
        for sequence in self.running:
            sequence[2] = PROMPT_TOKENS + sequence[0]

    def run(self):
        while True:
            while self.paused or not (self.waiting or self.running):
                yield self.changed
            while self.waiting and len(self.running) < self.slots:
                self.running.append(self.waiting.pop(0))
            self.stepping = True
            missing = sum(sequence[2] for sequence in self.running)
            yield self.env.timeout(self.token_s * (1 + 0.01 * len(self.running) + 0.002 * missing))
            self.stepping = False
            for sequence in self.running:
                sequence[3] = sequence[3] or self.version()
                sequence[0] += 1
                sequence[2] = 0
                if sequence[0] == self.tokens:
                    sequence[1].succeed(sequence[3])
            self.running = [sequence for sequence in self.running if sequence[0] < self.tokens]
            self.poke()


class Cluster:
    def __init__(self, scenario):
        self.env = env = simpy.Environment()
        self.scenario = scenario
        self.one_way_s = scenario.network_s * (1 + scenario.jitter / 2)
        self.engines = [
            Engine(env, scenario.slots, scenario.token_s, scenario.mean_tokens, lambda: self.version)
            for _ in range(scenario.engines)
        ]
        self.version, self.admitted, self.under_way, self.loads = 1, 0, 0, [0] * scenario.engines
        self.queue = simpy.Store(env)
        self.room = simpy.Container(env, scenario.queue_capacity, scenario.queue_capacity)
        self.freed = env.event()
        self.found = Reference()

    def run(self):
        self.env.process(self.worker())
        self.env.run(self.env.process(self.trainer()))
        self.found.virtual_s = self.env.now
        return self.found

    def poke(self):
        freed, self.freed = self.freed, self.env.event()
        freed.succeed()

    def worker(self):
        s = self.scenario
        while True:
            bound = (s.max_staleness + self.version - 1 + 1) * s.prompts_per_step
            while self.admitted >= bound or (self.under_way + 1) * s.generations > s.max_inflight:
                yield self.freed
                bound = (s.max_staleness + self.version - 1 + 1) * s.prompts_per_step
            self.admitted += 1
            self.under_way += 1
            self.env.process(self.group())

    def group(self):
        s, began = self.scenario, self.env.now
        samples = [self.env.process(self.sample()) for _ in range(s.generations)]
        versions = yield simpy.AllOf(self.env, samples)
        yield self.env.timeout(s.reward_s)
        yield self.room.get(1)
        self.queue.put((min(versions.values()), began))
        self.under_way -= 1
        self.poke()

    def sample(self):
        at = min(range(len(self.engines)), key=lambda index: self.loads[index])
        self.loads[at] += 1
        yield self.env.timeout(self.one_way_s)
        version = yield self.engines[at].generate()
        yield self.env.timeout(self.one_way_s)
        self.loads[at] -= 1
        return version

    def trainer(self):
        s = self.scenario
        for step in range(s.steps):
            groups = []
            for _ in range(s.prompts_per_step):
                groups.append((yield self.queue.get()))
                self.room.put(1)
            for version, began in groups:
                self.found.staleness.append(self.version - version)
                self.found.stays_s.append(self.env.now - began)
            yield self.env.timeout(s.step_s)
            self.found.steps += 1
            if step + 1 < s.steps:
                yield from self.sync()

    def sync(self):
        """Who is there, pause, start, buckets one after the other, the update's answer, finish, resume."""
        s = self.scenario
        yield self.env.timeout(2 * self.one_way_s + self.one_way_s)
        for engine in self.engines:
            engine.paused = True
        while any(engine.stepping for engine in self.engines):
            yield simpy.AnyOf(self.env, [engine.changed for engine in self.engines])
        messages = 1 + 2 + BUCKETS + 1 + 2 + 1  # from the pause's answer to the resume's arrival
        yield self.env.timeout(messages * self.one_way_s + WEIGHT_BYTES / s.bandwidth_bytes_s)
        self.version += 1
        for engine in self.engines:
            engine.paused = False
            engine.clear()
            engine.poke()
        yield self.env.timeout(self.one_way_s)
        self.poke()
