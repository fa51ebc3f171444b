"""The figures of a run against what the maker of a synthetic trace counted itself."""

from __future__ import annotations

import json
import math
from statistics import fmean

import pytest
from report_trace import CHECKED, GENERATIONS, PHASES_S, STEPS, synthetic

from grpo_lab import events as ev
from grpo_lab.events import Record
from grpo_lab.report.digest import Digest
from grpo_lab.report.spans import common, merged, total_s, without
from grpo_lab.report.summary import METRICS_SCHEMA, metrics_table, summarise


@pytest.fixture(scope="module")
def played():
    return synthetic()


def records_of(*events: ev.Event, actor: str = "trainer") -> list[Record]:
    return [Record(float(seq), actor, seq, (), event) for seq, event in enumerate(events)]


def test_summary_equals_the_truth(played):
    records, truth = played
    summary = summarise(iter(records), checked=CHECKED, package_version="0.1", commit="abc")
    assert summary["dispatched"] == truth.dispatched
    assert summary["consumed"] == truth.consumed == STEPS * 2 * GENERATIONS
    assert summary["dropped_by_reason"] == truth.dropped
    assert summary["dropped"] == sum(truth.dropped.values())
    assert (summary["in_flight"], summary["queued"]) == (0, 0)
    assert summary["dispatched"] == summary["consumed"] + summary["dropped"]
    assert summary["weight_versions"] == truth.committed == 11
    assert summary["staleness_max_versions"] == max(truth.staleness_versions)
    assert summary["staleness_mean_versions"] == pytest.approx(fmean(truth.staleness_versions))
    assert summary["staleness_max_steps"] == max(truth.staleness_steps)
    assert summary["staleness_mean_steps"] == pytest.approx(fmean(truth.staleness_steps))
    assert (summary["reward_first"], summary["reward_last"]) == (truth.rewards[0], truth.rewards[-1])
    assert (summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]) == (0.25, 0.85)
    assert summary["logprob_gap_max"] == 3e-6
    assert summary["sync_s"] == pytest.approx(PHASES_S)
    assert summary["tokens_generated"] == truth.tokens
    elapsed = truth.last_completion_t - truth.first_dispatch_t
    assert summary["tokens_per_s"] == pytest.approx(truth.tokens / elapsed)
    assert (summary["wall_s"], summary["virtual_s"]) == (truth.end_t, None)
    assert summary["proofs"] == {
        "hash": 11,
        "structure": 11,
        "canary_holds": 18,
        "canary_inconclusive": 4,
        "canary_fails": 0,
    }
    assert summary["violations"] == 1
    assert summary["rules_evaluated"] == {"S1": 11, "S18": 40}
    assert summary["rules_not_applicable"] == ["S8"]
    assert (summary["ended"], summary["world"], summary["engine"], summary["seed"]) == (
        "clean",
        "real",
        "sim",
        7,
    )
    assert (summary["version"], summary["commit"]) == ("0.1", "abc")
    json.dumps(summary, allow_nan=False)


def test_summary_has_every_documented_name(played):
    documented = (  # the interface that scripts rely on
        "violations rules_evaluated heldout_accuracy_before heldout_accuracy_after reward_first reward_last "
        "weight_versions staleness_max_versions staleness_max_steps staleness_mean_versions logprob_gap_max "
        "dispatched consumed dropped in_flight queued sync_s tokens_per_s wall_s virtual_s proofs "
        "rules_not_applicable provisional_dropped ended world engine seed version commit"
    )
    assert set(documented.split()) <= set(summarise(played[0]))


@pytest.mark.parametrize("cut_t", [0.05, 0.9, 1.77, 3.33, 5.01])
def test_a_cut_off_trace_conserves_samples(cut_t):
    records, truth = synthetic(cut_t=cut_t)
    summary = summarise(records)
    assert summary["ended"] == "failed"
    assert summary["in_flight"] == truth.in_flight
    assert summary["queued"] == truth.queued
    ends = summary["consumed"] + summary["dropped"] + summary["in_flight"] + summary["queued"]
    assert summary["dispatched"] == truth.dispatched == ends


