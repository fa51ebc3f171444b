"""`bench pack` and `bench sync` refuse a file that they could not write, before they measure anything."""

import pytest

from grpo_lab.cli import bench_pack, bench_sync

COMMANDS = [bench_pack, bench_sync]


@pytest.mark.parametrize("command", COMMANDS, ids=["pack", "sync"])
@pytest.mark.parametrize(
    ("option", "name", "reason"),
    [
        ("--json", "nowhere/out.json", "there is no directory"),
        ("--json", "", "is a directory"),
        ("--plot", "nowhere/out.svg", "there is no directory"),
        ("--plot", "out.txt", "end its name in one of .svg"),
        ("--plot", "out", "end its name in one of .svg"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_first(
    tmp_path, monkeypatch, capsys, command, option, name, reason
):
    monkeypatch.setattr(command, "measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stopped:
        command.main([option, f"{tmp_path}/{name}"])
    assert stopped.value.code == 2
    assert f"argument {option}" in (said := capsys.readouterr().err)
    assert reason in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS, ids=["pack", "sync"])
def test_a_folder_without_write_permission_is_refused(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr("grpo_lab.cli.outputs.why_no_file", lambda folder: "Permission denied")
    with pytest.raises(SystemExit) as stopped:
        command.main(["--json", str(tmp_path / "out.json")])
    assert stopped.value.code == 2
    assert "is not writable" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("repeats", 10**12), ("repeats", 0), ("threads", 257)])
def test_a_measurement_without_end_is_refused(monkeypatch, capsys, option, value):
    monkeypatch.setattr(bench_sync, "measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stopped:
        bench_sync.main([f"--{option}", str(value)])
    assert stopped.value.code == 2
    assert f"--{option} is {value}; it must be from 1 to" in capsys.readouterr().err
