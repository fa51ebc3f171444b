"""Calibration: a cluster whose times are known must be found again from its trace alone."""

from __future__ import annotations

import dataclasses
import math
import random
import tomllib
from pathlib import Path

import numpy as np
import pytest
from calibrated_runs import KNOWN, LARGER, RECIPE, SYNCHRONOUS, UNDISTURBED, run_directory

from grpo_lab.cli.main import main
from grpo_lab.errors import DataError
from grpo_lab.events import SampleCompleted
from grpo_lab.harness.calibration import Calibration, LengthFit, Sharing, to_toml
from grpo_lab.harness.calibration_cluster import simulate_calibrated
from grpo_lab.harness.calibration_contention import Company
from grpo_lab.harness.calibration_fits import fit_buckets, fit_line, fit_work, line_s
from grpo_lab.harness.calibration_lengths import fit_lengths, fit_tail, within_group_correlation
from grpo_lab.harness.calibration_runs import calibrate
from grpo_lab.harness.calibration_trace import Sample
from grpo_lab.harness.validation import cluster_of, recipe_parameters

RECIPES = {"a": RECIPE, "b": LARGER, "c": SYNCHRONOUS}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """Fitted on a machine of eight cores, where nobody disturbs anybody."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_lab.harness.calibration_runs.os.cpu_count", lambda: 8)
        return calibrate(
            [run_directory(folder / name, recipe, known=UNDISTURBED) for name, recipe in RECIPES.items()]
        )


def test_finds_that_nobody_is_disturbed(found: Calibration) -> None:
    assert found.sharing.cores == 8
    for others in (1, 2):
        assert found.sharing.speeds(True, others) == pytest.approx((1.0, 1.0), abs=0.08), others


def test_finds_that_the_trainer_is_slower_in_company(tmp_path: Path) -> None:
    """Which of capacity, weight and the worker's time it is cannot be told well: the work can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_lab.harness.calibration_runs.os.cpu_count", lambda: 2)
        shared = calibrate([run_directory(tmp_path / name, recipe) for name, recipe in RECIPES.items()])
    assert shared.sharing.speeds(True, 1)[0] == pytest.approx(0.85, abs=0.15)
    assert shared.sharing.speeds(True, 2)[0] < 0.6
    step, known = shared.trainer_step, KNOWN.trainer_step
    tokens = 1000.0
    work_s = step.base_s + step.token_s * step.computed_share * tokens
    assert work_s == pytest.approx(known.base_s + known.token_s * known.computed_share * tokens, rel=0.1)