def test_busy_fractions_follow_from_the_schedule(played):
    records, truth = played
    digest = Digest(records)
    begin, end = digest.window
    assert begin == truth.first_dispatch_t
    summary = summarise(digest)
    assert summary["trainer_busy_fraction"] == pytest.approx(STEPS * 0.30 / (end - begin))
    assert total_s(digest.training.waiting) == pytest.approx(truth.waited_s)
    paused = [total_s(engine.paused) for engine in digest.engines]
    assert paused == pytest.approx([11 * 0.10] * 2)
    assert 0 < summary["overlap_fraction"] <= summary["trainer_busy_fraction"]


def test_metrics_have_a_row_for_each_step(played):
    records, truth = played
    table = metrics_table(records)
    assert table.schema == METRICS_SCHEMA
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["reward_mean"] for row in rows] == truth.rewards
    assert max(row["staleness_versions_max"] for row in rows) == max(truth.staleness_versions)
    assert max(row["staleness_steps_max"] for row in rows) == max(truth.staleness_steps)
    assert sum(row["samples"] for row in rows) == truth.consumed
    assert sum(row["wait_s"] for row in rows) == pytest.approx(truth.waited_s)
    # The first sync came before step 1, the last after step 20.
    assert [row["weight_sync_time_s"] > 0 for row in rows] == [step % 2 == 1 for step in range(1, 21)]
    assert rows[0]["logprob_gap_max"] is None


def test_simulated_run_has_virtual_time_and_the_given_wall_time():
    records = records_of(ev.RunDeclared(world="sim"), ev.RunEnded(outcome="clean"))
    summary = summarise(records, wall_s=0.25)
    assert (summary["virtual_s"], summary["wall_s"]) == (1.0, 0.25)


def test_empty_trace_gives_no_invented_figures():
    summary = summarise([])
    assert summary["dispatched"] == 0
    unknown = (
        "violations",
        "reward_first",
        "staleness_max_versions",
        "logprob_gap_max",
        "tokens_per_s",
        "heldout_accuracy_after",
        "overlap_fraction",
    )
    assert {name: summary[name] for name in unknown} == dict.fromkeys(unknown)
    assert metrics_table([]).num_rows == 0


def test_one_evaluation_before_training_is_not_the_result():
    before = ev.Evaluated(split="heldout", accuracy=0.3, optimizer_step=0, version=1, prompts=8)
    summary = summarise(records_of(before))
    assert (summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]) == (0.3, None)


def test_a_gap_that_is_not_a_number_is_not_lost():
    gaps = [
        ev.LogprobGapMeasured(version=v, gap_max=gap, gap_mean=0.0, tokens=1)
        for v, gap in enumerate((1e-6, math.nan, 2e-6))
    ]
    assert summarise(records_of(*gaps))["logprob_gap_max"] == math.inf


def dispatched(*samples: str) -> list[ev.Event]:
    return [
        ev.SampleDispatched(term=1, sample=name, group="g", engine="engine-0", version=1) for name in samples
    ]


def completed(sample: str, *, provisional: bool = False) -> ev.Event:
    return ev.SampleCompleted(
        term=1,
        sample=sample,
        group="g",
        engine="engine-0",
        finish_reason="stop",
        tokens=4,
        logprobs=4,
        logprobs_finite=True,
        provisional=provisional,
    )


def dropped(*samples: str, reason: str) -> ev.Event:
    return ev.GroupDropped(term=1, group="g", prompt_index=0, samples=samples, reason=reason)


def test_a_dropped_group_counts_only_what_was_dispatched():
    summary = summarise(records_of(*dispatched("a"), dropped("a", "b", reason="request_failed")))
    assert (summary["dispatched"], summary["dropped"], summary["in_flight"]) == (1, 1, 0)


def test_a_sample_sent_again_is_still_one_sample():
    summary = summarise(records_of(*dispatched("a"), *dispatched("a"), completed("a")))
    assert (summary["dispatched"], summary["in_flight"], summary["queued"]) == (1, 0, 1)


def test_provisional_samples_are_counted_when_dropped():
    events = [*dispatched("a", "b"), completed("a", provisional=True), completed("b")]
    summary = summarise(records_of(*events, dropped("a", "b", reason="canary_failed")))
    assert (summary["dropped"], summary["provisional_dropped"]) == (2, 1)


