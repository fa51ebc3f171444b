"""What simulated clusters found when their engines died and came back, stalled, and were cut off."""

import pytest

from grpo_lab.events import Record
from grpo_lab.sim.scenario import Fault, Scenario
from grpo_lab.sim.world import simulate


def test_syncs_that_a_fault_held_up_are_not_taken_for_fixed_waits():
    """D4: what stalled engines cost lies in no phase, but nothing sleeps there."""
    faults = tuple(
        Fault("stall", "engine-0", "start_id", occurrence, duration_s=2.0) for occurrence in range(2, 9)
    )
    outcome = simulate(Scenario(engines=2, steps=10, step_s=0.2, faults=faults)).value
    assert outcome.faults == 7
    assert outcome.check.of("D4").evaluations > 0


def test_a_rank_waits_in_its_gather_while_an_engine_is_slow_to_start():
    """S29: the other rank's bound for a gather was below what rank 0 may wait for an engine."""
    fault = Fault("delay", "engine-0", "start_update", 1, duration_s=70.0)
    outcome = simulate(Scenario(engines=2, steps=1, sync_attempts=1, trainer_ranks=2, faults=(fault,))).value
    assert outcome.optimizer_steps == 1


def test_a_gather_that_nobody_waits_for_any_more_still_ends_before_the_next():
    """S29: a hang beyond the transfer's bound cancelled rank 0's gather, which a blocking call cannot be."""
    fault = Fault("hang", "trainer", "gather", 1, duration_s=25.0)
    scenario = Scenario(engines=1, steps=1, sync_attempts=1, trainer_ranks=2, faults=(fault,))
    outcome = simulate(scenario).value
    assert (outcome.optimizer_steps, outcome.faults) == (1, 1)
    assert outcome.check.of("S29").evaluations > 0


def test_a_rank_that_is_late_for_a_gather_agrees_after_it():
    """S29: it gave up waiting for its gather, and agreed before it had entered: one thread cannot do that."""
    fault = Fault("hang", "trainer-r1", "gather", 1, duration_s=25.0)
    scenario = Scenario(engines=1, steps=1, canary=True, trainer_ranks=2, faults=(fault,))
    outcome = simulate(scenario).value
    assert (outcome.optimizer_steps, outcome.faults) == (1, 1)
    assert outcome.check.of("S29").evaluations > 0


def test_no_event_of_a_bucket_that_came_twice_holds_an_address():
    """Two runs wrote different bytes: the refusal of the bucket named the place of its memory."""
    records: list[Record] = []
    simulate(
        Scenario(engines=1, steps=2, faults=(Fault("repeat", "engine-0", "bucket", 4),)), records=records
    )
    texts = [str(record.event) for record in records]
    assert any("the sender began with Bucket(" in text for text in texts)
    assert not [text for text in texts if " at 0x" in text]


@pytest.mark.parametrize("late_s", [10.03, 10.05, 10.08, 10.1])
def test_a_finish_that_comes_between_the_question_and_the_abandon_is_noticed(late_s):
    """S3: the coordinator gives the sync up after 10 s and hears that the engine holds the previous version;
    then the finish comes; the abandon found nothing to drop, and the engine was resumed on the new version.
    """
    fault = Fault("delay", "engine-0", "finish_update", 2, duration_s=late_s)
    scenario = Scenario(engines=1, steps=3, network_s=0.05, jitter=0.0, sync_attempts=1, faults=(fault,))
    outcome = simulate(scenario).value
    assert (outcome.optimizer_steps, outcome.faults) == (3, 1)
    assert outcome.marks["engine-fenced"] == 1


def test_what_a_dead_trainer_had_finished_is_not_served_after_the_next_one_gave_its_first_sync_up():
    """S3: t2.v2 was finished but not committed; the next term's first pause is refused, the sync is aborted
    before it has touched the engine, and the engine was resumed.
    """
    faults = (
        Fault("refuse", "engine-0", "pause", 3, duration_s=0.5),
        Fault("crash_after", "trainer", "finish_update", 2, duration_s=0.5),
        Fault("crash_before", "trainer", "agree", 1, duration_s=0.5),
    )
    scenario = Scenario(
        engines=1,
        slots=1,
        steps=4,
        prompts_per_step=1,
        generations=1,
        max_inflight=1,
        queue_capacity=1,
        max_staleness=0,
        mean_tokens=4,
        max_tokens=4,
        trainer_ranks=2,
        cache_outputs=True,
        network_s=0.0,
        jitter=0.0,
        ring_slots=3,
        faults=faults,
    )
    outcome = simulate(scenario).value
    assert (outcome.optimizer_steps, outcome.faults) == (4, 3)
    assert outcome.marks["engine-fenced"] == 1


@pytest.mark.parametrize(("scope", "late_s"), [("global", 20.3), ("global", 22.0), ("rolling", 25.0)])
def test_a_pause_that_was_given_up_and_comes_after_the_next_resume_is_excused(scope, late_s):
    """S32: nobody can call it back; the sync after that resumes the engine."""
    fault = Fault("delay", "engine-0", "pause", 3, duration_s=late_s)
    scenario = Scenario(
        engines=3,
        steps=6,
        weight_sync_steps=2,
        staleness_policy="freshest",
        sync_scope=scope,
        clear_cache=False,
        sync_attempts=2,
        canary=True,
        engine_mode="event",
        network_s=0.05,
        checkpoint_every_steps=1,
        seed=81,
        faults=(fault,),
    )
    outcome = simulate(scenario).value
    assert (outcome.optimizer_steps, outcome.faults) == (6, 1)
    assert outcome.check.of("S32").evaluations > 0
