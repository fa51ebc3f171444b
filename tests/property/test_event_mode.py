"""Event mode says and does what step mode does: tokens, versions, blocks, order and times."""

from __future__ import annotations

import pytest
from engine_modes import Work, run, violations, works
from hypothesis import given, settings

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.event_mode import EventCore


@settings(max_examples=300, deadline=None)
@given(works())
def test_both_modes_agree(work: Work) -> None:
    step, event = run(work, EngineCore), run(work, EventCore)
    ours, theirs = event.facts(), step.facts()
    for what, value in theirs.items():
        assert ours[what] == value, what
    for (name, event_s), (other, step_s) in zip(event.ends, step.ends, strict=True):
        assert (name, event_s) == (other, pytest.approx(step_s, rel=1e-9))
    assert violations(event) == violations(step) == []
