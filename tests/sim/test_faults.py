"""Every kind of fault strikes where it was told to, shows in the trace, and the run recovers from it."""

import dataclasses

import pytest

from grpo_lab.errors import ConfigError, TraceError
from grpo_lab.events import EngineProved, FaultInjected
from grpo_lab.sim.scenario import ENGINE_CALLS, Failure, Fault, Scenario
from grpo_lab.sim.tape import Tape
from grpo_lab.sim.world import simulate
from grpo_lab.testing.failures import load_case

CLUSTER = Scenario(engines=2, steps=4, canary=True, max_staleness=2, faults_until_s=90)


def run(*faults, **changes):
    return simulate(dataclasses.replace(CLUSTER, faults=faults, **changes))


@pytest.mark.parametrize("kind", ["flip", "truncate", "lose", "repeat", "swap", "late"])
def test_damaged_buckets_are_sent_again(kind):
    outcome = run(Fault(kind, "engine-0", "bucket", 2, duration_s=0.5)).value
    assert outcome.faults == 1
    assert outcome.optimizer_steps == 4
    if kind in ("flip", "truncate", "lose"):
        assert outcome.marks["sync-attempt-failed"] == 1
        assert outcome.marks["committed-by-retry"] == 1


@pytest.mark.parametrize(
    "call", [call for call in ENGINE_CALLS if call not in ("abandon_update", "weight_info")]
)
@pytest.mark.parametrize(
    "kind", ["refuse", "lose_reply", "duplicate", "unavailable", "crash_before", "crash_after"]
)
def test_one_fault_at_every_call(kind, call):
    outcome = run(Fault(kind, "engine-0", call, 1, duration_s=2.0)).value
    assert outcome.faults == 1
    assert outcome.optimizer_steps == 4


@pytest.mark.parametrize("call", ["pause", "start_update", "update", "finish_update", "score", "resume"])
@pytest.mark.parametrize("kind", ["crash_before", "crash_after"])
def test_the_trainer_starts_again(kind, call):
    outcome = run(Fault(kind, "trainer", call, 6, duration_s=3.0), checkpoint_every_steps=1).value
    assert outcome.terms == 2
    assert outcome.optimizer_steps == 4
    assert outcome.marks["died-trainer"] == 1


def test_a_trainer_resumes_from_its_newest_checkpoint():
    outcome = run(Fault("crash_before", "trainer", "pause", 7), checkpoint_every_steps=1).value
    assert outcome.marks["resumed-from-checkpoint"] == 1
    assert outcome.version == 5  # the checkpoint of step 2 has version 3; then one at the start and one sync


def test_a_dead_worker_ends_the_term():
    outcome = run(Fault("crash_after", "worker", "generate", 5)).value
    assert outcome.marks["died-worker"] == 1
    assert outcome.terms == 2


def test_a_failing_reward_costs_one_group():
    outcome = run(Fault("reward_error", "worker", "score_reward", 3)).value
    assert outcome.marks["dropped-reward_failed"] == 1
    assert outcome.terms == 1


def test_no_memory_to_load_refuses_the_finish():
    outcome = run(Fault("oom", "engine-1", "finish_update", 2)).value
    assert outcome.marks["engine-dropped-update"] == 1
    assert outcome.marks["committed-by-retry"] == 1


@pytest.mark.parametrize("kind", ["partition", "partition_replies", "slow_link", "stall"])
def test_links_and_engines_come_back(kind):
    outcome = run(Fault(kind, "engine-0", "update", 2, duration_s=8.0)).value
    assert outcome.optimizer_steps == 4


def test_a_lost_finish_reply_is_decided_by_weight_info():
    result = run(Fault("lose_reply", "engine-0", "finish_update", 2))
    assert result.value.version == 4
    assert "committed-by-retry" not in result.value.marks


def test_the_only_engine_restarts_and_serves_nothing_before_its_weights():
    outcome = run(Fault("crash_after", "engine-0", "generate", 3, duration_s=1.0), engines=1).value
    assert outcome.marks["request-refused-503"] > 0
    assert outcome.optimizer_steps == 4


def test_faults_that_never_struck_change_nothing():
    quiet = simulate(CLUSTER)
    late = run(Fault("crash_before", "engine-0", "finish_update", 90))
    assert late.value.faults == 0
    assert late.digest == quiet.digest


def test_clock_skew_breaks_no_rule():
    outcome = run(Fault("clock_skew", "engine-0", duration_s=-2.0), Fault("clock_skew", "worker")).value
    assert outcome.check.violations == 0


def test_faults_are_said_and_ended_in_the_trace():
    kinds = [record.event.kind for record in run(Fault("flip", "engine-0", "bucket", 2)).records]
    assert kinds.count("fault_injected") == kinds.count("faults_ended") == 1
    assert kinds.index("fault_injected") < kinds.index("faults_ended")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "gremlin", "target": "engine-0"}, "fault kind='gremlin'"),
        ({"kind": "flip", "target": "engine-0", "call": "pause"}, "call of fault flip='pause'"),
        ({"kind": "busy", "target": "trainer", "call": "pause"}, "fault target='trainer'"),
        ({"kind": "busy", "target": "engine-0", "call": "pause", "occurrence": 0}, "occurrence=0"),
    ],
)
def test_impossible_faults_are_refused(fault, words):
    with pytest.raises(ConfigError, match=words):
        Fault(**fault)


