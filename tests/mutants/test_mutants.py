"""Planted faults are caught by the rules that are said to, and by nothing that knows of them."""

import json
from pathlib import Path

import pytest

from grpo_lab.check.checker import Checker
from grpo_lab.check.rules import ALL_RULES
from grpo_lab.cli.main import main
from grpo_lab.cli.mutants import BEGIN, END
from grpo_lab.testing.mutants import spaces
from grpo_lab.testing.mutants.campaign import PROGRESS, Kill, hunt_clean, hunt_mutant
from grpo_lab.testing.mutants.catalogue import all_mutants, find
from grpo_lab.testing.mutants.hunt import hunt
from grpo_lab.testing.mutants.matrix import proofs
from grpo_lab.testing.mutants.mutant import DEADLOCK, Mutant

CASES = {f"M{number:02}" for number in range(1, 53)}
QUICK = (
    "M02",
    "M06-a",
    "M09",
    "M14",
    "M16-b",
    "M28-a",
    "M34",
    "M40-a",
    "M44",
    "M47",
    "M59",
    "M64-a",
    "M66",
)
SECONDS = 90.0  # of a machine that does much else; on a quiet one each takes a second or two


def table_of_docs():
    """{mutant: all rules that fire}, as the command wrote it."""
    text = (Path(__file__).parents[2] / "docs" / "mutants.md").read_text()
    lines = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| M")]
    return {row[0]: tuple(row[4].split(", ")) for row in rows}


def kill_of(mutant_id, fired):
    return Kill(mutant_id, mutant_id.partition("-")[0], True, (), fired[0], 0.0, 1, 1, fired=fired)


def test_every_rule_catches_a_mutant_that_no_other_catches():
    """By itself, or with the rules that it is bound to; groups and their reasons are data."""
    table = table_of_docs()
    assert set(table) >= {mutant.id for mutant in all_mutants()}, (
        "write the table anew: --table docs/mutants.md"
    )
    found = proofs(kill_of(name, fired) for name, fired in table.items())
    assert [proof.rule for proof in found if not proof.holds] == []
    assert {proof.rule for proof in found} == {rule.id for rule in ALL_RULES} | {"C1"}


def test_a_rule_that_never_fires_alone_is_not_proved():
    both = [kill_of("M1", ("S1", "S2")), kill_of("M2", ("S2",))]
    assert [proof.rule for proof in proofs(both, ("S1", "S2")) if proof.holds] == ["S2"]


class Nothing:
    """Nothing is planted."""


def test_every_case_and_every_rule_has_a_mutant():
    found = all_mutants()
    assert len({mutant.id for mutant in found}) == len(found)
    assert {mutant.case for mutant in found} >= CASES
    known = {rule.id for rule in ALL_RULES} | {"C1"}
    assert {rule for mutant in found for rule in mutant.rules} == known | {DEADLOCK}


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.id)
def test_a_mutant_says_what_it_is(mutant):
    words = mutant.plant.__doc__
    assert "Planted: " in words
    assert "Exposed by: " in words
    assert ("Field: " in words) == (mutant.case in CASES), "from the field, or our own"
    assert any(rule in words for rule in mutant.rules)


@pytest.mark.parametrize("mutant_id", QUICK)
def test_a_mutant_is_killed_by_its_rule(mutant_id):
    kill = hunt_mutant(find(mutant_id), SECONDS, shrink_s=0.5)
    assert kill.killed, kill
    assert kill.rule in kill.expected
    assert kill.rule in kill.fired
    assert 1 <= kill.events <= 20


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.id)
def test_every_mutant_is_killed(mutant):
    kill = hunt_mutant(mutant, 240.0)
    assert kill.killed, kill
    assert kill.rule in kill.expected


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "fixture", {mutant.fixture.name: mutant.fixture for mutant in all_mutants()}.values()
)
def test_the_correct_protocol_is_clean_in_every_fixture(fixture):
    assert hunt_clean(fixture, 600.0, 200).alarms == 0


