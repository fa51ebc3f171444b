"""What the demo shows is learning from reward: it stops when the reward stops saying anything.

Real runs of the quickstart recipe, cut short. The tiny model is warmed up once and cached.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from grpo_lab.harness.recipe import RECIPES
from grpo_lab.harness.runner import run

STEPS = 16


def gain(out: Path, **changes) -> float:
    """Held-out accuracy after minus before."""
    recipe = dataclasses.replace(RECIPES["quickstart"][1], steps=STEPS, out=out, **changes)
    assert run(recipe, Console(quiet=True)) == 0
    summary = json.loads((out / "latest" / "summary.json").read_text())
    assert summary["violations"] == 0
    return summary["heldout_accuracy_after"] - summary["heldout_accuracy_before"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gain_needs_the_signal(tmp_path):
    assert gain(tmp_path / "signal") > 0.05
    assert gain(tmp_path / "shuffled", shuffle_rewards=True) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_a_learning_rate_nothing_is_gained(tmp_path):
    assert gain(tmp_path, learning_rate=0.0) == 0.0