def test_finds_the_engine_steps_times(found: Calibration) -> None:
    """What a request costs is not told apart into its prompt, its coming and its end: the sum is."""
    known, fitted = KNOWN.engine_step, found.engine_step
    for name in ("base_s", "sequence_s", "context_token_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(known, name), rel=0.15), name
    requests_s = [one.admitted_s + one.finished_s + 10 * one.prefill_token_s for one in (fitted, known)]
    assert requests_s[0] == pytest.approx(requests_s[1], rel=0.1)
    assert fitted.relative_rms < 0.15
    assert fitted.n > 300


def test_finds_the_optimizer_steps_times(found: Calibration) -> None:
    known, fitted = KNOWN.trainer_step, found.trainer_step
    # The light trainer counts completion tokens in its passes, prompts come with them.
    per_token_s = fitted.token_s * fitted.computed_share
    assert per_token_s == pytest.approx(known.token_s * known.computed_share, rel=0.1)
    assert fitted.base_s == pytest.approx(known.base_s, rel=0.25)
    step_s = [one.base_s + 1000 * one.token_s * one.computed_share for one in (fitted, known)]
    assert step_s[0] == pytest.approx(step_s[1], rel=0.05)
    assert fitted.overhead_s == pytest.approx(known.overhead_s, rel=0.02)


def test_finds_the_workers_line_and_the_rewards_time(found: Calibration) -> None:
    for name in ("dispatch_s", "request_latency_s", "reply_s", "reply_latency_s"):
        assert getattr(found.requests, name) == pytest.approx(getattr(KNOWN.requests, name), rel=0.1), name
    assert found.reward.mean_s == pytest.approx(KNOWN.reward.mean_s, rel=0.1)
    assert found.reward.sd_s == pytest.approx(KNOWN.reward.sd_s, rel=0.2)


def test_finds_the_syncs_phases(found: Calibration) -> None:
    for name in ("other", "pause", "resume"):
        known, fitted = getattr(KNOWN.sync, name), getattr(found.sync, name)
        assert fitted.mean_s == pytest.approx(known.mean_s, rel=0.15), name
        assert fitted.sd_s == pytest.approx(known.sd_s, rel=0.7), name
    # One simulated bucket stands for all: its time cannot be told from the rest, the sum can.
    buckets_s = 2 * KNOWN.sync.bucket_s + KNOWN.sync.byte_s * KNOWN.sync.nbytes
    whole_s = found.sync.transfer.mean_s + found.sync.bucket_s * found.sync.buckets
    assert whole_s == pytest.approx(KNOWN.sync.transfer.mean_s + buckets_s, rel=0.15)
    assert not found.sync.two_term


def test_finds_the_lengths(found: Calibration) -> None:
    known, fitted = KNOWN.lengths, found.lengths
    for u in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97):
        assert fitted.tokens(u) == pytest.approx(known.tokens(u), abs=2, rel=0.1), u
    assert fitted.within_group_correlation == pytest.approx(known.within_group_correlation, abs=0.1)
    # A quantile at equal steps is one that occurs, so prompts have the known lengths and no other.
    assert set(found.prompt_quantiles) == set(KNOWN.prompt_quantiles)


def test_survives_its_file(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.toml"
    found.save(path)
    again = Calibration.load(path)
    assert again.source == found.source
    assert again.engine_step.base_s == pytest.approx(found.engine_step.base_s, rel=1e-5)
    assert again.held_out == {}
    assert again.lengths.tokens(0.99) == found.lengths.tokens(0.99)
    assert again.sync.two_term is False
    assert again.sharing == found.sharing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no calibration of schema 2"),
        ("schema = 7", "no calibration of schema 2"),
        ("schema = ", "can be read"),
        ("schema = 2\n[reward]\nmean_s = 1.0", "damaged"),
        ("schema = 2\nreward = 3", "damaged"),
        ("schema = 2\nsurprise = 3", "damaged"),
    ],
)
def test_refuses_what_is_no_calibration(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.toml"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        Calibration.load(path)


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="calibrate RUN"):
        Calibration.load(tmp_path / "nothing.toml")


def test_toml_of_awkward_values() -> None:
    table = {
        "text": 'a "b"\n\u2028',
        "none": None,
        "tuple": (True, 2),
        "t": {"u": {"x": 1e-9}, "a b.c": {"y": 2}},
    }
    assert tomllib.loads(to_toml(table)) == {
        "text": 'a "b"\n\u2028',
        "tuple": [True, 2],
        "t": {"u": {"x": 1e-9}, "a b.c": {"y": 2}},
    }


# -- the command -------------------------------------------------------------------------------------------


def test_command_writes_a_file_and_says_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.toml"
    assert main(["calibrate", str(run_directory(tmp_path / "run", RECIPE)), "--out", str(out)]) == 0
    assert Calibration.load(out).source.runs == ("run",)
    said = capsys.readouterr().out
    for word in ("engine step", "optimizer step", "weight sync", "within-group correlation", "n ="):
        assert word in said


def test_command_refuses_a_simulated_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_directory(tmp_path / "run", RECIPE)
    trace = path / "events.jsonl"
    trace.write_text(trace.read_text().replace('"world":"real"', '"world":"sim"', 1))
    assert main(["calibrate", str(path), "--out", str(tmp_path / "c.toml")]) == 2
    assert "simulated run" in capsys.readouterr().err
    assert not (tmp_path / "c.toml").exists()


def test_command_refuses_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_directory(tmp_path / "run", RECIPE, steps=3)
    assert main(["calibrate", str(path), "--out", str(tmp_path / "c.toml")]) == 2
    assert "3 optimizer steps (at least 8)" in capsys.readouterr().err


