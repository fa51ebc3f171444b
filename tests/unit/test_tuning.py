"""``grpo-lab tune``: safe constraints, an honest front, a recommendation that can be run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from calibrated_runs import KNOWN, RECIPE, records_of
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.cli import tune as tune_command
from grpo_lab.cli.main import main
from grpo_lab.errors import ConfigError
from grpo_lab.harness import validation_runs
from grpo_lab.harness.recipe import Recipe, load_recipe
from grpo_lab.harness.tuning import (
    Candidate,
    Settings,
    Simulator,
    candidates_of,
    default_space,
    front_of,
    merged_figures,
    parse_space,
    tune,
)
from grpo_lab.harness.tuning_constraints import Constraint, Objective
from grpo_lab.harness.tuning_report import recipe_toml, verdict
from grpo_lab.harness.validation import figures_of
from grpo_lab.harness.validation_figures import QUANTITIES, Figures

FIGURES = figures_of(records_of(RECIPE))
FASTEST = Objective("tokens_per_s", "max")


def figures(tokens_per_s: float, staleness: float) -> Figures:
    return dataclasses.replace(
        FIGURES, tokens_per_s=tokens_per_s, staleness_mean=staleness, staleness_p99=staleness
    )


# -- objectives and constraints ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "staleness_p99",
        "staleness_p99 = 2",
        "staleness_p99<=",
        "staleness_p99<=two",
        "staleness_p99<=nan",
        "staleness_p99<=inf",
        "staleness_p99<=2 or 1",
        "unknown<=2",
        "__import__('os').system('true')<=2",
        "staleness_p99<=__import__",
        "staleness<=2",
    ],
)
def test_a_constraint_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Constraint.parse(text)


@settings(max_examples=40)
@given(st.text(max_size=40))
def test_any_text_is_a_constraint_or_refused(text: str) -> None:
    try:
        found = Constraint.parse(text)
    except ConfigError:
        return
    assert found.quantity in QUANTITIES


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("staleness_p99<=2", True),
        ("staleness_p99 < 2", False),
        ("tokens_per_s>=1e3", True),
        ("sync_s>9", False),
    ],
)
def test_a_constraint_holds_or_not(text: str, holds: bool) -> None:
    constraint = Constraint.parse(text)
    assert constraint.holds(figures(1000.0, 2.0)) is holds
    assert (constraint.excess(figures(1000.0, 2.0)) == 0.0) is (holds or text == "staleness_p99 < 2")


def test_what_was_not_measured_breaks_a_constraint() -> None:
    none = dataclasses.replace(FIGURES, sync_s=None)
    assert not Constraint.parse("sync_s<=100").holds(none)
    assert not Constraint.parse("sync_s>=0").holds(none)


def test_an_objective_knows_its_direction() -> None:
    assert Objective.parse("tokens_per_s").goal == "max"
    assert Objective.parse("ttft_s").goal == "min"
    assert Objective.parse("max:staleness_mean").goal == "max"
    for text in ("faster", "most:tokens_per_s", "min:", ""):
        with pytest.raises(ConfigError):
            Objective.parse(text)


# -- the space ---------------------------------------------------------------------------------------------


def test_the_space_is_read_by_the_types_of_the_fields() -> None:
    space = parse_space(["max_inflight=64,128", "clear_cache=true,false", "pause_mode=keep, wait"], RECIPE)
    assert space == {"max_inflight": [64, 128], "clear_cache": [True, False], "pause_mode": ["keep", "wait"]}


@pytest.mark.parametrize(
    "word", ["max_inflight", "learning_rate=1", "max_inflight=many", "clear_cache=1", "pause_mode=stop"]
)
def test_a_space_that_cannot_be_searched_is_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        parse_space([word], RECIPE)


def test_candidates_are_different_and_the_recipe_is_the_first() -> None:
    found = candidates_of(RECIPE, default_space(RECIPE), 50, 0)
    assert found[0] == {}
    assert 30 < len(found) <= 51
    assert len({tuple(sorted(one.items())) for one in found}) == len(found)


def test_the_front_has_nobody_who_is_beaten() -> None:
    rows = [
        Candidate({"n": n}, figures(speed, age), True, 1)
        for n, (speed, age) in enumerate([(5, 2.0), (4, 1.0), (3, 1.5), (6, 2.0), (4, 0.5)])
    ]
    assert [row.settings["n"] for row in front_of(rows, FASTEST)] == [4, 3]


# -- the search --------------------------------------------------------------------------------------------


def truth(settings: Settings) -> Figures:
    """More staleness and more requests in flight are faster; more than 256 in flight help nobody."""
    bound = int(settings.get("max_staleness", 1) or 0)
    inflight = int(settings.get("max_inflight", 64) or 0)
    return figures(100.0 * (1 + bound) + min(inflight, 256), float(bound))


def evaluate(candidates: Sequence[Settings], steps: int) -> list[Figures]:
    return [truth(settings) for settings in candidates]


SPACE = {"max_staleness": [0, 1, 2, 4], "max_inflight": [32, 64, 128, 256, 512]}


def test_recommends_the_fastest_that_keeps_the_constraints() -> None:
    candidates = candidates_of(RECIPE, SPACE, 100, 0)
    tuned = tune(RECIPE, candidates, evaluate, FASTEST, [Constraint.parse("staleness_p99<=2")])
    assert tuned.recommended is not None
    assert tuned.recommended.settings["max_staleness"] == 2
    assert tuned.recommended.settings["max_inflight"] in (256, 512)
    assert tuned.default.settings == {}
    ages = [row.figures.staleness_mean for row in tuned.front]
    assert ages == sorted(ages)
    assert ages[0] == 0.0  # halving keeps the whole front, not the fastest alone


def test_recommends_nothing_where_nothing_keeps_the_constraints() -> None:
    candidates = candidates_of(RECIPE, SPACE, 100, 0)
    tuned = tune(RECIPE, candidates, evaluate, FASTEST, [Constraint.parse("tokens_per_s>=1e9")])
    assert tuned.recommended is None
    assert tuned.front


def test_candidates_that_cannot_be_simulated_lose() -> None:
    def some(candidates: Sequence[Settings], steps: int) -> list[Figures | None]:
        return [None if settings.get("max_staleness") == 4 else truth(settings) for settings in candidates]

    tuned = tune(RECIPE, candidates_of(RECIPE, SPACE, 100, 0), some, FASTEST, [])
    assert tuned.recommended is not None
    assert tuned.recommended.settings["max_staleness"] == 2
    with pytest.raises(ConfigError, match="can be simulated"):
        tune(RECIPE, [{}], lambda candidates, steps: [None] * len(candidates), FASTEST, [])


def test_means_of_several_runs_have_all_their_groups() -> None:
    merged = merged_figures([figures(10, 1.0), figures(30, 2.0)])
    assert merged.tokens_per_s == 20
    assert sum(merged.staleness.values()) == 2 * sum(FIGURES.staleness.values())


def test_the_simulator_prefers_what_is_faster_in_truth() -> None:
    """A synchronous run of the known cluster is slower than one that overlaps."""
    simulator = Simulator(RECIPE, KNOWN)
    overlapping, synchronous = simulator([{}, {"max_staleness": 0}], 6)
    assert overlapping is not None
    assert synchronous is not None
    assert overlapping.tokens_per_s > 1.2 * synchronous.tokens_per_s
    assert synchronous.staleness_max == 0


def test_the_recommended_recipe_can_be_loaded(tmp_path: Path) -> None:
    candidates = candidates_of(RECIPE, SPACE, 100, 0)
    tuned = tune(RECIPE, candidates, evaluate, FASTEST, [])
    path = tmp_path / "tuned.toml"
    path.write_text(recipe_toml(tuned, "not validated"))
    assert "# not validated" in path.read_text()
    again = load_recipe(str(path))
    assert tuned.recommended is not None
    expected = dataclasses.replace(tuned.recipe_of(tuned.recommended), name="known-tuned")
    assert again == expected


def test_the_verdict_gives_the_ratio_of_neighbouring_runs() -> None:
    tuned = tune(RECIPE, [{}, {"max_staleness": 2}], evaluate, FASTEST, [])
    forecasts = [figures(100, 1.0), figures(150, 2.0)]
    lines = list(
        verdict(
            tuned, forecasts, [figures(90, 1.0), figures(110, 1.0)], [figures(135, 2.0), figures(165, 2.0)]
        )
    )
    assert "predicted 1.500, measured 1.500" in lines[-1]
    assert "error +0.0%" in lines[0]


# -- the command -------------------------------------------------------------------------------------------


def test_command_prints_a_front_and_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    KNOWN.save(tmp_path / "c.toml")
    ran: list[Recipe] = []

    def measured(recipes: dict[str, Recipe], repeats: int, *rest: object) -> dict[str, list[Figures]]:
        ran.extend(recipes.values())
        return {"default": [figures(100, 1.0)] * repeats, "recommended": [figures(140, 1.0)] * repeats}

    monkeypatch.setattr(validation_runs, "measure", measured)
    words = ["tune", "smoke", "--latency", str(tmp_path / "c.toml"), "--over", "max_inflight=16,64"]
    words += ["--over", "pause_mode=keep,wait", "--out", str(tmp_path / "best.toml")]
    words += ["--verify", "--verify-steps", "5", "--candidates", "3"]
    assert main([*words, "--constraint", "staleness_p99<=2", "--constraint", "sync_s<=9"]) == 0
    said = capsys.readouterr().out
    assert "recommended" in said
    assert "ratio recommended / as it is" in said
    assert "staleness_p99<=2, sync_s<=9" in said  # both, not the last one alone
    assert "candidates of max_inflight, pause_mode" in said
    assert load_recipe(str(tmp_path / "best.toml")).max_inflight in (16, 64, 256)
    assert [recipe.steps for recipe in ran] == [5, 5]
    assert "not validated: no validation found" in said


def test_the_error_of_predictions_stands_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = {
        "a": {"tokens_per_s": -0.041, "staleness_mean": 0.1},
        "b": {"tokens_per_s": 0.03, "staleness_mean": -0.2},
    }
    dataclasses.replace(KNOWN, held_out=held_out).save(tmp_path / "c.toml")
    out = tmp_path / "best.toml"
    words = ["tune", "smoke", "--latency", str(tmp_path / "c.toml"), "--over", "max_inflight=64"]
    assert main([*words, "--candidates", "1", "--out", str(out)]) == 0
    error = "prediction error, the worst of 2 held-out runs: throughput -4.1%, mean staleness -0.20 versions"
    assert error in " ".join(capsys.readouterr().out.split())
    assert error in out.read_text()


def test_command_says_when_nothing_keeps_the_constraints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    KNOWN.save(tmp_path / "c.toml")
    words = ["tune", "smoke", "--latency", str(tmp_path / "c.toml"), "--over", "max_inflight=64"]
    assert main([*words, "--constraint", "tokens_per_s>=1e12"]) == tune_command.MISSED
    assert "no candidate keeps the constraints" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--objective", "fun"],
        ["--constraint", "staleness_p99=2"],
        ["--over", "learning_rate=1"],
        ["--latency", "nothing.toml"],
        ["--out", "/"],
        ["--out", "/proc/self/status/best.toml"],
        ["--verify", "--runs", "/proc/self/status"],
    ],
)
def test_command_refuses_bad_input(words: list[str]) -> None:
    assert main(["tune", "smoke", *words]) == 2


def test_command_refuses_no_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", "smoke", "--candidates", "0"])
    assert ended.value.code == 2
    assert "from 1 to 10000" in capsys.readouterr().err
