"""Parts of ``grpo-lab run`` that need no processes."""

import sys

import pytest

from grpo_lab.cli import run as cli_run
from grpo_lab.cli.main import main
from grpo_lab.errors import EngineError, ModelError
from grpo_lab.events import GroupAdmitted, GroupDropped, MemberDied, Record
from grpo_lab.harness import attached
from grpo_lab.harness.engine_process import ServerCommand, running_engines
from grpo_lab.harness.outcome import Outcome, _headlines, attempt, end_lost_groups
from grpo_lab.recorders import ListRecorder
from grpo_lab.types import EngineCapabilities


class RunningServer:
    name = "engine-0"
    seen_term = 9
    capabilities = EngineCapabilities(staged=True, hashes=True, events=True)

    async def start_id(self):
        return "1"

    async def weight_info(self):
        return "t3.v7.a1"

    async def close(self):
        pass


def test_events_of_an_attached_server_are_not_expected_in_the_trace(monkeypatch):
    """Its events went elsewhere: rule S11 took their absence for weights that were never loaded."""

    async def connect(urls, recorder, wait_s):
        return (RunningServer(),)

    monkeypatch.setattr(attached, "connect_engines", connect)
    found = attached.ask_engines(["http://127.0.0.1:8000"])
    assert found.capabilities["engine-0"]["events"] is False
    assert found.capabilities["engine-0"]["hashes"] is True
    assert found.newest_term == 9  # of a trainer that committed nothing; the weights are of term 3


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ({"in_flight": 0, "queued": 0}, "12 dispatched != 4 consumed + 2 dropped"),
        ({"in_flight": 5, "queued": 1}, "12 dispatched = 4 consumed + 2 dropped + 5 in flight + 1 queued"),
        ({}, "12 dispatched != 4 consumed + 2 dropped"),
    ],
)
def test_the_told_sum_of_samples_is_true(left, words):
    told = dict(_headlines({"dispatched": 12, "consumed": 4, "dropped": 2, **left}))
    assert told["samples"] == words


def test_a_failure_is_told_when_its_traceback_cannot_be_written(tmp_path):
    def full_disk():
        raise OSError(28, "No space left on device")

    log = tmp_path / "no" / "such" / "folder" / "trainer.log"
    assert attempt(full_disk, log) == Outcome("failed", "OSError: [Errno 28] No space left on device", 3)


def test_an_error_of_the_system_is_one_line_and_exit_3(tmp_path, capsys, monkeypatch):
    def full_disk(words):
        raise OSError(28, "No space left on device", "runs/config.json")

    monkeypatch.setattr(cli_run, "main", full_disk)
    assert main(["run"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("grpo-lab run: [Errno 28] No space left on device: 'runs/config.json'. Make room")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("code", "kind"), [(2, ModelError), (3, EngineError)])
def test_a_model_that_the_engine_refuses_is_bad_input(tmp_path, code, kind):
    words = f"import sys; print('no such model', file=sys.stderr); sys.exit({code})"
    command = ServerCommand("engine-0", (sys.executable, "-c", words), tmp_path / "engine-0.log")
    with pytest.raises(kind, match=r"engine-0 did not start: .*no such model"), running_engines([command]):
        pytest.fail("it did not start")


def test_groups_of_a_worker_that_died_unseen_are_dropped_by_the_parent():
    def admitted(number):
        names = {"group": f"t1.g{number}", "samples": (f"t1.g{number}.s0",)}
        return GroupAdmitted(
            term=1, number=number, prompt_index=number, version=1, admitted=number + 1, running=1, **names
        )

    ended = GroupDropped(term=1, group="t1.g0", prompt_index=0, samples=("t1.g0.s0",), reason="reward_failed")
    events = [admitted(0), ended, admitted(1)]
    records = [Record(float(place), "worker", place, (), event) for place, event in enumerate(events)]
    recorder = ListRecorder("run", lambda: 9.0)
    end_lost_groups(records, recorder)
    assert not recorder.records, "a worker that lives has to tell of them itself"
    records.append(Record(3.0, "trainer", 0, ("worker:2",), MemberDied(member="worker")))
    end_lost_groups(records, recorder)
    (dropped,) = recorder.records
    assert (dropped.event.group, dropped.event.samples) == ("t1.g1", ("t1.g1.s0",))
    assert dropped.cause == ("worker:2",)
    end_lost_groups([*records, dropped], recorder)
    assert len(recorder.records) == 1
