"""Simple bad input is refused before anything that takes seconds is imported, or anything is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lab.algorithms import OBJECTIVES
from grpo_lab.cli import fuzz, fuzz_exhaustive
from grpo_lab.cli.record import RecordConfig
from grpo_lab.errors import ConfigError, ModelError
from grpo_lab.harness import refusals, runner
from grpo_lab.harness.recipe import RECIPES, recipe_with
from grpo_lab.harness.refusals import refuse_at_a_glance, require_place
from grpo_lab.testing.search import SCENARIOS

SLOW = ("torch", "transformers", "scipy")  # a second and more each
ASK = """
import contextlib, io, json, sys
from grpo_lab.cli.main import main
answers = {}
for name, words in json.loads(sys.stdin.read()).items():
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main(words)
        except SystemExit as stopped:
            code = stopped.code
    answers[name] = code, said.getvalue(), [slow for slow in %r if slow in sys.modules]
print(json.dumps(answers))
"""
# words, and what the refusal says: {tmp} is an empty folder, but for the files below
FILES = {
    "cut.json": '{"schema": 1, "scen',
    "page.md": "no marks",
    "damaged/events.jsonl": "no record\n",
    "run/events.jsonl": "",
    "other.toml": "schema = 1",
    "rows.jsonl": '{"prompt": "1+1="}\n',
}
CASES = {
    "no such experiment": ("sweep nowhere.py", "expected an experiment's file"),
    "no seeds": ("sweep experiments/faults.py --seeds 0", "seeds=0"),
    "no workers": ("sweep experiments/faults.py --workers 0", "workers=0"),
    "results into a file": ("sweep experiments/faults.py --out README.md/x", "README.md is none"),
    "results into /proc": ("sweep experiments/faults.py --out /proc/x", "/proc cannot"),
    "resume and fresh": ("sweep experiments/faults.py --resume --fresh", "not together"),
    "Ray and workers": ("sweep experiments/faults.py --ray auto --workers 2", "nothing with --ray"),
    "no such recipe": ("run nothing", "one of quickstart"),
    "a run into a file": ("run smoke --out README.md/x", "README.md is none"),
    "a run into /proc": ("run smoke --out /proc/x", "/proc cannot"),
    "no model": ("run smoke --model nowhere", "no config.json"),
    "no data": ("run smoke --task {tmp}/nowhere.jsonl", "no such file"),
    "data that nothing rewards": ("run smoke --task {tmp}/rows.jsonl", "--reward module:function"),
    "no reward module": ("run smoke --reward no_such_module_here:f", "No module named"),
    "no reward function": ("run smoke --reward os:nope", "no attribute 'nope'"),
    "a reward that is none": ("run smoke --reward os:sep", "a callable"),
    "no server": ("run smoke --engine http://127.0.0.1:9", "Start it first"),
    "a correction of what corrects itself": ("run smoke --loss-type gspo", "--correction none"),
    "fewer requests than a group has": ("run smoke --max-inflight 3", "at least num_generations = 4"),
    "a window without its policy": ("run smoke --window 2", "--staleness-policy window"),
    "no room for a completion": ("run smoke --token-budget 2", "more than a completion's"),
    "no server to measure": ("record http://127.0.0.1:9", "Start it first"),
    "measured into /proc": ("record http://127.0.0.1:9 --out /proc/x/y", "/proc cannot"),
    "a result into no folder, of a run that goes on": (
        "check grpo_lab --follow --json nowhere/x.json",
        "there is no directory",
    ),
    "a result into /proc": ("check {tmp}/run --json /proc/x", "is not writable"),
    "a result in place of a device": ("check {tmp}/run --json /dev/null", "a device or a pipe"),
    "a damaged trace": ("report {tmp}/damaged", "remove that line"),
    "no failure file": ("replay nowhere.json", "have it found again"),
    "a failure file that was cut off": ("replay {tmp}/cut.json", "have it found again"),
    "TOML for a failure file": ("replay pyproject.toml", "have it found again"),
    "an event before the first": ("replay nowhere.json --until -1", "from 0"),
    "a page into no folder": ("replay {tmp}/cut.json --html nowhere/x.html", "there is no directory"),
    "a search of no minutes": ("fuzz --minutes nan", "minutes=nan"),
    "a search of no clusters": ("fuzz --max-examples 0", "max_examples=0"),
    "too deep a search": ("fuzz --exhaustive --depth 99", "depth=99"),
    "a search of what is no scenario": ("fuzz --scenario nope", "one of any, quiet"),
    "a search of what are no cases": ("fuzz --exhaustive --cases nope", "one of quick, single"),
    "a search of no coordinator": ("fuzz --coordinator nonsense", "module:Class"),
    "a search of another class": ("fuzz --coordinator json:JSONDecoder", "a subclass of"),
    "findings into /proc": ("fuzz --out /proc/x", "/proc cannot"),
    "a kill table into no folder": ("mutants --json nowhere/x.json", "there is no directory"),
    "a kill table of a kind that is not drawn": ("mutants --plot {tmp}/x.gif", "ends in .svg"),
    "a page without a place for the kill table": ("mutants --table {tmp}/page.md", "with the marks"),
    "cases into /proc": ("mutants --out /proc/x", "/proc cannot"),
    "no calibration": ("validate {tmp}/run --latency {tmp}/nowhere.toml", "Make one"),
    "another calibration": ("validate {tmp}/run --latency {tmp}/other.toml", "Make one"),
    "no run to calibrate from": ("calibrate {tmp}/nowhere", "Name the directory of a run"),
    "tuned without a calibration": ("tune quickstart --latency {tmp}/nowhere.toml", "Make one"),
    "a name that is no UTF-8": ("check {tmp}/\udcff", "text in UTF-8"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """All in one interpreter, which so far has imported nothing: exit code, words, what is imported then."""
    tmp = tmp_path_factory.mktemp("refusals")
    for name, text in FILES.items():
        (tmp / name).parent.mkdir(exist_ok=True)
        (tmp / name).write_text(text)
    asked = {name: words.format(tmp=tmp).split() for name, (words, _) in CASES.items()}
    process = subprocess.run(
        [sys.executable, "-c", ASK % (SLOW,)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    left = {str(path.relative_to(tmp)) for path in tmp.rglob("*") if path.is_file()}
    assert left == FILES.keys()  # nothing was made
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_line_before_anything_slow_is_imported(name, answers):
    words, expected = CASES[name]
    code, said, slow = answers[name]
    assert code == 2, said
    assert len(said.splitlines()) == 1
    assert said.startswith(f"grpo-lab {words.split()[0]}: ")
    assert expected in said
    assert slow == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"concurrencies": (1, 4), "prompt_tokens": (16,)}, "3 different loads or more"),
        ({"concurrencies": (4, 4, 4), "prompt_tokens": (16,)}, "not 1"),
        ({"concurrencies": ()}, "from 1 to"),
        ({"concurrencies": (0, 1)}, "from 1 to"),
        ({"prompt_tokens": (-1,)}, "from 1 to"),
        ({"rounds": 10**12}, "from 1 to 10,000"),
    ],
)
def test_loads_that_cannot_be_measured_or_fitted(fields, words):
    with pytest.raises(ConfigError, match=words):
        RecordConfig("http://127.0.0.1:9", **fields)


def test_the_losses_without_a_correction_are_those_of_the_trainer():
    assert set(refusals.OWN_RATIO) == set(OBJECTIVES)


def test_the_search_has_the_scenarios_and_cases_that_are_known_by_name():
    assert tuple(SCENARIOS) == fuzz.SCENARIO_NAMES
    assert tuple(fuzz_exhaustive.CASES) == fuzz.CASE_NAMES


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