def test_the_same_step_told_by_two_ranks_counts_once():
    step = ev.OptimizerStepApplied(term=1, optimizer_step=1, version=1, loss=0.5, reward_mean=0.5)
    assert metrics_table(records_of(step, step)).num_rows == 1


def test_rewards_come_from_the_groups_where_the_step_names_none():
    consumed = ev.GroupConsumed(
        term=1,
        group="g",
        number=0,
        prompt_index=0,
        samples=("a", "b", "c"),
        versions_first=(1, 1, 1),
        versions_last=(1, 1, 1),
        version=1,
        optimizer_step=1,
        optimizer_step_first=0,
    )
    scored = ev.GroupScored(term=1, group="g", rewards=(1.0, None, 0.0))
    step = ev.OptimizerStepApplied(term=1, optimizer_step=1, version=1, loss=0.5)
    summary = summarise(records_of(scored, consumed, step))
    assert (summary["reward_first"], summary["staleness_max_steps"]) == (0.5, 0)


def test_a_retried_sync_is_one_sync_with_its_attempts():
    began = [
        ev.SyncBegan(term=1, version=1, attempt=attempt, view=1, members=("engine-0",)) for attempt in (1, 2)
    ]
    failed = ev.SyncAborted(term=1, version=1, attempt=1, reason="wire")
    ended = ev.SyncEnded(term=1, version=1, outcome="aborted", phases_s={"total": 9.0})
    digest = Digest(records_of(began[0], failed, began[1], ended))
    assert [(sync.attempts, sync.outcome, sync.committed) for sync in digest.syncs.syncs] == [
        (2, "aborted", False)
    ]
    summary = summarise(digest)
    assert (summary["weight_versions"], summary["syncs_aborted"]) == (0, 1)
    assert summary["sync_s"]["total"] is None  # means are over committed syncs


def test_steps_count_from_the_last_time_a_version_was_published():
    def began(step):
        return ev.SyncBegan(term=1, version=1, attempt=1, view=1, members=("engine-0",), optimizer_step=step)

    def applied(step):
        return ev.OptimizerStepApplied(term=1, optimizer_step=step, version=0, loss=0.5)

    consumed = ev.GroupConsumed(
        term=1,
        group="g",
        number=0,
        prompt_index=0,
        samples=("a",),
        versions_first=(1,),
        versions_last=(1,),
        version=1,
        optimizer_step=2,
    )
    gave_up = ev.SyncAborted(term=1, version=1, attempt=1, reason="wire", final=True)
    ended = ev.SyncEnded(term=1, version=1, outcome="aborted")
    events = [began(0), gave_up, ended, applied(0), applied(1), began(2), consumed]
    assert summarise(records_of(*events))["staleness_max_steps"] == 0


def test_an_engine_without_events_is_seen_through_its_requests():
    names = {"term": 1, "version": 1, "attempt": 1}
    acknowledged = [
        ev.EngineAcknowledged(engine="engine-0", call=call, **names) for call in ("pause", "finish", "resume")
    ]
    events = [*dispatched("a"), *acknowledged, completed("a")]  # at t = 0 .. 4
    (engine,) = Digest(records_of(*events)).engines
    assert engine.seen_by == "client"
    assert (engine.busy, engine.paused) == ([(0.0, 1.0), (3.0, 4.0)], [(1.0, 3.0)])
    assert engine.versions == [(2.0, 1)]


def test_spans():
    assert merged([(5.0, 6.0), (0.0, 1.0), (0.5, 2.0), (2.1, 3.0)], gap_s=0.2) == [(0.0, 3.0), (5.0, 6.0)]
    left, right = [(0.0, 4.0), (6.0, 9.0)], [(1.0, 2.0), (3.0, 7.0), (8.0, 20.0)]
    assert common(left, right) == [(1.0, 2.0), (3.0, 4.0), (6.0, 7.0), (8.0, 9.0)]
    assert without(left, right) == [(0.0, 1.0), (2.0, 3.0), (7.0, 8.0)]
    assert total_s(common(left, right)) + total_s(without(left, right)) == total_s(left)