def test_a_scenario_names_what_is_wrong():
    with pytest.raises(ConfigError, match="max_inflight=1"):
        Scenario(generations=2, max_inflight=1)
    with pytest.raises(ConfigError, match="engine-7"):
        Scenario(faults=(Fault("stall", "engine-7", "pause"),))


def test_failure_files_round_trip(tmp_path):
    failure = Failure(
        dataclasses.replace(CLUSTER, faults=(Fault("flip", "engine-0", "bucket"),)),
        Tape([0, 3]),
        "S9",
        "words",
        17,
        ("engine-0:3",),
        "module:Class",
    )
    path = tmp_path / "deep" / "failure.json"
    failure.save(path)
    loaded = load_case(path).failure
    assert dataclasses.replace(loaded, tape=failure.tape) == failure
    assert loaded.tape.choices == (0, 3)
    assert [item.name for item in path.parent.iterdir()] == ["failure.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no failure file can be read"),
        ("[]", "no schema number"),
        ('{"schema": 99}', "schema 99; this version reads up to 1"),
        ('{"schema": 1}', "damaged"),
        (
            '{"schema": 1, "scenario": {"engines": 0}, "faults": []}',
            "engines=0",
        ),
        (
            '{"schema": 1, "scenario": {"wings": 2}, "faults": []}',
            "wings",
        ),
    ],
)
def test_damaged_failure_files_are_named(tmp_path, text, words):
    path = tmp_path / "failure.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        load_case(path)


@pytest.mark.parametrize(
    ("target", "call"), [("trainer", "update"), ("trainer", "resume"), ("worker", "generate")]
)
def test_a_stalled_actor_goes_on_where_it_stood(target, call):
    outcome = run(Fault("stall", target, call, 3, duration_s=8.0)).value
    assert (outcome.faults, outcome.terms, outcome.optimizer_steps) == (1, 1, 4)


def test_nothing_of_a_stalled_worker_moves():
    fault = Fault("stall", "worker", "generate", 5, duration_s=8.0)
    result = run(fault)
    (began_s,) = [record.t for record in result.records if isinstance(record.event, FaultInjected)]
    said = [record.t - began_s for record in result.records if record.actor == "worker"]
    assert any(after_s > 8 for after_s in said)
    assert not any(0 < after_s < 8 for after_s in said)


def test_a_worker_that_stalls_beyond_the_heartbeat_bound_is_given_up():
    outcome = run(Fault("stall", "worker", "generate", 5, duration_s=200.0), faults_until_s=300.0).value
    assert (outcome.terms, outcome.optimizer_steps) == (2, 4)
    assert outcome.marks["died-worker"] == 1


def test_a_partition_of_one_side_is_not_one_of_the_other():
    """The trainer loses the engine and fences it; the worker reaches it, and is told."""
    outcome = run(Fault("partition_trainer", "engine-0", "pause", 2, duration_s=60.0), steps=6).value
    assert outcome.marks["engine-fenced"] == 1
    assert (outcome.terms, outcome.optimizer_steps) == (1, 6)
    outcome = run(Fault("partition_worker", "engine-0", "generate", 2, duration_s=60.0)).value
    assert "engine-fenced" not in outcome.marks
    assert outcome.optimizer_steps == 4


@pytest.mark.parametrize("pause_mode", ["keep", "abort", "wait"])
def test_stock_engines_prove_themselves_in_probation(pause_mode):
    result = run(stock=True, pause_mode=pause_mode)
    assert result.value.optimizer_steps == 4
    proofs = {record.event.proof for record in result.records if isinstance(record.event, EngineProved)}
    assert proofs == {"structure", "canary"}


def test_a_stock_engine_that_restarts_comes_back():
    fault = Fault("crash_before", "engine-0", "update", 2, duration_s=0.5)
    outcome = run(fault, stock=True, steps=10, step_s=2.0).value
    assert outcome.marks["engine-taken-in-again"] == 1
    assert (outcome.terms, outcome.optimizer_steps) == (1, 10)


@pytest.mark.parametrize("call", ["agree", "gather"])
@pytest.mark.parametrize("kind", ["crash_before", "crash_after", "hang"])
@pytest.mark.parametrize("target", ["trainer", "trainer-r1"])
def test_what_happens_to_one_rank_reaches_every_rank(target, kind, call):
    result = run(Fault(kind, target, call, 9, duration_s=8.0), trainer_ranks=2, checkpoint_every_steps=1)
    outcome = result.value
    assert outcome.faults == 1
    assert outcome.optimizer_steps == 4
    assert outcome.terms == (1 if kind == "hang" else 2)
    assert outcome.check.of("L10").evaluations > 0
    assert outcome.check.of("S29").evaluations > 0
