"""Faults of the protocol that simulated clusters have found; each once broke the rule that it names."""

import dataclasses

import pytest

from grpo_lab.check import check_records
from grpo_lab.engine.core import EngineCore
from grpo_lab.errors import InvariantViolation
from grpo_lab.events import (
    EngineAdmitted,
    MemberDied,
    MemberStarted,
    OptimizerStepApplied,
    Record,
    RequestAdmitted,
    RunDeclared,
    TermBegan,
    VersionCommitted,
    WeightsPublished,
)
from grpo_lab.sim.scenario import Fault, Scenario
from grpo_lab.sim.world import simulate
from grpo_lab.trainer.weight_source import PackedSource

FENCED_BEFORE_ITS_FIRST_WEIGHTS = Scenario(
    pause_mode="abort",
    steps=3,
    sync_attempts=1,
    faults=(Fault("oom", "engine-0", "finish_update", 1),),
)
STALLED_IN_START = Scenario(
    steps=2, canary=True, faults=(Fault("stall", "engine-0", "start_update", 2, duration_s=70.0),)
)


def test_an_engine_without_synced_weights_takes_no_rollouts():
    """S31: the worker sent rollouts to an engine that was fenced before its first weights."""
    outcome = simulate(FENCED_BEFORE_ITS_FIRST_WEIGHTS).value
    assert outcome.marks["engine-fenced"] == 1
    assert outcome.optimizer_steps == 3


def test_a_restarted_engine_refuses_rollouts_itself(monkeypatch):
    """S31, S2: without the refusal, weights from disk would have answered."""
    scenario = Scenario(engines=1, steps=3, faults=(Fault("crash_after", "engine-0", "generate", 3),))
    assert simulate(scenario).value.marks["request-refused-503"] > 0
    monkeypatch.setattr(EngineCore, "_refuse_unsynced", lambda self, request_id, term: None)
    with pytest.raises(InvariantViolation) as raised:
        simulate(scenario)
    assert raised.value.rule in ("S31", "S2")


def test_slots_that_may_still_be_read_are_not_packed_again(monkeypatch):
    """S10: after a failed attempt the sender drained its source into the ring of that attempt."""
    outcome = simulate(STALLED_IN_START).value
    assert outcome.marks["sync-attempt-failed"] > 0
    monkeypatch.setattr(PackedSource, "_abandoned", lambda self: False)
    with pytest.raises(InvariantViolation) as raised:
        simulate(STALLED_IN_START)
    assert raised.value.rule == "S10"


def test_a_trainer_that_begins_again_from_nothing_may_publish_the_same_bytes():
    """D5 took the first weights of the second beginning for weights that were not updated."""
    scenario = dataclasses.replace(
        Scenario(engines=1, steps=3),
        checkpoint_every_steps=0,
        faults=(Fault("crash_before", "trainer", "pause", 2),),
    )
    outcome = simulate(scenario).value
    assert outcome.marks["began-again-from-nothing"] == 1


def test_a_checkpointless_term_that_goes_on_still_must_publish_what_changed():
    def published(term, version):
        return WeightsPublished(
            term=term,
            version=version,
            attempt=1,
            plan_digest="p",
            tensors=1,
            bucket_nbytes=(4,),
            bucket_hashes=(1,),
        )

    step = OptimizerStepApplied(term=1, optimizer_step=0, version=1, loss=0.0)
    again = TermBegan(term=2, base_version=1, optimizer_step=1)
    events = [RunDeclared(), published(1, 1), step, again, published(2, 2)]
    records = [Record(float(i), "trainer", i, (), event) for i, event in enumerate(events)]
    assert "D5" in check_records(records).violated


def test_an_engine_may_die_between_its_proof_and_the_commit():
    """S11 blamed the commit for a death that nobody could know of."""
    records = list(simulate(Scenario(engines=2, steps=2)).records)
    place = max(i for i, record in enumerate(records) if isinstance(record.event, VersionCommitted))
    death = Record(records[place].t, "supervisor", 0, (), MemberDied(member="engine-0"))
    result = check_records([*records[:place], death, records[place]])
    assert result.of("S11").evaluations > 0
    assert "S11" not in result.violated
    start = Record(death.t, "supervisor", 1, (), MemberStarted(member="engine-0", role="engine"))
    unknown = [*records[:place], death, start, records[place]]
    assert "S11" not in check_records(unknown).violated
    taken_in = Record(death.t, "supervisor", 2, (), EngineAdmitted(engine="engine-0", start="another"))
    assert "S11" in check_records([*records[:place], death, start, taken_in, records[place]]).violated
    untold = [record for record in unknown if not isinstance(record.event, EngineAdmitted)]
    assert "S11" in check_records(untold).violated  # nothing says whom it took in


def test_the_freshest_policy_may_drop_a_whole_backlog():
    """L8 did not count what the trainer itself holds under ``freshest``."""
    scenario = Scenario(
        staleness_policy="freshest",
        max_staleness=0,
        generations=1,
        max_inflight=6,
        queue_capacity=6,
        prompts_per_step=1,
        steps=5,
        step_s=2.0,
        mean_tokens=4,
        token_s=0.01,
    )
    assert simulate(scenario).value.marks["dropped-stale"] > 0


def test_a_worker_that_dies_in_the_last_step_is_accounted_for():
    """S20: nobody waited for its samples any more, so its death was told as an orderly stop."""
    fault = Fault("crash_before", "worker", "generate", 5)
    result = simulate(
        Scenario(
            engines=1,
            slots=1,
            prompts_per_step=1,
            generations=1,
            weight_sync_steps=2,
            max_inflight=1,
            queue_capacity=1,
            mean_tokens=4,
            max_tokens=4,
            step_s=0.05,
            token_s=0.01,
            reward_s=0.0,
            network_s=0.0,
            jitter=0.0,
            bandwidth_bytes_s=1e7,
            steps=3,
            faults=(fault,),
        )
    )
    assert result.value.marks["died-worker"] == 1
    assert result.value.terms == 1
    assert result.value.marks["dropped-term_ended"] == 2


def test_an_engine_that_was_fenced_as_dead_serves_again_after_its_restart():
    """L7: the view only shrank within a term, so a restarted engine waited for the next trainer."""
    fault = Fault("crash_before", "engine-0", "pause", 2, duration_s=2.0)
    result = simulate(Scenario(engines=2, steps=5, step_s=15.0, faults=(fault,)))
    assert result.value.terms == 1
    back = next(
        place
        for place, record in enumerate(result.records)
        if record.event == EngineAdmitted(engine="engine-0", start="start-2", term=1, version=3)
    )
    events = [record.event for record in result.records[back:]]
    taken = [event for event in events if isinstance(event, RequestAdmitted) and event.engine == "engine-0"]
    commit = next(place for place, event in enumerate(events) if isinstance(event, VersionCommitted))
    assert len(taken) > 2
    assert not set(taken).intersection(events[:commit])  # nothing before it holds the new version
