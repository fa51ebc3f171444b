"""``grpo-lab check``: table, proof, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout_trace import RolloutTrace

from grpo_lab.check.rules import ALL_RULES
from grpo_lab.cli.main import main


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def written(trace: RolloutTrace, directory: Path) -> Path:
    """The trace as parts, one an actor."""
    events = directory / "events"
    events.mkdir(parents=True)
    for record in trace.records:
        with (events / f"{record.actor}.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(record.to_line() + "\n")
    return directory


def good() -> RolloutTrace:
    trace = RolloutTrace().begin().commit(1, step=0).generate(0, version=1)
    trace.train(0, step=0, version=1, first=1).end()
    return trace


def stale() -> RolloutTrace:
    trace = RolloutTrace(max_staleness=0).begin().commit(1, step=0).generate(0, version=1)
    trace.commit(2, step=0).train(0, step=0, version=2, first=1).end()
    return trace


def test_a_correct_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(written(good(), tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert "no violation" in shown
    assert f"{len(good().records)} records" in shown
    for rule in ALL_RULES:
        assert rule.id in shown


def test_a_violation_is_told_with_its_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "result.json"
    assert main(["check", str(written(stale(), tmp_path / "run")), "--json", str(target)]) == 1
    shown = capsys.readouterr().out
    assert "group t1.g0 was trained on when its oldest token (version 1) was 1 versions old" in shown
    assert "group_consumed  term=1 group='t1.g0'" in shown  # the event that proves it
    assert "version_committed  term=1 version=2" in shown  # and what the syncs did before

    result = json.loads(target.read_text(encoding="utf-8"))
    assert result["violations"] >= 1
    broken = next(rule for rule in result["rules"] if rule["id"] == "S18")
    assert broken["status"] == "violated"
    records = {record.id for record in stale().records}
    assert records.issuperset(broken["violations"][0]["event_ids"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_one_merged_file(tmp_path: Path) -> None:
    target = tmp_path / "events.jsonl"
    target.write_text("".join(record.to_line() + "\n" for record in stale().records), encoding="utf-8")
    assert main(["check", str(target)]) == 1


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nothing")]) == 2
    assert "no such run directory" in capsys.readouterr().err
    damaged = tmp_path / "events.jsonl"
    damaged.write_text("no trace\n" + good().records[0].to_line() + "\n", encoding="utf-8")
    assert main(["check", str(damaged)]) == 2
    assert "line 1" in capsys.readouterr().err
    run = written(good(), tmp_path / "run")
    assert main(["check", str(run), "--json", str(tmp_path / "no" / "where.json")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_every_rule_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
    missing = [rule.id for rule in ALL_RULES if f"**{rule.id}. " not in text]
    assert missing == []
    for rule in ALL_RULES:
        section = text.split(f"**{rule.id}. ")[1].split("\n**")[0]
        shared = {"liveness_bound_s"} if rule.id.startswith("L") else set()
        unnamed = [name for name in rule.parameters if name not in section and name not in shared]
        assert unnamed == [], f"docs/rules.md does not say that {rule.id} needs {unnamed}"


def test_an_empty_trace_is_not_a_correct_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text("")
    assert main(["check", str(tmp_path)]) == 2
    assert "holds no event" in capsys.readouterr().err