def test_command_refuses_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(tmp_path / "nothing"), "--out", str(tmp_path / "c.toml")]) == 2
    assert "events.jsonl" in capsys.readouterr().err


def test_command_refuses_a_place_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(run_directory(tmp_path / "run", RECIPE))
    assert main(["calibrate", run, "--out", str(tmp_path)]) == 2
    assert main(["calibrate", run, "--out", "/proc/self/status/c.toml"]) == 2
    assert "a file, not a directory" in capsys.readouterr().err


def test_refuses_runs_of_two_kinds(tmp_path: Path) -> None:
    first = run_directory(tmp_path / "a", RECIPE)
    other = run_directory(tmp_path / "b", RECIPE)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"trainer_threads": 1', '"trainer_threads": 2'))
    with pytest.raises(DataError, match="differ in trainer_threads"):
        calibrate([first, other])


# -- the parts ---------------------------------------------------------------------------------------------


def test_a_line_is_lindleys_recursion() -> None:
    source = random.Random(1)
    entered = np.sort([source.random() for _ in range(50)])
    service = np.array([source.random() / 30 for _ in range(50)])
    free, expected = 0.0, []
    for t, s in zip(entered, service, strict=True):
        free = max(free, t) + s
        expected.append(free - t)
    assert line_s(entered, service) == pytest.approx(expected)


def test_single_stalls_do_not_move_the_lines_fit() -> None:
    source = random.Random(2)
    entered = np.sort([source.random() for _ in range(2000)])
    kinds = np.array([float(source.random() < 0.5) for _ in range(2000)])
    left = entered + line_s(entered, np.where(kinds > 0, 6e-4, 3e-4)) + np.where(kinds > 0, 4e-3, 1e-3)
    left[::50] += 0.3
    fitted = fit_line([np.stack([entered, left, kinds], axis=1)])
    assert fitted.dispatch_s == pytest.approx(3e-4, rel=0.05)
    assert fitted.reply_s == pytest.approx(6e-4, rel=0.05)
    assert fitted.request_latency_s == pytest.approx(1e-3, rel=0.1)
    assert fitted.reply_latency_s == pytest.approx(4e-3, rel=0.1)


def test_work_is_never_negative_and_adds_up() -> None:
    source = np.random.default_rng(3)
    features = np.stack([np.ones(300), source.uniform(1, 50, 300), source.uniform(1, 9, 300)], axis=1)
    x, fitted = fit_work(features, features @ [0.01, 0.001, 0.0])
    assert x == pytest.approx([0.01, 0.001, 0.0], abs=1e-9)
    work = features @ [0.01, 0.001, -0.0005]
    x, fitted = fit_work(features, work)
    assert x[2] == 0.0
    assert fitted.sum() == pytest.approx(work.sum())


@pytest.mark.parametrize("capacity", [1.0, 1.4, 2.0, 4.0])
@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0])
def test_cores_are_shared_by_weight_and_none_goes_to_waste(capacity: float, weight: float) -> None:
    sharing = Sharing(4, capacity, weight)
    for others in range(1, 8):
        busy = min(4, others + 1)
        whole = 1 + (capacity - 1) * (busy - 1) / 3
        trainer, other = sharing.speeds(True, others)
        assert trainer + others * other == pytest.approx(whole)
        disturbed = dataclasses.replace(sharing, trainer_disturbs=0.25).speeds(True, others)
        assert disturbed == pytest.approx((trainer, 0.75 * other))
        assert 0 < trainer <= other <= whole / busy + 1e-9
    assert sharing.speeds(True, 0)[0] == sharing.speeds(False, 1)[1] == 1.0


def test_buckets_of_two_sizes_give_two_terms_and_of_one_size_one() -> None:
    sizes = np.array([1e6, 1e6, 2e5, 1e6, 2e5])
    bucket_s, byte_s, two = fit_buckets(sizes, 1e-3 + 2e-9 * sizes)
    assert two
    assert [bucket_s, byte_s] == pytest.approx([1e-3, 2e-9])
    bucket_s, byte_s, two = fit_buckets(np.full(9, 1e6), np.full(9, 3e-3))
    assert not two
    assert [bucket_s, byte_s] == pytest.approx([3e-3, 0.0])


