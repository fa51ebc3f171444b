"""Weight syncs into a real server process: coordinator, transport, HTTP and engine together."""

import asyncio
import time

import pytest
import torch
from engine_kit import in_loop, make_model, reference_logprobs
from test_engine_server import server

from grpo_lab.protocol.canary import Canary
from grpo_lab.protocol.coordinator import Coordinator, SyncSettings
from grpo_lab.recorders import ListRecorder
from grpo_lab.trainer.ranks import SingleRank
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.transport.receivers import make_transport
from grpo_lab.transport.vllm_http import VllmHttpEngine
from grpo_lab.types import GenerateRequest, SamplingParams

SEQUENCES = ((2, 3, 4, 5, 6), (9, 8, 7))


class InLoop:
    """The bridge of a trainer that runs in the loop itself."""

    async def in_caller(self, function):
        await asyncio.sleep(0)
        return function()


def make_source(model, recorder, transport):
    def score(sequences):
        return [reference_logprobs(model, list(ids)) for ids in sequences]

    return PackedSource(
        lambda: ((name, parameter.detach()) for name, parameter in model.named_parameters()),
        InLoop(),
        recorder,
        ring=lambda: transport.ring,
        score=score,
        bucket_bytes=16_384,
        wire_dtype=None,
        num_threads=1,
        sends=True,
    )


@in_loop
async def test_two_servers_take_turns_when_the_sync_is_rolling(tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    with server(tmp_path) as (_, first), server(tmp_path) as (_, second):
        recorder = ListRecorder("trainer", time.monotonic)
        engines = [VllmHttpEngine(f"engine-{i}", url, recorder) for i, url in enumerate((first, second))]
        for engine in engines:
            await engine.discover()
        transport = make_transport("shm", recorder=recorder)
        settings = SyncSettings(canary=Canary(SEQUENCES, tolerance=1e-4), scope="rolling")
        source = make_source(model, recorder, transport)
        coordinator = Coordinator(engines, transport, source, SingleRank(), recorder, settings)
        await coordinator.connect(term=1, base_version=0)
        held = []
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            report = await coordinator.sync()
            assert (report.version, report.committed, report.fenced) == (version, True, ())
            held.append([await engine.weight_info() for engine in engines])
            for engine in engines:
                request = GenerateRequest(f"r{version}", (2, 3, 4), SamplingParams(max_tokens=4))
                spans = (await engine.generate(request)).spans
                assert [span.version for span in spans] == [version]
        assert held == [["t1.v1.a1"] * 2, ["t1.v2.a1", "t1.v2.a2"]]
        pauses = [
            record.event.engine
            for record in recorder.records
            if record.event.kind == "engine_acknowledged" and record.event.call in ("pause", "resume")
        ]
        assert sorted(pauses[:4]) == ["engine-0", "engine-0", "engine-1", "engine-1"]  # all at once
        assert pauses[4:7] == ["engine-0", "engine-0", "engine-1"]
        await coordinator.close()
        for engine in engines:
            await engine.close()


@pytest.mark.parametrize("kind", ["shm", "gloo"])
@in_loop
async def test_a_server_follows_the_trainer_version_by_version(kind, tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    with server(tmp_path) as (_, url):
        recorder = ListRecorder("trainer", time.monotonic)
        engine = VllmHttpEngine("engine-0", url, recorder)
        await engine.discover()
        transport = make_transport(kind, recorder=recorder)
        settings = SyncSettings(canary=Canary(SEQUENCES, tolerance=1e-4))
        source = make_source(model, recorder, transport)
        coordinator = Coordinator([engine], transport, source, SingleRank(), recorder, settings)
        await coordinator.connect(term=1, base_version=0)
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            report = await coordinator.sync()
            assert (report.version, report.committed) == (version, True)
            assert await engine.weight_info() == f"t1.v{version}.a1"
            request = GenerateRequest(f"r{version}", (2, 3, 4), SamplingParams(max_tokens=8, ignore_eos=True))
            completion = await engine.generate(request)
            assert [span.version for span in completion.spans] == [version]
            expected = reference_logprobs(model, [2, 3, 4, *completion.token_ids])[2:]
            assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        proofs = {
            (r.event.proof, r.event.outcome) for r in recorder.records if r.event.kind == "engine_proved"
        }
        assert proofs >= {("hash", "holds"), ("canary", "holds")}
        await coordinator.close()
        await engine.close()
