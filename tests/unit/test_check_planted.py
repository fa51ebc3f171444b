"""Whole valid runs keep every rule silent; one planted edit in such a run is caught by the rule it breaks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from check_shapes import (
    SHAPES,
    aborted_and_continued,
    aborted_sync,
    fenced_engine,
    foreign_trainer,
    fresh_run,
    pause_in_the_middle,
    restarted_engine,
    resumed_run,
    retried_sync,
    rolling_run,
)
from check_syncs import PARAMETERS
from check_world import (
    World,
    edited,
    repeated,
    result,
    without,
)

from grpo_lab import events as ev
from grpo_lab.events import Record

Plant = Callable[[], list[Record]]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("cut", [True, False], ids=["cut off", "ended"])
def test_a_valid_run_keeps_every_rule_silent(name, cut):
    world = SHAPES[name]()
    if not cut:
        world.end()
    checked = result(world.records)
    assert not checked.violated_ids, checked.words()


@pytest.mark.parametrize("name", SHAPES)
def test_a_valid_run_may_be_cut_off_anywhere(name):
    world = SHAPES[name]()
    for length in range(1, len(world.records), 7):
        checked = result(world.records[:length])
        assert not checked.violated_ids, f"after {length} records: {checked.words()}"


def test_a_foreign_trace_without_engines_and_dispatch_stays_silent():
    checked = result(foreign_trainer())
    assert not checked.violated_ids, checked.words()
    assert checked.checked.of("S18").evaluations == 3
    assert checked.checked.of("S19").status == "not evaluable"


def test_what_was_not_declared_is_not_evaluable_and_never_passed():
    world = fresh_run()
    for name in PARAMETERS:
        declared = world.records[0].event
        parameters = {key: value for key, value in PARAMETERS.items() if key != name}
        records = edited(world, ev.RunDeclared, parameters=parameters)
        assert declared.parameters[name] is PARAMETERS[name]
        assert not result(records).violated_ids, name
    bare = result(edited(world, ev.RunDeclared, parameters={}))
    assert not bare.violated_ids
    for rule in ("S18", "S19", "S22", "S23", "S24", "L2", "L6"):
        assert bare.checked.of(rule).status == "not evaluable", rule


def inserted(world: World, before: type[ev.Event], event: ev.Event, nth: int = -1) -> list[Record]:
    """The trace with an event of the same actor put before the nth event of a kind."""
    places = [index for index, record in enumerate(world.records) if isinstance(record.event, before)]
    records = list(world.records)
    place = places[nth]
    at = records[place]
    records.insert(place, Record(at.t, at.actor, at.seq, (), event))
    return records


def ended(world: World) -> World:
    world.end()
    return world


def step_during(kind: type[ev.Event]) -> list[Record]:
    """The engine decodes although the event of that kind said that it does not."""
    world = fresh_run()
    world.sync()
    records = list(world.records)
    place = max(
        index
        for index, record in enumerate(records)
        if isinstance(record.event, kind) and record.actor == "engine-0"
    )
    at = records[place]
    active = next(
        record.event
        for record in reversed(records[:place])
        if isinstance(record.event, ev.WeightsActivated) and record.actor == "engine-0"
    )
    event = ev.ModelStep(
        engine="engine-0",
        first_step=world.engines[0].step,
        last_step=world.engines[0].step,
        version=active.version,
        term=active.term,
        sequences=1,
        prefill_tokens=0,
        decode_tokens=1,
        began_seq=at.seq,
    )
    records.insert(place + 1, Record(at.t, "engine-0", at.seq, (), event))
    return records


def second_version_without_new_weights() -> list[Record]:
    world = fresh_run()
    old = next(record.event for record in world.records if isinstance(record.event, ev.WeightsPublished))
    records = []
    for record in world.records:
        event = record.event
        if isinstance(event, ev.WeightsPublished):
            event = ev.WeightsPublished(**{**vars(event), "bucket_hashes": old.bucket_hashes})
        elif isinstance(event, ev.BucketPacked):
            event = ev.BucketPacked(**{**vars(event), "hash64": old.bucket_hashes[event.bucket]})
        elif isinstance(event, ev.BucketReceived):
            known = old.bucket_hashes[event.bucket]
            event = ev.BucketReceived(**{**vars(event), "hash64": known, "expected_hash64": known})
        records.append(Record(record.t, record.actor, record.seq, record.cause, event))
    return records


def late(kind: type[ev.Event], seconds: float, nth: int = -1) -> list[Record]:
    """Everything from the nth event of a kind on happens ``seconds`` later."""
    world = ended(fresh_run())
    places = [index for index, record in enumerate(world.records) if isinstance(record.event, kind)]
    place = places[nth]
    return [
        Record(
            record.t + (seconds if index >= place else 0),
            record.actor,
            record.seq,
            record.cause,
            record.event,
        )
        for index, record in enumerate(world.records)
    ]


def early_request() -> list[Record]:
    world = World()
    world.begin_term()
    world.start_worker()
    group = world.admit()
    world.dispatch(group, group["samples"][0], world.engines[0])
    return world.records


def rollback_without_checkpoint() -> list[Record]:
    world = fresh_run()
    world.stop_worker()
    world.version = 1
    world.begin_term()
    return edited(world, ev.TermBegan, -1, optimizer_step=world.steps, base_version=1)


def stale_step() -> list[Record]:
    """Groups of version 1 are used three versions later."""
    world = fresh_run()
    world.group()
    world.group()
    for _ in range(3):
        world.sync()
    world.step()
    return world.records


def reordered() -> list[Record]:
    world = fresh_run()
    for _ in range(3):
        world.group()
    first = world.ready.pop(0)
    world.step()
    world.ready.insert(0, first)
    return world.records


def fenced_serves() -> list[Record]:
    world = fenced_engine()
    world.emit("engine-2", ev.EngineResumed(engine="engine-2", term=1), after="trainer")
    world.engines[2].fenced = False
    world.commit(world.version + 1, 1)
    return world.records


def old_term_updates() -> list[Record]:
    world = resumed_run()
    world.emit("engine-0", ev.UpdateStarted(engine="engine-0", term=1, version=9, attempt=1))
    place = {"engine": "engine-0", "term": 1, "version": 9}
    world.emit("engine-0", ev.WeightsLoaded(**place, attempt=1, hashes_verified=True, buckets=2))
    world.emit("engine-0", ev.WeightsActivated(**place, first_step=world.engines[0].step))
    return world.records


def two_ranks(swap: bool = False, agree: tuple[bool, bool] = (True, True)) -> list[Record]:
    world = fresh_run()
    orders = (("gather", "agree"), ("agree", "gather") if swap else ("gather", "agree"))
    for rank, operations in enumerate(orders):
        for index, operation in enumerate(operations):
            entered = ev.CollectiveEntered(group="trainer", rank=rank, index=index, operation=operation)
            world.emit(f"trainer-r{rank}", entered)
    for rank, ok in enumerate(agree):
        world.emit(f"trainer-r{rank}", ev.PhaseAgreed(phase="transfer", rank=rank, ok=ok))
    world.end()
    return world.records


def dead_worker_acts() -> list[Record]:
    world = fresh_run()
    world.emit("trainer", ev.MemberDied(member="worker", detail="no heartbeat"), after="worker")
    world.group()
    world.group()
    world.step()
    return world.records


def memory(grows: int) -> list[Record]:
    world = fresh_run()
    for sync in range(40):
        world.sync()
        world.emit("worker", ev.MemoryMeasured(member="worker", resident_bytes=10**8 + grows * sync))
    return world.records


def mixed_shards() -> list[Record]:
    """The second rank switches a step later than the first."""
    world = fresh_run()
    records = []
    for record in world.records:
        records.append(record)
        if isinstance(record.event, ev.WeightsActivated):
            event = record.event
            moved = ev.WeightsActivated(**{**vars(event), "shard": 1, "first_step": event.first_step + 1})
            records.append(Record(record.t, record.actor, record.seq, (), moved))
    return records


def cache_hit(content: int) -> list[Record]:
    world = fresh_run()
    group = world.admit()
    sample = group["samples"][0]
    world.dispatch(group, sample, world.engines[0])
    version = world.version
    world.emit(
        "engine-0",
        ev.CacheHit(
            engine="engine-0",
            request=sample,
            cache="prefix",
            content_version=version + content,
            version=version,
            tokens=16,
            content_term=1,
            term=1,
        ),
    )
    world.generate(group, sample, world.engines[0])
    return world.records


PLANTS: dict[str, tuple[str, Plant]] = {
    "a version is skipped": ("S1", lambda: edited(fresh_run(), ev.VersionCommitted, -1, version=9)),
    "a version is committed twice": ("S1", lambda: repeated(fresh_run(), ev.VersionCommitted, -1)),
    "a new term goes on from an older version": ("S1", rollback_without_checkpoint),
    "an engine falls back": ("S2", lambda: edited(fresh_run(), ev.WeightsActivated, -1, version=1)),
    "a restarted engine serves before it loads": (
        "S2",
        lambda: without(restarted_engine(), ev.WeightsActivated, -3),
    ),
    "an engine loads what was never published": (
        "S3",
        lambda: edited(fresh_run(), ev.WeightsLoaded, -1, version=12),
    ),
    "an engine resumes before the commit": ("S3", lambda: without(fresh_run(), ev.VersionCommitted, 1)),
    "a step runs under another version": ("S4", lambda: edited(fresh_run(), ev.ModelStep, -1, version=1)),
    "tokens carry the newer version": (
        "S4",
        lambda: edited(fresh_run(), ev.SampleCompleted, 4, spans=((1, 3, 0, 8),)),
    ),
    "tokens carry the older version": (
        "S4",
        lambda: edited(fresh_run(), ev.SampleCompleted, -1, spans=((1, 2, 0, 8),)),
    ),
    "a request's span names steps of another version": (
        "S4",
        lambda: edited(pause_in_the_middle(), ev.RequestFinished, -1, spans=((1, 5, 0, 8, 1, 8),)),
    ),
    "token versions fall": (
        "S5",
        lambda: edited(pause_in_the_middle(), ev.SampleCompleted, -1, spans=((1, 5, 0, 3), (1, 4, 3, 8))),
    ),
    "an engine holds other bytes": ("S6", lambda: edited(fresh_run(), ev.BucketReceived, -1, hash64=5)),
    "two engines hold other weights": (
        "S6",
        lambda: edited(fresh_run(), ev.WeightsLoaded, -1, weights_hash="other"),
    ),
    "the canary fails and the version is committed": (
        "S6",
        lambda: edited(fresh_run(), ev.EngineProved, -1, outcome="fails", gap=0.5),
    ),
    "the canary's gap is above what it tolerates": (
        "S6",
        lambda: edited(fresh_run(), ev.EngineProved, -1, gap=0.5),
    ),
    "the canary's gap is not a number": (
        "S6",
        lambda: edited(fresh_run(), ev.EngineProved, -1, gap=math.nan),
    ),
    "a retry sends other weights": (
        "S6",
        lambda: edited(retried_sync(), ev.WeightsPublished, 1, bucket_hashes=(1, 2)),
    ),
    "a step overlaps a weight write": ("S7", lambda: step_during(ev.WeightWriteBegan)),
    "ranks switch at different steps": ("S8", mixed_shards),
    "a bucket is missing": ("S9", lambda: without(fresh_run(), ev.BucketReceived, -1)),
    "a bucket comes twice": ("S9", lambda: repeated(fresh_run(), ev.BucketReceived, -1)),
    "a bucket is of another version": ("S9", lambda: edited(fresh_run(), ev.BucketReceived, -1, version=1)),
    "a bucket that was refused is loaded": (
        "S9",
        lambda: edited(fresh_run(), ev.BucketReceived, -1, accepted=False),
    ),
    "nothing arrived at all": ("S9", lambda: without(fresh_run(), ev.BucketReceived)),
    "the parameters change under the packer": (
        "S10",
        lambda: inserted(
            fresh_run(),
            ev.BucketPacked,
            ev.OptimizerStepApplied(term=1, optimizer_step=3, version=3, loss=0.0),
        ),
    ),
    "a slot is written while it is read": ("S10", lambda: without(fresh_run(), ev.SlotReleased, 0)),
    "a bucket is packed before its gather ends": ("S10", lambda: without(fresh_run(), ev.GatherEnded, -1)),
    "a commit without a member's proof": (
        "S11",
        lambda: [
            record
            for record in fresh_run().records
            if not (isinstance(record.event, ev.EngineProved) and record.event.engine == "engine-1")
        ],
    ),
    "a commit leaves a member out": (
        "S11",
        lambda: edited(fresh_run(), ev.VersionCommitted, -1, members=("engine-0",)),
    ),
    "a fenced engine is resumed": ("S11", fenced_serves),
    "an older term loads weights": ("S12", old_term_updates),
    "two syncs at once": ("S13", lambda: repeated(fresh_run(), ev.SyncBegan, -1)),
    "a sample is completed twice": ("S14", lambda: repeated(fresh_run(), ev.SampleCompleted, -1)),
    "an update is applied twice": ("S14", lambda: repeated(fresh_run(), ev.WeightsLoaded, -1)),
    "an aborted update stays": (
        "S15",
        lambda: edited(aborted_sync(), ev.UpdateFailed, -1, weights="torn"),
    ),
    "a write that never completed serves": (
        "S15",
        lambda: edited(fresh_run(), ev.WeightWriteEnded, -1, complete=False),
    ),
    "a step runs during the pause": ("S16", lambda: step_during(ev.EnginePaused)),
    "keep loses a request": (
        "S16",
        lambda: edited(
            pause_in_the_middle(),
            ev.EnginePaused,
            next(
                index
                for index, record in enumerate(
                    [r for r in pause_in_the_middle().records if isinstance(r.event, ev.EnginePaused)]
                )
                if record.event.running == 2
            ),
            running=1,
        ),
    ),
    "the engine aborts although keep was asked": (
        "S16",
        lambda: edited(fresh_run(), ev.EnginePaused, -1, mode="abort"),
    ),
    "abort returns a request twice": (
        "S16",
        lambda: repeated(aborted_and_continued(), ev.RequestFinished, -7),
    ),
    "old cached work serves a new request": ("S17", lambda: cache_hit(content=-1)),
    "a sample is too old when it is used": ("S18", stale_step),
    "a sample is of the future": (
        "S18",
        lambda: edited(fresh_run(), ev.GroupConsumed, -1, versions_first=(9, 9)),
    ),
    "a stale sample is called fresh": (
        "S18",
        lambda: [
            Record(
                r.t, r.actor, r.seq, r.cause, ev.GroupConsumed(**{**vars(r.event), "versions_first": (7, 7)})
            )
            if isinstance(r.event, ev.GroupConsumed) and r.event.version == 7
            else r
            for r in stale_step()
        ],
    ),
    "prompts are admitted beyond the bound": (
        "S19",
        lambda: edited(fresh_run(max_staleness=0, groups_per_step=1), ev.GroupAdmitted, 1, version=1),
    ),
    "a sample ends twice": ("S20", lambda: repeated(fresh_run(), ev.GroupConsumed, -1)),
    "a sample never ends": ("S20", lambda: without(ended(fresh_run()), ev.GroupConsumed, -1)),
    "the end counts wrongly": ("S20", lambda: edited(ended(fresh_run()), ev.RunEnded, in_flight=3)),
    "half a group is used": (
        "S21",
        lambda: edited(
            fresh_run(), ev.GroupConsumed, -1, samples=("t1.g5.s0",), versions_first=(3,), versions_last=(3,)
        ),
    ),
    "a group is overtaken": ("S22", reordered),
    "the queue overflows": ("S23", lambda: edited(fresh_run(), ev.GroupQueued, -1, depth=9)),
    "a logprob is missing": ("S24", lambda: edited(fresh_run(), ev.SampleCompleted, -1, logprobs=7)),
    "a logprob is not finite": (
        "S24",
        lambda: edited(fresh_run(), ev.SampleCompleted, -1, logprobs_finite=False),
    ),
    "logprobs are of another distribution": (
        "S24",
        lambda: edited(fresh_run(), ev.LogprobGapMeasured, -1, gap_max=0.2),
    ),
    "a correction divides by another version": (
        "S25",
        lambda: edited(fresh_run(), ev.GroupConsumed, -1, correction_versions=(1,)),
    ),
    "a step is applied twice": ("S26", lambda: repeated(fresh_run(), ev.OptimizerStepApplied, -1)),
    "a step is left out": ("S26", lambda: without(fresh_run(), ev.OptimizerStepApplied, 1)),
    "a resume with other weights": (
        "S27",
        lambda: edited(resumed_run(), ev.TermBegan, -1, restored_weights_hash="other"),
    ),
    "a resume with another cursor": (
        "S27",
        lambda: edited(resumed_run(), ev.TermBegan, -1, prompt_low_water=6),
    ),
    "a checkpoint forgets a prompt": (
        "S27",
        lambda: edited(resumed_run(), ev.CheckpointSaved, -1, prompt_low_water=1),
    ),
    "a dead worker's groups are used": ("S28", dead_worker_acts),
    "ranks enter collectives in another order": ("S29", lambda: two_ranks(swap=True)),
    "a buffer is never given back": ("S30", lambda: without(ended(fresh_run()), ev.ResourceClosed)),
    "a rollout before the initial commit": ("S31", early_request),
    "an engine stays paused": ("S32", lambda: without(ended(fresh_run(engines=1)), ev.EngineResumed, -1)),
    "a live engine never gets the version": (
        "L1",
        lambda: [
            record
            for record in late(ev.MemberStopped, 500.0, nth=-2)
            if not (
                isinstance(record.event, ev.WeightsActivated | ev.WeightsLoaded)
                and (record.actor, record.event.version) == ("engine-1", 4)
            )
        ],
    ),
    "a pause outlasts its bound": ("L2", lambda: late(ev.EngineResumed, 500.0)),
    "a sync never ends": ("L3", lambda: late(ev.SyncEnded, 500.0)),
    "a heartbeat stops": ("L4", lambda: late(ev.Heartbeat, 100.0)),
    "a request takes for ever": ("L6", lambda: late(ev.SampleCompleted, 500.0)),
    "one rank does not hear of a failure": ("L10", lambda: two_ranks(agree=(False, True))),
    "a process outlives the run": (
        "L9",
        lambda: without(ended(fresh_run()), ev.MemberStopped, -1),
    ),
    "a mismatch goes through the handshake": (
        "H1",
        lambda: edited(fresh_run(), ev.HandshakeCompared, -1, theirs="another plan"),
    ),
    "memory grows with every sync": ("D2", lambda: memory(grows=2 * 10**6)),
    "the payload never changes": ("D5", second_version_without_new_weights),
}

# Rules that a planted fault may break besides the one it is planted for, because it really breaks them too.
ALSO = {
    "S1": {"S3", "S9", "S11", "S13", "S18", "S26", "L1"},
    "S2": {"S3", "S4", "S6", "S7", "S8", "S31"},
    "S3": {"S1", "S4", "S6", "S9", "S11", "S18", "S19", "S31"},
    "S4": {"S3", "S5", "S17", "S18", "S25", "S31"},
    "S5": {"S4", "S18", "S25"},
    "S6": {"S9", "S11"},
    "S7": {"S16"},
    "S8": {"S4"},
    "S9": {"S6", "S11"},
    "S10": {"S13", "S26", "S30"},
    "S11": {"S1", "S3", "S6"},
    "S12": {"S1", "S2", "S3", "S6", "S9", "S13"},
    "S14": {"S9", "S20"},
    "S15": {"S6", "S9", "S2", "S7"},
    "S18": {"S25"},
    "S19": {"S21"},
    "S20": {"S21", "S22", "S26", "S27", "L8"},
    "S21": {"S20", "L8"},
    "S24": {"D1"},
    "S26": {"S10", "S18", "S27"},
    "S27": {"S1", "L8"},
    "S31": {"S2"},
    "S32": {"L2", "S3", "S16"},
    "L1": {"S2", "S3", "S4", "S6", "S11"},
    "L2": {"L3", "L4", "D4"},
    "L3": {"L2", "L4", "D4"},
    "L4": {"L6", "L8", "L2", "L5"},
    "L6": {"L4", "L8"},
    "H1": {"S9"},
    "D5": {"S6"},
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_caught_by_its_rule(name):
    rule, plant = PLANTS[name]
    checked = result(plant())
    assert rule in checked.violated_ids, f"not caught; violated: {checked.words() or 'nothing'}"
    others = set(checked.violated_ids) - {rule} - ALSO.get(rule, set())
    assert not others, checked.words()


@pytest.mark.parametrize("name", PLANTS)
def test_a_violation_says_what_happened_and_proves_it(name):
    rule, plant = PLANTS[name]
    records = plant()
    known = {record.id for record in records}
    found = result(records).checked.of(rule)
    for violation in found.violations:
        assert violation.rule == rule
        assert len(violation.message.split()) >= 4
        assert set(violation.event_ids) <= known
        assert violation.event_ids


def test_nothing_else_than_growth_is_a_leak():
    assert "D2" not in result(memory(grows=0)).violated_ids


def test_two_ranks_that_agree_are_fine():
    assert not result(two_ranks()).violated_ids
    assert not {"L10", "S29"} & set(result(two_ranks(agree=(False, False))).violated_ids)


def test_cached_work_of_the_active_version_is_fine():
    assert not result(cache_hit(content=0)).violated_ids


def test_rolling_engines_may_be_one_version_apart_and_no_more():
    assert not result(rolling_run().records).violated_ids
