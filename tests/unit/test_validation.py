"""Predictions of held-out runs: of a cluster whose times are known they must come true."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tyro
from calibrated_runs import KNOWN, LARGER, RECIPE, SYNCHRONOUS, records_of, run_directory

from experiments import prediction
from grpo_lab.cli.main import main
from grpo_lab.errors import DataError, GrpoLabError
from grpo_lab.harness import validation
from grpo_lab.harness.calibration import Calibration
from grpo_lab.harness.calibration_runs import calibrate, load_real_run
from grpo_lab.harness.recipe import Recipe, load_recipe
from grpo_lab.harness.validation import (
    caveats,
    cluster_of,
    compare,
    figures_of,
    predict,
    recipe_parameters,
)
from grpo_lab.harness.validation_figures import Figures
from grpo_lab.harness.validation_runs import _options, interleaved, measure, run_real

HELD_OUT = dataclasses.replace(
    RECIPE, max_staleness=3, weight_sync_steps=2, max_inflight=128, seed=5, steps=16
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs to calibrate from, a held-out one, and the calibration."""
    root = tmp_path_factory.mktemp("runs")
    recipes = {"a": RECIPE, "b": LARGER, "c": SYNCHRONOUS}
    known = [run_directory(root / name, recipe) for name, recipe in recipes.items()]
    run_directory(root / "held-out", HELD_OUT)
    calibrate(known).save(root / "c.toml")
    return root


def test_command_predicts_a_held_out_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = folder / "answer.json"
    words = ["validate", str(folder / "held-out"), "--latency", str(folder / "c.toml"), "--json", str(answer)]
    assert main([*words, "--seeds", "2"]) == 0
    found = json.loads(answer.read_text())
    rows = {row["quantity"]: row for row in found["rows"]}
    # Lengths are correlated within groups: two runs of so few groups differ by some 5 % in their tokens.
    for name, bound in (("tokens_per_s", 0.1), ("step_s", 0.1), ("tpot_s", 0.05)):
        assert abs(rows[name]["relative"]) < bound, rows[name]
    assert abs(rows["ttft_s"]["relative"]) < 0.15
    assert abs(rows["sync_s"]["relative"]) < 0.15
    assert abs(rows["staleness_mean"]["error"]) < 0.25
    assert found["staleness"]["wasserstein_versions"] < 0.25
    assert sum(found["staleness"]["measured"].values()) == pytest.approx(1.0)
    said = capsys.readouterr().out
    assert "throughput" in said
    assert "no prediction" not in said
    # The calibration carries the error from now on.
    known = Calibration.load(folder / "c.toml").held_out
    assert known["held-out"]["tokens_per_s"] == pytest.approx(rows["tokens_per_s"]["relative"], rel=1e-4)
    assert known["held-out"]["staleness_mean"] == pytest.approx(rows["staleness_mean"]["error"], rel=1e-4)
    assert "prediction error, the worst of 1 held-out run: throughput" in " ".join(said.split())


def test_a_wrong_calibration_shows(folder: Path) -> None:
    """The errors are those of the calibration, not of the comparison."""
    run = load_real_run(folder / "held-out")
    step = dataclasses.replace(KNOWN.trainer_step, base_s=1.0)
    slow = dataclasses.replace(KNOWN, trainer_step=step)
    comparison = compare(predict(run.parameters, slow, 1), [figures_of(run.records)])
    relative = comparison.row("tokens_per_s").relative
    assert relative is not None
    assert relative < -0.3


def test_says_when_the_run_is_not_held_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Calibration.load(folder / "c.toml").held_out
    assert main(["validate", str(folder / "a"), "--latency", str(folder / "c.toml"), "--seeds", "1"]) == 0
    assert "no prediction" in capsys.readouterr().out
    assert Calibration.load(folder / "c.toml").held_out == before


def test_says_what_differs_from_the_calibrated_runs(folder: Path) -> None:
    run = load_real_run(folder / "held-out")
    config = {**run.config, "engine_threads": 4}
    other = dataclasses.replace(KNOWN.source, settings={"engine_threads": 1, "engines": 1}, machine={})
    found = caveats(dataclasses.replace(run, config=config), dataclasses.replace(KNOWN, source=other))
    assert any("engine_threads is 4 here and was 1" in line for line in found)
    assert any("another machine" in line for line in found)
    assert not any("engines is" in line for line in found)


def test_command_refuses_a_simulated_run(folder: Path, tmp_path: Path) -> None:
    path = run_directory(tmp_path / "run", RECIPE)
    trace = path / "events.jsonl"
    trace.write_text(trace.read_text().replace('"world":"real"', '"world":"sim"', 1))
    assert main(["validate", str(path), "--latency", str(folder / "c.toml")]) == 2


@pytest.mark.parametrize(
    "words", [["/nowhere"], ["RUN", "--json", "/"], ["RUN", "--latency", "/nothing.toml"]]
)
def test_command_refuses_bad_input_before_it_predicts(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "predict", None)
    latency = [] if "--latency" in words else ["--latency", str(folder / "c.toml")]
    run = [str(folder / "held-out") if word == "RUN" else word for word in words]
    assert main(["validate", *run, *latency]) == 2


def test_command_refuses_bad_seeds(folder: Path) -> None:
    assert main(["validate", str(folder / "a"), "--latency", str(folder / "c.toml"), "--seeds", "0"]) == 2


