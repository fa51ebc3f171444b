"""Simple bad input is refused before anything that takes seconds is imported, or anything is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lab.errors import ConfigError, ModelError
from grpo_lab.harness import runner
from grpo_lab.harness.recipe import RECIPES, recipe_with
from grpo_lab.harness.refusals import refuse_at_a_glance, require_place

SLOW = ("torch", "transformers", "pandas", "matplotlib", "scipy")
ASK = """
import sys
from grpo_lab.cli.main import main
code = main(sys.argv[1:])
slow = [name for name in {slow} if name in sys.modules]
sys.exit(90 if slow else code)
"""
WORDS = {
    "no such experiment": ("sweep", "nowhere.py"),
    "no seeds": ("sweep", "experiments/faults.py", "--seeds", "0"),
    "no workers": ("sweep", "experiments/faults.py", "--workers", "0"),
    "results into a file": ("sweep", "experiments/faults.py", "--out", "README.md/x"),
    "resume and fresh": ("sweep", "experiments/faults.py", "--resume", "--fresh"),
    "Ray and workers": ("sweep", "experiments/faults.py", "--ray", "auto", "--workers", "2"),
    "no such recipe": ("run", "nothing"),
    "a run into a file": ("run", "smoke", "--out", "README.md/x"),
    "no model": ("run", "smoke", "--model", "nowhere"),
    "a result into no folder, of a run that goes on": (
        "check",
        "grpo_lab",
        "--follow",
        "--json",
        "nowhere/x.json",
    ),
    "no failure file": ("replay", "nowhere.json"),
    "TOML for a failure file": ("replay", "pyproject.toml"),
    "an event before the first": ("replay", "nowhere.json", "--until", "-1"),
    "a search of no minutes": ("fuzz", "--minutes", "nan"),
    "a search of no clusters": ("fuzz", "--max-examples", "0"),
    "too deep a search": ("fuzz", "--exhaustive", "--depth", "99"),
    "no reward module": ("run", "smoke", "--reward", "no_such_module_here:f"),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_nothing_slow_is_imported_to_refuse_it(words):
    command = [sys.executable, "-c", ASK.format(slow=SLOW), *words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2, answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stderr.startswith(f"grpo-lab {words[0]}: ")


def recipe(**fields):
    return recipe_with(fields, RECIPES["smoke"][1])


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"reward": "statistics"}, ConfigError, "module:function"),
        ({"reward": ":f"}, ConfigError, "module:function"),
        ({"reward": "no_such_module_here.deeper:f"}, ConfigError, "No module named 'no_such_module_here'"),
        ({"model": "nowhere"}, ModelError, "no config.json"),
        ({"resume_from": "nowhere"}, ConfigError, "checkpoint directory"),
        ({"world": "sim", "trainer_ranks": 2}, ConfigError, "1 in a simulated world"),
        ({"world": "sim", "engine": "vllm"}, ConfigError, "sim in a simulated world"),
    ],
)
def test_a_recipe_is_refused_at_a_glance(fields, error, words, tmp_path):
    with pytest.raises(error, match=words):
        refuse_at_a_glance(recipe(out=tmp_path, **fields))


def test_what_is_fine_is_let_through_and_nothing_is_made(tmp_path):
    refuse_at_a_glance(recipe(out=tmp_path / "not" / "yet", reward="statistics:mean"))
    refuse_at_a_glance(recipe(out=tmp_path, reward="__main__:f"))
    assert not list(tmp_path.iterdir())


def test_a_place_must_be_a_directory_or_below_one(tmp_path):
    (tmp_path / "file").write_text("")
    require_place(tmp_path / "a" / "b")
    for place in (tmp_path / "file", tmp_path / "file" / "x" / "y", Path("/dev/null")):
        with pytest.raises(ConfigError, match="expected a directory"):
            require_place(place)


def test_ranks_may_share_a_group(tmp_path):
    """What is looked at before there are ranks must not take one of them for all."""
    runner._refuse_bad_input(recipe(trainer_ranks=4, prompts_per_step=2, num_generations=2, out=tmp_path))
