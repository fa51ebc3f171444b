"""What becomes of output that nobody reads or that cannot be written, and of what the caller left out."""

import errno
import os
import sys

import pytest

from grpo_lab.cli import doctor
from grpo_lab.cli import run as cli_run
from grpo_lab.cli.console import PipeConsole
from grpo_lab.cli.main import Command, main
from grpo_lab.files import replacing


@pytest.fixture
def stdout(monkeypatch):
    """Puts an open file in the place of standard output; the real one is not touched."""
    opened = []

    def put(descriptor):
        stream = os.fdopen(descriptor, "w")
        opened.append(stream)
        monkeypatch.setattr(sys, "stdout", stream)

    yield put
    for stream in opened:
        stream.close()


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_a_reader_that_leaves_ends_a_command_without_a_word(stdout, capsys):
    stdout(closed_pipe())
    assert main(["--help"]) == 141
    assert capsys.readouterr().err == ""


def test_a_full_disk_under_standard_output_is_told(stdout, capsys):
    stdout(os.open("/dev/full", os.O_WRONLY))
    assert main(["--help"]) == 3
    assert "No space left on device" in capsys.readouterr().err


def test_a_disk_that_is_full_is_named(tmp_path, monkeypatch, capsys):
    def full(command, name, words):
        with replacing(tmp_path / "result.json"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Command, "run", full)
    assert main(["doctor"]) == 3
    said = capsys.readouterr().err
    assert f"No space left on device: '{tmp_path}/result.json'. Make room there" in said
    assert list(tmp_path.iterdir()) == []


def test_another_pipe_that_breaks_is_a_failure(monkeypatch, capsys):
    def broken(command, name, words):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(Command, "run", broken)
    assert main(["doctor"]) == 3
    assert capsys.readouterr().err == "grpo-lab doctor: [Errno 32] Broken pipe\n"


def test_a_reward_is_found_in_the_working_directory(tmp_path, monkeypatch):
    """`python -m` looks there, the installed `grpo-lab` did not: the README's own example was refused."""
    (tmp_path / "reward_of_the_working_directory.py").write_text("def f(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    seen = []
    monkeypatch.setattr(cli_run, "_refuse_what_it_names", seen.append)
    monkeypatch.setattr("grpo_lab.harness.runner.run", lambda recipe, console: 0)
    assert main(["run", "smoke", "--reward", "reward_of_the_working_directory:f", "--out", "runs"]) == 0
    assert seen[0].reward == "reward_of_the_working_directory:f"


def test_a_reader_that_leaves_does_not_end_what_is_under_way(stdout):
    """rich exits with 1, "a rule was violated", and a run left half of its files."""
    stdout(closed_pipe())
    console = PipeConsole()
    console.print("seen by nobody")
    console.print("nor this")
    sys.stdout.flush()


def test_what_doctor_tells_to_type_can_be_copied(tmp_path, monkeypatch, capsys):
    """A table's cell folds it, with a frame in between."""
    left = [tmp_path / f"sem.mp-{number:08}" for number in range(20)]
    for path in left:
        path.touch()
    monkeypatch.setattr("grpo_lab.harness.shared_files.forgotten", lambda: left)
    monkeypatch.setattr("grpo_lab.cli.doctor.CHECKS", (doctor._forgotten,))
    assert main(["doctor"]) == 0
    command = "rm " + " ".join(path.name for path in left)
    assert any(line.endswith(command) for line in capsys.readouterr().out.splitlines())
