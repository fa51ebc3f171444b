"""The same work for an engine in step mode and in event mode, and what must be equal afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import strategies as st

from grpo_lab.check import check_records
from grpo_lab.check.rules import ALL_RULES
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.drawn import RepeatPolicy, lognormal_quantile
from grpo_lab.engine.failures import BadRequest
from grpo_lab.engine.latency import LatencyModel
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.request import Request, WeightIdentity
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.events import ModelStep, Record, RunDeclared
from grpo_lab.sim.simulation import SimContext, run_simulation
from grpo_lab.types import SamplingParams, SyncId

ENGINE_RULES = ("S2", "S4", "S5", "S7", "S8", "S16", "S17")
ODD_S = 0.00731  # no arrival falls on the end of a step, where either order would be right
SHARED = tuple(range(40))


@dataclass(frozen=True)
class Job:
    """A request: ``shared`` of its prompt tokens are those of others."""

    at: int
    shared: int
    own: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: int | None


@dataclass(frozen=True)
class Act:
    """What happens to the engine: a pause for ``length`` (with a weight switch in it), an abort, a switch."""

    at: int
    kind: str
    clear_cache: bool
    length: int
    target: int


@dataclass(frozen=True)
class Work:
    jobs: tuple[Job, ...]
    acts: tuple[Act, ...]
    config: EngineConfig
    timing: LatencyModel
    repeat: bool
    blocks: int


ACTS = ("keep", "wait", "abort", "keep+switch", "wait+switch", "abort+switch", "switch", "cancel", "score")


@st.composite
def works(draw: st.DrawFn) -> Work:
    jobs = st.builds(
        Job,
        at=st.integers(0, 150),
        shared=st.sampled_from((0, 16, 33, 40)),
        own=st.integers(1, 24),
        max_tokens=st.integers(1, 120),
        min_tokens=st.sampled_from((0, 0, 1, 5)),
        ignore_eos=st.booleans(),
        stop=st.one_of(st.none(), st.integers(0, 12)),
    )
    acts = st.builds(
        Act,
        at=st.integers(1, 250),
        kind=st.sampled_from(ACTS),
        clear_cache=st.booleans(),
        length=st.integers(0, 30),
        target=st.integers(0, 9),
    )
    config = EngineConfig(
        max_num_seqs=draw(st.integers(1, 7)),
        max_batched_tokens=draw(st.sampled_from((8, 24, 64, 512))),
        prefix_policy=draw(st.sampled_from(("versioned", "flush"))),
        prefix_caching=draw(st.booleans()),
        cache_outputs=draw(st.booleans()),
        ranks=draw(st.integers(1, 2)),
    )
    timing = LatencyModel(
        base_s=draw(st.sampled_from((0.01, 0.02))),
        prefill_token_s=draw(st.sampled_from((0.0, 1e-4))),
        sequence_s=draw(st.sampled_from((0.0, 1e-3))),
        context_token_s=draw(st.sampled_from((0.0, 1e-5))),
        jitter=draw(st.sampled_from((0.0, 0.3))),
        seed=draw(st.integers(0, 3)),
    )
    return Work(
        tuple(draw(st.lists(jobs, min_size=1, max_size=9))),
        tuple(draw(st.lists(acts, max_size=4))),
        config,
        timing,
        draw(st.booleans()),
        draw(st.sampled_from((14, 20, 40, 200))),
    )


@dataclass
class Seen:
    """One run. ``ends`` are (request, virtual seconds) in order of their ends."""

    requests: dict[str, Request]
    ends: list[tuple[str, float]]
    records: list[Record]
    counters: object
    free_blocks: int
    preemptions: int

    def facts(self) -> dict[str, object]:
        """What must not depend on the mode."""
        return {
            "order": [name for name, _ in self.ends],
            "requests": {
                name: (
                    one.finish_reason,
                    one.stop_reason,
                    one.token_ids,
                    [round(value, 9) for value in one.logprobs],
                    one.spans,
                    one.recomputed_tokens,
                )
                for name, one in self.requests.items()
            },
            "counters": self.counters,
            "free_blocks": self.free_blocks,
            "preemptions": self.preemptions,
            "steps": steps_told(self.records),
            "others": [
                (record.event.kind, getattr(record.event, "request", ""), getattr(record.event, "tokens", 0))
                for record in self.records
                if not isinstance(record.event, ModelStep)
            ],
        }


def steps_told(records: list[Record]) -> dict[int, tuple[int, int, int]]:
    """(sequences, prefill tokens, version) of each step, whichever record told of it."""
    told = {}
    for record in records:
        event = record.event
        if isinstance(event, ModelStep) and event.shard == 0:
            count = event.last_step - event.first_step + 1
            for step in range(event.first_step, event.last_step + 1):
                assert step not in told, f"step {step} is told twice"
                assert event.decode_tokens % count == 0
                told[step] = (event.sequences, event.prefill_tokens // count, event.version)
    return told


def run(work: Work, core_type: type[EngineCore]) -> Seen:
    result = run_simulation(lambda context: _play(context, work, core_type), max_virtual_s=1000.0)
    return result.value


async def _play(context: SimContext, work: Work, core_type: type[EngineCore]) -> Seen:
    policy: SyntheticPolicy
    if work.repeat:
        policy = RepeatPolicy(lognormal_quantile(20, 0.8), 64, num_blocks=work.blocks)
    else:
        policy = SyntheticPolicy(64, 30.0, num_blocks=work.blocks)
    recorder = context.recorder("engine-0")
    core = core_type(policy, recorder, work.config, timing=work.timing)
    core.start()
    seen = Seen({}, [], context.records, None, 0, 0)
    loop = asyncio.get_running_loop()

    async def request(number: int, job: Job) -> None:
        await asyncio.sleep(job.at * ODD_S + number * 1e-5)
        name = f"r{number}"
        prompt = SHARED[: job.shared] + tuple((number * 7 + place) % 61 for place in range(job.own))
        params = SamplingParams(
            max_tokens=job.max_tokens,
            min_tokens=min(job.min_tokens, job.max_tokens),
            ignore_eos=job.ignore_eos,
            stop_token_ids=() if job.stop is None else (job.stop,),
        )
        try:
            mine = core.submit(prompt, params, name)
        except BadRequest:
            return
        seen.requests[name] = mine
        mine.done.add_done_callback(lambda _: seen.ends.append((name, loop.time())))
        await core.wait(mine)

    async def act(number: int, one: Act) -> None:
        await asyncio.sleep(one.at * ODD_S + number * 1e-5 + 3e-6)
        mode, _, switch = one.kind.partition("+")
        if mode == "cancel":
            await core.abort([f"r{one.target}"])
        elif mode == "score":
            await core.score([[1, 2, 3]])
        elif mode == "switch":
            await _switch(core)
        else:
            await core.pause(mode, one.clear_cache)
            if switch:
                await _switch(core)
            await asyncio.sleep(one.length * ODD_S)
            await core.resume()

    running = [loop.create_task(request(n, job), name=f"job {n}") for n, job in enumerate(work.jobs)]
    running += [loop.create_task(act(n, one), name=f"act {n}") for n, one in enumerate(work.acts)]
    for task in running:
        await task
    await core.resume()
    await asyncio.sleep(1.0)  # a step of an aborted request ends
    pool = core.scheduler.pool
    seen.counters, seen.free_blocks = core.counters, pool.num_free
    seen.preemptions = core.scheduler.num_preemptions
    assert not core.scheduler.has_work
    assert pool.num_free == len(pool)
    await core.close()
    return seen


async def _switch(core: EngineCore) -> None:
    identity = WeightIdentity.of(SyncId(1, core.identity.version + 1, 1))
    await core.switch_weights(identity, "hash", lambda: None)


def violations(seen: Seen) -> list[str]:
    """Of the engine's own rules, by the trace."""
    declared = RunDeclared(
        parameters={"clear_cache": False, "prefix_policy": "versioned"},
        capabilities={"engine-0": {"events": True, "token_versions": True}},
    )
    records = [Record(0.0, "run", 0, (), declared), *seen.records]
    rules = [rule for rule in ALL_RULES if rule.id in ENGINE_RULES]
    return [found.message for rule in check_records(records, rules).rules for found in rule.violations]
