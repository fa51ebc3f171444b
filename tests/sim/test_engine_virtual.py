"""The engine and its app, unmodified, in virtual time: whole syncs under traffic and any schedule."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest
import torch
from coordinator_world import LIMITS, InlineBridge

from grpo_lab.engine.app import create_app
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.settings import EngineConfig
from grpo_lab.protocol.coordinator import Coordinator, SyncSettings
from grpo_lab.sim.simulation import run_simulation, run_twice
from grpo_lab.sim.tape import fifo, random_tape
from grpo_lab.trainer.ranks import SingleRank
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.transport.memory import InMemoryTransport
from grpo_lab.transport.vllm_http import VllmHttpEngine
from grpo_lab.types import GenerateRequest, SamplingParams

SHAPES = {f"layer{index}.weight": (8, 12) for index in range(4)}
ENGINES, REQUESTS, SYNCS = 2, 40, 3


def step_s(plan):
    return 0.01 + 1e-4 * len(plan.scheduled) + 1e-5 * plan.prefill_tokens


class World:
    """Two engines behind their HTTP apps, a coordinator, and clients that keep them busy."""

    def __init__(self, context, stack):
        self.context, self.stack = context, stack
        self.tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.recorder = context.recorder("trainer")
        self.transport = InMemoryTransport(self.recorder, accept_timeout_s=3, progress_timeout_s=3)
        self.cores, self.apps = [], []
        self.completions = {}

    async def client(self, index, recorder):
        transport = httpx.ASGITransport(self.apps[index], raise_app_exceptions=False)
        engine = VllmHttpEngine(f"engine-{index}", "http://engine", recorder, transport=transport)
        self.stack.push_async_callback(engine.close)
        await engine.discover()
        return engine

    def add_engine(self, index):
        name = f"engine-{index}"
        policy = SyntheticPolicy(mean_tokens=30, num_blocks=64, shapes=SHAPES)
        config = EngineConfig(name, max_num_seqs=8, max_batched_tokens=64)
        core = EngineCore(policy, self.context.recorder(name), config, latency=step_s)
        receivers = {self.transport.backend: self.transport.receiver}
        app = create_app(core, receivers=receivers)
        core.start()
        self.stack.push_async_callback(app.state.close)
        self.cores.append(core)
        self.apps.append(app)

    async def coordinator(self, mode, clear_cache):
        source = PackedSource(
            lambda: iter(self.tensors.items()),
            InlineBridge(),
            self.recorder,
            ring=lambda: self.transport.ring,
            score=lambda sequences: [[0.0] * (len(ids) - 1) for ids in sequences],
            bucket_bytes=512,
            wire_dtype=None,
            num_threads=1,
            sends=True,
        )
        members = [await self.client(index, self.recorder) for index in range(ENGINES)]
        settings = SyncSettings(pause_mode=mode, clear_cache=clear_cache, timeouts=LIMITS)
        return Coordinator(members, self.transport, source, SingleRank(), self.recorder, settings)

    async def traffic(self, index):
        engine = await self.client(index, self.context.recorder(f"worker-{index}"))

        async def one(number):
            draws = self.context.random(f"request {index}-{number}")  # its own: no other's turn changes it
            await asyncio.sleep(draws.random() * 3)
            prompt = tuple(draws.randrange(200) for _ in range(draws.randrange(1, 60)))
            request = GenerateRequest(f"{index}-{number}", prompt, SamplingParams(max_tokens=200))
            self.completions[request.request_id] = await engine.generate(request)

        await asyncio.gather(*(one(number) for number in range(REQUESTS)))


async def scenario(context, mode, clear_cache):
    async with AsyncExitStack() as stack:
        world = World(context, stack)
        for index in range(ENGINES):
            world.add_engine(index)
        coordinator = await world.coordinator(mode, clear_cache)
        await coordinator.connect(term=1, base_version=0)
        await coordinator.sync()
        traffic = [asyncio.create_task(world.traffic(index)) for index in range(ENGINES)]
        for _ in range(SYNCS - 1):
            await asyncio.sleep(1)
            for tensor in world.tensors.values():
                tensor.add_(1)
            await coordinator.sync()
        await asyncio.gather(*traffic)
        await coordinator.close()
        return world


def check_engine(records):
    """S2, S4, S7, S16 of one engine's own events, derived from the trace alone."""
    active, first_steps = 0, {}
    writes, pauses, steps = [], [], []
    for record in records:
        event = record.event
        if event.kind == "weight_write_began":
            writes.append([record.seq, None])
        elif event.kind == "weight_write_ended":
            writes[-1][1] = record.seq
        elif event.kind == "engine_paused":
            pauses.append([record.seq, None])
        elif event.kind == "engine_resumed":
            pauses[-1][1] = record.seq
        elif event.kind == "weights_activated":
            assert event.version > active
            active = event.version
            first_steps[event.first_step] = active
        elif event.kind == "model_step":
            steps.append((event.began_seq, record.seq))
            assert event.version == active
    for low, high in [*writes, *pauses]:
        assert high is not None
        assert not any(low < end and begin <= high for begin, end in steps)
    return len(writes), len(pauses), len(steps)


def check_requests(world, records, mode):
    finished = {}
    for record in records:
        if record.event.kind == "request_finished":
            assert record.event.request not in finished
            finished[record.event.request] = record.event
    assert finished.keys() == world.completions.keys()
    several = 0
    for name, completion in world.completions.items():
        assert completion.finish_reason in (
            ("stop", "length", "abort") if mode == "abort" else ("stop", "length")
        )
        assert len(completion.token_ids) == finished[name].tokens
        versions = [span.version for span in completion.spans]
        assert versions == sorted(versions)
        assert all(1 <= version <= SYNCS for version in versions)
        assert [span.start for span in completion.spans[1:]] == [span.end for span in completion.spans[:-1]]
        several += len(set(versions)) > 1
    return several


@pytest.mark.parametrize(
    "tape", [fifo(), random_tape(1, 4000), random_tape(2, 4000)], ids=["fifo", "r1", "r2"]
)
@pytest.mark.parametrize(
    ("mode", "clear_cache"), [("keep", True), ("keep", False), ("wait", True), ("abort", True)]
)
def test_syncs_under_traffic(mode, clear_cache, tape):
    result = run_simulation(lambda context: scenario(context, mode, clear_cache), tape)
    assert result.leftover_tasks == ()
    world = result.value
    for core in world.cores:
        mine = [record for record in result.records if record.actor == core.config.name]
        writes, pauses, steps = check_engine(mine)
        assert (writes, pauses) == (SYNCS, SYNCS)
        assert steps > 50
        assert core.identity.version == SYNCS
        assert core.scheduler.pool.num_used == 0
        for name, tensor in core.policy.parameters().items():
            assert torch.equal(tensor, world.tensors[name])
    several = check_requests(world, result.records, mode)
    assert (several > 0) == (mode == "keep")


def test_two_runs_are_the_same_to_the_byte():
    run_twice(lambda context: scenario(context, "keep", True), random_tape(3, 4000), seed=5)


@pytest.mark.parametrize("tape", [fifo(), random_tape(1, 4000)], ids=["fifo", "random"])
def test_what_a_sample_says_does_not_depend_on_the_schedule(tape):
    reference = run_simulation(lambda context: scenario(context, "keep", True)).value.completions
    other = run_simulation(lambda context: scenario(context, "wait", True), tape).value.completions
    assert {k: c.token_ids for k, c in other.items()} == {k: c.token_ids for k, c in reference.items()}
