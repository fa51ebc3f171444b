"""A recipe and a model small enough to be simulated in a second."""

from __future__ import annotations

import dataclasses

from grpo_lab.harness.recipe import RECIPES
from grpo_lab.tasks import get_task
from grpo_lab.tasks.tiny_model import TinyModelSpec, build_model

REWARD = f"{__name__}:digits_used"


def digits_used(completions, **_):
    """A reward that untrained samples differ in."""
    return [float(len(set(text))) for text in completions]


def untrained_model(path):
    """These tests are not about learning."""
    network, tokenizer = build_model(TinyModelSpec(num_layers=1, hidden_size=32), get_task("sort_digits"), 0)
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def tiny_recipe(model, out, **changes):
    """Three steps of four groups."""
    base = RECIPES["smoke"][1]
    given = {"world": "sim", "model": str(model), "out": out, "heldout_prompts": 8, "reward": REWARD}
    return dataclasses.replace(base, **{**given, **changes})