def test_what_plants_nothing_survives():
    nothing = Mutant("M00", ("S1", "S4", "S6", "S9"), spaces.QUIET, Nothing, {})
    assert (
        hunt(nothing.fixture, nothing.planted, frozenset(nothing.rules), seconds=60, max_examples=6).found
        is None
    )
    clean = hunt_clean(spaces.QUIET, 60, 6)
    assert (clean.alarms, clean.examples) == (0, 6)


@pytest.mark.parametrize(("mutant_id", "rule"), [("M60", "S21"), ("M52", "S16")])
def test_a_rule_that_is_silenced_lets_its_mutant_live(mutant_id, rule, monkeypatch):
    mutant = find(mutant_id)

    def found():
        return hunt(mutant.fixture, mutant.planted, frozenset(mutant.rules), seconds=60, max_examples=4).found

    assert found() is not None
    rules = tuple(one for one in ALL_RULES if one.id != rule)
    monkeypatch.setattr(Checker.__init__, "__defaults__", (rules,))
    assert found() is None


def test_the_same_hunt_finds_the_same_case():
    hunts = [
        hunt(mutant.fixture, mutant.planted, frozenset(mutant.rules), seconds=60)
        for mutant in [find("M64-a")] * 2
    ]
    (first, finding), (second, again) = (one.found for one in hunts)
    assert first[0] == second[0]
    assert first[1].canonical().choices == second[1].canonical().choices
    assert (finding.message, len(finding.records)) == (again.message, len(again.records))
    assert hunts[0].examples == hunts[1].examples


def test_a_kill_is_replayed_from_its_file(tmp_path, capsys):
    kill = hunt_mutant(find("M51"), SECONDS, shrink_s=0.5, out=tmp_path)
    assert main(["replay", kill.saved]) == 1
    said = capsys.readouterr().out
    assert f"{kill.rule} at event" in said
    assert "exactly as in the file" in said


def test_the_command_writes_what_it_found_and_goes_on_from_it(tmp_path, capsys):
    table = tmp_path / "table.md"
    table.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    out, page, result = tmp_path / "out", tmp_path / "page.html", tmp_path / "result.json"
    words = ["mutants", "--only", "M06-b", "--only", "M39", "--workers", "1", "--out", str(out)]
    plot = tmp_path / "kills.svg"
    files = ["--json", str(result), "--html", str(page), "--table", str(table), "--plot", str(plot)]
    assert main([*words, *files]) == 0
    assert plot.read_text().startswith("<?xml")
    row = json.loads(result.read_text())
    assert [(kill["id"], kill["killed"], kill["rule"]) for kill in row["mutants"]] == [
        ("M06-b", True, "D1"),
        ("M39", True, "C1"),
    ]
    assert set(row["mutants"][0]) >= {"case", "expected", "seconds", "examples", "events"}
    assert row["mutants"][0]["fired"] == ["D1"]
    assert row["clean"]["alarms"] == 0
    assert row["clean"]["examples"] >= 20
    assert "<table>" in page.read_text()
    assert table.read_text().startswith(f"before\n{BEGIN}\n2 of 2 mutants killed")
    assert table.read_text().endswith(f"{END}\nafter\n")
    lines = (out / PROGRESS).read_text()
    capsys.readouterr()
    assert main([*words, "--resume"]) == 0
    assert "2 of 2 mutants killed" in capsys.readouterr().out
    assert (out / PROGRESS).read_text() == lines, "nothing was hunted again"


@pytest.mark.parametrize(
    "words",
    [["--only", "M999"], ["--seconds-per-mutant", "0"], ["--workers", "-1"], ["--plot", "kills.gif"]],
    ids=str,
)
def test_bad_input_is_refused(words, capsys):
    assert main(["mutants", *words]) == 2
    assert "mutants" in capsys.readouterr().err
