"""Event mode says and does what step mode does: tokens, versions, blocks, order and times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from engine_modes import Work, run, violations, works
from hypothesis import Phase, given, settings

from grpo_lab.engine.block_pool import BlockPool
from grpo_lab.engine.cohort import Cohort
from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.drawn import RepeatPolicy
from grpo_lab.engine.event_mode import EventCore, Jump
from grpo_lab.engine.latency import LatencyModel
from grpo_lab.engine.policy import SyntheticPolicy
from grpo_lab.engine.scheduler import Scheduler


def agree(work: Work) -> None:
    step, event = run(work, EngineCore), run(work, EventCore)
    ours, theirs = event.facts(), step.facts()
    for what, value in theirs.items():
        assert ours[what] == value, what
    assert [second for _, second in event.ends] == pytest.approx([second for _, second in step.ends])
    assert violations(event) == violations(step) == []


@settings(max_examples=200, deadline=None)
@given(works())
def test_both_modes_agree(work: Work) -> None:
    agree(work)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@settings(max_examples=20_000, deadline=None)
@given(works())
def test_both_modes_agree_on_many(work: Work) -> None:
    agree(work)


def test_a_jump_is_one_record() -> None:
    """What event mode is for: the loop runs far less often, and the trace still tells of every step."""
    seen = {}

    @settings(max_examples=40, deadline=None)
    @given(works())
    def count(work: Work) -> None:
        for name, core_type in (("step", EngineCore), ("event", EventCore)):
            told = [r for r in run(work, core_type).records if r.event.kind == "model_step"]
            seen[name] = seen.get(name, 0) + len(told)

    count()
    assert seen["event"] < seen["step"] / 2


# --- planted bugs -------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def arrivals_do_not_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventCore, "interrupt", lambda core: None)


def cut_a_step_late(patch: pytest.MonkeyPatch) -> None:
    real = Jump.ended_steps.fget
    patch.setattr(Jump, "ended_steps", property(lambda jump: real(jump) + 1))


def abort_forgets_the_steps_that_ended(patch: pytest.MonkeyPatch) -> None:
    real = Cohort.advance
    patch.setattr(Cohort, "advance", lambda cohort, steps: real(cohort, min(steps, 1)))


def one_jitter_for_a_whole_jump(patch: pytest.MonkeyPatch) -> None:
    real = LatencyModel._factors
    patch.setattr(
        LatencyModel, "_factors", lambda model, first, count: np.repeat(real(model, first, 1), count)
    )


def context_does_not_grow(patch: pytest.MonkeyPatch) -> None:
    real = LatencyModel.durations_s

    def flat(model, plan, first, count):
        return np.concatenate([real(model, plan, step, 1) for step in range(first, first + count)])

    patch.setattr(LatencyModel, "durations_s", flat)


def blocks_a_step_late(patch: pytest.MonkeyPatch) -> None:
    real = Cohort._needed_at
    patch.setattr(Cohort, "_needed_at", lambda cohort, steps: real(cohort, steps - 1))


def blocks_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cohort, "steps_within", lambda cohort, most, blocks: most)


def stop_tokens_are_not_foreseen(patch: pytest.MonkeyPatch) -> None:
    for policy in (SyntheticPolicy, RepeatPolicy):
        patch.setattr(policy, "final_tokens", lambda _, request: request.sampling.max_tokens)


def prompts_are_counted_twice(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.schedule
    patch.setattr(
        Scheduler,
        "schedule",
        lambda one, version, steady=0, context=0: real(one, version, steady, context + (steady > 0)),
    )


def reserved_blocks_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "give_back", lambda pool, count: None)


PLANTED: tuple[Plant, ...] = (
    arrivals_do_not_cut,
    cut_a_step_late,
    abort_forgets_the_steps_that_ended,
    one_jitter_for_a_whole_jump,
    context_does_not_grow,
    blocks_a_step_late,
    blocks_are_not_counted,
    stop_tokens_are_not_foreseen,
    prompts_are_counted_twice,
    reserved_blocks_are_lost,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever shows it first: another answer, an assertion of the engine's own, an engine that died."""
    plant(monkeypatch)

    @settings(max_examples=600, deadline=None, phases=[Phase.generate], report_multiple_bugs=False)
    @given(works())
    def search(work: Work) -> None:
        agree(work)

    with pytest.raises(Exception):  # noqa: B017, PT011 - see above
        search()