def test_figures_need_a_run_of_some_length() -> None:
    records = records_of(RECIPE)
    applied = [n for n, record in enumerate(records) if record.event.kind == "optimizer_step_applied"]
    with pytest.raises(DataError, match="3 optimizer steps, at least 4"):
        figures_of(records[: applied[2] + 1])


def test_a_run_that_declares_too_little_is_refused() -> None:
    with pytest.raises(DataError, match="does not declare"):
        cluster_of({"engine": "sim"}, KNOWN, seed=0)
    parameters = {**recipe_parameters(RECIPE), "max_inflight_tasks": 2}
    with pytest.raises(DataError, match="cannot be simulated"):
        cluster_of(parameters, KNOWN, seed=0)


def test_a_figure_that_was_not_measured_is_no_error() -> None:
    figures = figures_of(records_of(RECIPE))
    without = dataclasses.replace(figures, sync_s=None)
    comparison = compare([figures], [without])
    assert comparison.row("sync_s").error is None
    assert comparison.row("step_s").error == 0.0
    assert comparison.wasserstein_versions == 0.0


# -- real runs ---------------------------------------------------------------------------------------------


def test_runs_alternate_their_order() -> None:
    assert interleaved(["a", "b"], 3) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_measures_each_recipe_as_often_and_with_its_own_seeds(tmp_path: Path) -> None:
    ran = []

    def run(recipe: Recipe, out: Path) -> Path:
        ran.append((recipe.name, recipe.seed))
        return run_directory(out / "run", RECIPE)

    told: list[str] = []
    recipes = {"a": dataclasses.replace(RECIPE, name="a"), "b": dataclasses.replace(RECIPE, name="b", seed=7)}
    found = measure(recipes, 2, tmp_path, told.append, run)
    assert ran == [("a", 0), ("b", 7), ("b", 8), ("a", 1)]
    assert [len(found[name]) for name in ("a", "b")] == [2, 2]
    assert len(told) == 4


def test_measuring_goes_on_where_it_stopped(tmp_path: Path) -> None:
    ran: list[int] = []

    def run(recipe: Recipe, out: Path) -> Path:
        ran.append(recipe.seed)
        path = run_directory(out / "run", RECIPE)
        (path / "check.json").write_text(json.dumps({"violated": ["D2"]}))
        (out / "latest").symlink_to(path)
        return path

    told: list[str] = []
    recipes = {"a": RECIPE}
    assert measure(recipes, 2, tmp_path, told.append, run, deadline_s=0.0) == {"a": []}
    assert len(measure(recipes, 1, tmp_path, told.append, run, resume=True)["a"]) == 1
    assert len(measure(recipes, 2, tmp_path, told.append, run, resume=True)["a"]) == 2
    assert ran == [0, 1]
    assert "measured before, broke D2" in told[1]


def test_figures_survive_their_json() -> None:
    figures = figures_of(records_of(RECIPE))
    assert Figures.from_json(json.loads(json.dumps(dataclasses.asdict(figures)))) == figures


def test_a_recipe_becomes_command_line_options(tmp_path: Path) -> None:
    base = load_recipe("quickstart")
    recipe = dataclasses.replace(base, clear_cache=False, max_inflight=64, final_sync=True)
    words = list(_options(recipe, tmp_path))
    assert words == ["--max-inflight", "64", "--no-clear-cache", "--final-sync", "--out", str(tmp_path)]
    again = tyro.cli(Recipe, args=words, default=base)
    assert again == dataclasses.replace(recipe, out=tmp_path)


def test_a_real_run_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lab.harness.validation_runs.sys.executable", "/bin/false")
    with pytest.raises(GrpoLabError, match="smoke ended with exit code 1"):
        run_real(load_recipe("smoke"), tmp_path / "out")


# -- the experiment ----------------------------------------------------------------------------------------


def test_the_experiments_settings_can_be_run_and_are_held_out() -> None:
    for changes in (*prediction.CALIBRATION.values(), *prediction.HELD_OUT.values()):
        recipe = prediction.recipe_of("x", changes, 24)
        assert cluster_of(recipe_parameters(recipe), KNOWN, seed=0).scenario.steps == 24
    held_out, known = list(prediction.HELD_OUT.values()), list(prediction.CALIBRATION.values())
    assert len(held_out) >= 3
    assert not [changes for changes in held_out if changes in known]


def test_the_experiment_counts_errors_above_their_limit() -> None:
    figures = figures_of(records_of(RECIPE))
    sync_s = figures.sync_s
    assert sync_s is not None

    def missed(predicted: Figures, measured: list[Figures]) -> list[str]:
        return prediction.misses(compare([predicted], measured), len(measured))

    assert missed(figures, [figures] * 5) == []
    fast = dataclasses.replace(figures, tokens_per_s=figures.tokens_per_s * 1.06)
    assert missed(fast, [figures] * 5) == ["tokens_per_s"]
    stale = dataclasses.replace(figures, staleness_mean=figures.staleness_mean - 0.3, sync_s=sync_s * 1.2)
    assert missed(stale, [figures] * 5) == ["sync_s", "staleness_mean"]
    # Runs that differ by more than the error say that the error is theirs.
    spread = [
        dataclasses.replace(figures, tokens_per_s=figures.tokens_per_s * factor) for factor in (0.8, 1, 1.2)
    ]
    assert missed(fast, spread) == []
    assert missed(dataclasses.replace(figures, sync_s=None), [figures] * 5) == ["sync_s"]
