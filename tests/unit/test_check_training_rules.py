"""S26 and S27: steps and prompts across crashes and resumes."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_trace import RolloutTrace

from grpo_lab.events import CheckpointSaved


def trained(steps: int = 2) -> RolloutTrace:
    """Steps 0 .. ``steps - 1`` of term 1, a prompt each, and a commit after each."""
    trace = RolloutTrace(max_staleness=8).begin().commit(1, step=0)
    for step in range(steps):
        trace.generate(step, version=step + 1)
        trace.train(step, step=step, version=step + 1, first=step + 1).commit(step + 2, step=step + 1)
    return trace


def save(trace: RolloutTrace, step: int, **fields: Any) -> RolloutTrace:
    values: dict[str, Any] = {
        "checkpoint": "c",
        "term": trace.term,
        "version": step + 1,
        "optimizer_step": step,
        "prompt_low_water": step,
        "weights_hash": "aa",
    }
    trace.emit("trainer", CheckpointSaved(**(values | fields)))
    return trace


def resume(trace: RolloutTrace, step: int, **fields: Any) -> RolloutTrace:
    values: dict[str, Any] = {
        "term": 2,
        "base_version": step + 1,
        "step": step,
        "prompt_low_water": step,
        "checkpoint": "c",
        "restored_weights_hash": "aa",
    }
    return trace.begin(**(values | fields))


# ---- S26 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 2])
def test_s26_a_step_twice_or_left_out(step: int) -> None:
    trace = trained(1).apply(step, version=2)
    assert trace.violated() == {"S26"}


def test_s26_steps_in_order() -> None:
    assert trained(3).violated() == set()
    assert trained(3).evaluated("S26") == 7  # three steps, four syncs
    assert RolloutTrace().check().of("S26").status == "vacuous"


def test_s26_discarded_steps_are_applied_again_after_a_resume() -> None:
    trace = save(trained(1), step=1)
    trace.generate(1, version=2).train(1, step=1, version=2, first=2)
    resume(trace, step=1).commit(3, step=1)
    trace.generate(0, version=3, prompt_index=1)
    trace.train(0, step=1, version=3, first=3, prompt_index=1).commit(4, step=2)
    assert trace.check().of("S26").status == "passed"
    assert trace.apply(1, version=4).check().of("S26").violation_count == 1


def test_s26_a_second_run_without_a_checkpoint_goes_on_counting() -> None:
    good = trained(2).begin(term=2, base_version=3, step=2, prompt_low_water=2)
    assert good.violated() == set()
    assert "S26" in trained(2).begin(term=2, base_version=3, step=1, prompt_low_water=2).violated()


def test_s26_a_resume_claims_steps_that_nobody_applied() -> None:
    trace = trained(2).begin(term=2, base_version=3, step=5, prompt_low_water=2, checkpoint="elsewhere")
    assert trace.violated() == {"S26"}


def test_s26_an_old_trainer_lives_on() -> None:
    trace = save(trained(1), step=1)
    resume(trace, step=1).commit(3, step=1)
    trace.term = 1
    trace.apply(1, version=2)
    assert "S26" in trace.violated()


def test_s26_a_sync_that_miscounts_the_steps_behind_its_weights() -> None:
    trace = trained(1)
    trace.commit(3, step=1, began_step=4)
    assert trace.violated() == {"S26"}


# ---- S27 --------------------------------------------------------------------------------------------


def test_s27_a_resume_that_matches_its_checkpoint() -> None:
    trace = resume(save(trained(2), step=2), step=2)
    trace.commit(4, step=2).generate(0, version=4, prompt_index=2)
    trace.train(0, step=2, version=4, first=4, prompt_index=2)
    assert trace.violated() == set()
    assert trace.evaluated("S27") > 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_version": 2},
        {"prompt_low_water": 0},
        {"prompts_done": (5,)},
        {"restored_weights_hash": "bb"},
    ],
)
def test_s27_a_resume_from_another_cut(wrong: dict[str, Any]) -> None:
    trace = resume(save(trained(2), step=2), step=2, **wrong)
    assert "S27" in trace.violated()
    assert trace.violated() <= {"S27", "S1"}
    assert "was saved there" in trace.check().of("S27").violations[0].message


def test_s27_the_term_rises() -> None:
    trace = resume(save(trained(2), step=2), step=2, term=1)
    assert "S27" in trace.violated()


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"optimizer_step": 1},
        {"prompt_low_water": 1},  # a prompt that was trained on would be done again
        {"prompt_low_water": 3},  # a prompt that was not would be skipped
        {"prompts_done": (7,)},
    ],
)
def test_s27_a_checkpoint_that_is_no_consistent_cut(wrong: dict[str, Any]) -> None:
    assert save(trained(2), step=2, **wrong).violated() == {"S27"}


def test_s27_a_cut_may_lack_prompts_that_were_dropped() -> None:
    """The worker drops them; the trainer hears of it later, maybe after the checkpoint."""
    trace = trained(1).admit(1, 2).drop(1, "request_failed").generate(2, version=2)
    trace.train(2, step=1, version=2, first=2).commit(3, step=2)
    save(trace, step=2, version=3, prompt_low_water=1, prompts_done=(2,))
    save(trace, step=2, version=3, prompt_low_water=3)
    assert trace.violated() == set()


def test_s27_a_prompt_is_trained_on_twice() -> None:
    trace = trained(2).admit(2, 3, prompt_index=2).dispatch(2, 3).complete(2, 3).enqueue(2).take(2)
    assert trace.train(2, step=2, version=3, first=3, prompt_index=0).violated() == {"S27"}


def test_s27_a_prompt_is_skipped() -> None:
    assert trained(2).admit(2, 3, prompt_index=3).violated() == {"S27"}
    assert trained(2).admit(2, 3, prompt_index=2).violated() == set()


def test_s27_prompts_done_above_the_low_water_mark_are_not_taken_up_again() -> None:
    trace = trained(1).admit(1, 2).generate(2, version=2).train(2, step=1, version=2, first=2)
    save(trace.commit(3, step=2), step=2, version=3, prompt_low_water=1, prompts_done=(2,))
    resume(trace, step=2, prompt_low_water=1, prompts_done=(2,)).commit(4, step=2)
    trace.admit(0, 4, prompt_index=1).admit(1, 4, prompt_index=3)
    assert trace.violated() == set()
    assert trace.admit(2, 4, prompt_index=2).violated() == {"S27"}


def test_s27_is_vacuous_without_prompts_and_resumes() -> None:
    assert RolloutTrace().begin().check().of("S27").status == "vacuous"
