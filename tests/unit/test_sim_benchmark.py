"""``bench sim``: what a row says, goals, and the files that the command writes."""

import dataclasses
import json

import pytest

from grpo_lab.cli import bench_sim
from grpo_lab.harness import sim_benchmark_report as report
from grpo_lab.harness.sim_benchmark import Case, SimRow, Workload, cases, measure

TINY = Workload("short", 16)
ROW = SimRow("long", 8192, 16, 64, "event", False, 3, 3, 800.0, 2.0, 1.0, 4_000_000, 500, 9000, 7, 11, 60.0)


def test_a_measured_row_counts_what_the_run_did():
    step, event = (measure(Case(TINY, 2, 8, mode, 2, checked=True)) for mode in ("step", "event"))
    assert (event.tokens, event.samples, event.model_steps) == (step.tokens, step.samples, step.model_steps)
    assert event.virtual_s == pytest.approx(step.virtual_s)
    assert event.sequences == pytest.approx(step.sequences)
    assert event.events < step.events
    assert (event.optimizer_steps, event.checker) == (2, True)


def test_rates_of_a_row():
    assert (ROW.speed, ROW.cpu_speed, ROW.token_ns) == (400.0, 800.0, 250.0)


def test_goals_go_by_the_unchecked_long_runs():
    slow = dataclasses.replace(ROW, wall_s=3.0)
    checked = dataclasses.replace(slow, checker=True)
    assert [goal.met for goal in report.goals([ROW, checked])] == [True]
    (goal,) = report.goals([slow])
    assert (goal.met, goal.met_by_cpu) == (False, True)
    batches = [
        dataclasses.replace(ROW, workload="short", engines=1, slots=slots, cpu_s=cost)
        for slots, cost in ((8, 3.0), (64, 1.0), (128, 2.0))
    ]
    assert [goal.met for goal in report.goals(batches[:2])] == [True]
    assert [goal.met for goal in report.goals(batches)] == [False]


def test_all_sizes_are_measured():
    sizes = {(case.engines, case.slots, case.mode) for case in cases(quick=False)}
    assert {(16, 64, "event"), (256, 64, "event"), (1, 64, "step")} <= sizes
    assert len(list(cases(quick=True))) < len(list(cases(quick=False)))


@pytest.mark.parametrize("words", [["--json", "/nowhere/rows.json"], ["--plot", "plot.txt"], ["--plot", "/"]])
def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_measured(words, monkeypatch, capsys):
    monkeypatch.setattr(bench_sim, "measure", lambda _: pytest.fail("it began to measure"))
    with pytest.raises(SystemExit) as ended:
        bench_sim.main(["--quick", *words])
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_the_command_writes_rows_and_a_plot(tmp_path, monkeypatch, capsys):
    few = [Case(TINY, 1, 8, "event", 1), Case(TINY, 1, 8, "step", 1)]
    monkeypatch.setattr(bench_sim, "cases", lambda quick: few)
    rows, picture = tmp_path / "rows.json", tmp_path / "plot.svg"
    assert bench_sim.main(["--quick", "--json", str(rows), "--plot", str(picture)]) == 0
    written = json.loads(rows.read_text())
    wanted = {"engines", "slots", "mode", "virtual_s", "wall_s", "tokens", "events", "checker"}
    assert [row["mode"] for row in written["rows"]] == ["event", "step"]
    assert wanted <= written["rows"][0].keys()
    assert "log-normal" in written["workload"]
    assert picture.stat().st_size > 1000
    assert "virtual seconds a second" in capsys.readouterr().out