@pytest.mark.parametrize("shape", [-0.3, 0.0, 0.4])
def test_a_tail_is_found_through_censoring(shape: float) -> None:
    source = random.Random(4)
    tail = LengthFit((1.0,), 0.0, 0.0, 20.0, shape, 0.0, 0.0, 0.0, 0)
    drawn = np.array([float(tail.tokens(source.random())) for _ in range(4000)])
    censored = drawn > 40
    scale, fitted = fit_tail(np.minimum(drawn, 40), censored)
    assert scale == pytest.approx(20.0, rel=0.1)
    assert fitted == pytest.approx(shape, abs=0.12)


def test_lengths_that_are_all_alike() -> None:
    samples = [Sample(f"g{n // 4}", 7, False, 0.0) for n in range(200)]
    fitted = fit_lengths(samples)
    assert {fitted.tokens(u / 50) for u in range(50)} == {7}
    assert fitted.within_group_correlation == 0.0


def test_correlation_of_groups_is_the_copulas() -> None:
    source = random.Random(5)
    samples = []
    for group in range(400):
        shared = source.gauss()
        for _ in range(6):
            score = math.sqrt(0.6) * shared + math.sqrt(0.4) * source.gauss()
            samples.append(Sample(f"g{group}", round(50 + 15 * score), False, 0.0))
    assert within_group_correlation(samples) == pytest.approx(0.6, abs=0.05)


def test_speed_of_a_span_is_that_of_its_company() -> None:
    sharing = Sharing(2, 1.6, 0.5)
    company = Company([(0.0, 10.0)], [[(2.0, 6.0)], [(4.0, 6.0), (12.0, 13.0)]])
    alone, two, three = 1.0, 0.8, sharing.speeds(True, 2)[0]
    found = company.speed([(0.0, 2.0), (2.0, 4.0), (0.0, 10.0), (4.0, 6.0)], sharing, trainer=True)
    assert found == pytest.approx([alone, two, (6 * alone + 2 * two + 2 * three) / 10, three])
    assert company.speed([(12.0, 13.0), (5.0, 6.0)], sharing) == pytest.approx(
        [1.0, sharing.speeds(True, 2)[1]]
    )
    assert company.speed([], sharing).size == 0


# -- the calibrated cluster --------------------------------------------------------------------------------


def test_a_calibrated_cluster_keeps_the_rules() -> None:
    recipe = dataclasses.replace(RECIPE, steps=6, engines=2, pause_mode="abort", max_staleness=2)
    cluster = cluster_of(recipe_parameters(recipe), KNOWN, seed=3)
    records = simulate_calibrated(cluster, KNOWN, checked=True)
    assert any(record.event.kind == "run_ended" for record in records)


def test_a_calibrated_cluster_is_repeatable() -> None:
    short = dataclasses.replace(RECIPE, steps=4)

    def lines(seed: int) -> list[str]:
        cluster = cluster_of(recipe_parameters(short), KNOWN, seed=seed)
        return [record.to_line() for record in simulate_calibrated(cluster, KNOWN)]

    first = lines(0)
    assert first == lines(0)
    assert first != lines(1)


def test_a_sample_that_pauses_cut_off_has_its_length_in_all() -> None:
    """Also in parts: lengths are the samples' own, whatever the pause mode."""
    keep, abort = (dataclasses.replace(RECIPE, steps=5, pause_mode=mode) for mode in ("keep", "abort"))
    lengths = []
    for recipe in (keep, abort):
        cluster = cluster_of(recipe_parameters(recipe), KNOWN, seed=0)
        found = {}
        for record in simulate_calibrated(cluster, KNOWN):
            if isinstance(record.event, SampleCompleted):
                found[record.event.sample] = record.event.tokens
        lengths.append(found)
    both = lengths[0].keys() & lengths[1].keys()
    assert len(both) > 100
    assert all(lengths[0][sample] == lengths[1][sample] for sample in both)
