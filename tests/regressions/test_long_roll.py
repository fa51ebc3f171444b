"""Found by a roll over many engines on slow links."""

import pytest

from grpo_lab.events import GroupDropped, Record, SyncEnded
from grpo_lab.protocol.timeouts import Timeouts
from grpo_lab.sim.light_worker import worker_settings
from grpo_lab.sim.scenario import Scenario
from grpo_lab.sim.world import simulate
from grpo_lab.trainer.assembly import rollout_settings
from grpo_lab.trainer.config import AsyncGRPOConfig


def test_what_the_first_engine_generates_is_kept_for_a_whole_roll():
    """Provisional samples waited as long as for an answer; then eight groups in a row were lost, which ended
    the worker of a run without faults.
    """
    scenario = Scenario(
        engines=5,
        sync_scope="rolling",
        bandwidth_bytes_s=150.0,
        steps=3,
        prompts_per_step=8,
        max_inflight=40,
        queue_capacity=200,
        staleness_policy="drop",
        max_staleness=8,
        lengths="fixed",
        mean_tokens=200,
        max_tokens=200,
        kv_blocks=4000,
        engine_mode="event",
        checkpoint_every_steps=0,
    )
    records: list[Record] = []
    assert simulate(scenario, records=records).value.optimizer_steps == 3
    rolls_s = [one.event.phases_s["total"] for one in records if isinstance(one.event, SyncEnded)][1:]
    assert min(rolls_s) > worker_settings(scenario).request.timeout_s
    lost = [one.event.reason for one in records if isinstance(one.event, GroupDropped)]
    assert set(lost) <= {"shutdown"}


@pytest.mark.parametrize("scope", ["global", "rolling"])
def test_a_worker_waits_for_a_commit_as_long_as_a_roll_may_take(scope, tmp_path):
    urls = "http://127.0.0.1:1,http://127.0.0.1:2"
    args = AsyncGRPOConfig(output_dir=str(tmp_path), sync_scope=scope, vllm_server_base_url=urls)
    settings = rollout_settings(args)
    if scope == "global":
        assert settings.request.commit_s is None
    else:
        assert settings.request.commit_s == args.timeouts.sync_s(args.sync_attempts, 2)
        assert settings.group_timeout_s > settings.request.commit_s


def test_ranks_wait_for_the_way_back_too():
    limits = Timeouts(connect_s=1, handshake_s=1, pause_s=1, transfer_s=1, resume_s=100, score_s=1)
    assert limits.agree_s > limits.release_s
