"""The rollout worker's process, for real: its starts, its ends, and what the trainer hears of them."""

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pytest
from worker_kit import ForksAndHolds, constant, make_spec, raises, serving, sleeps

from grpo_lab.errors import ConfigError, WorkerDied, WorkerError, WorkerStalled
from grpo_lab.events import parse_line
from grpo_lab.recorders import ListRecorder
from grpo_lab.trainer.worker_process import WorkerProcess


@contextlib.contextmanager
def started(spec, stale_after_s=100.0):
    """A started worker with its recorder; afterwards no process and no descriptor may be left."""
    recorder = ListRecorder("trainer", time.monotonic)
    worker = WorkerProcess(spec, recorder, stale_after_s)
    worker.start()
    try:
        yield worker, recorder
    finally:
        began = time.monotonic()
        worker.stop()
        assert time.monotonic() - began < 2, "stop took too long"
        worker.stop()
        assert not worker._process.is_alive()
        assert multiprocessing.active_children() == []
        assert (worker._socket, worker._ended_fd) == (None, -1)


def kinds(recorder):
    return [record.event.kind for record in recorder.records]


def failure(worker, within_s=60.0):
    """What ``get`` raises in the end, and when."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            with contextlib.suppress(queue.Empty):
                worker.rollout_buffer.get(timeout=0.5)
        except WorkerError as error:
            return error
    return pytest.fail(f"nothing was raised within {within_s} s")


def test_groups_arrive_whole_and_stop_ends_every_sample(tmp_path):
    with serving() as engine, started(make_spec(engine.url, events_dir=str(tmp_path))) as (worker, recorder):
        groups = [worker.rollout_buffer.get(timeout=60) for _ in range(10)]
        assert len({group.number for group in groups}) == 10
        sample = groups[0].samples[0]
        assert (sample.completion_token_ids, sample.behaviour_logprobs) == ((5, 6, 7), (-0.5,) * 3)
        assert (sample.version_first, sample.reward, sample.rewards) == (1, 1.0, (1.0,))
        assert sample.prompt_text.startswith("prompt ")
        assert sample.completion_text == "5 6 7"
        with pytest.raises(WorkerError, match="started before"):
            worker.start()
    assert kinds(recorder) == ["member_started", "member_stopped"]
    admitted, ends = Counter(), Counter()
    for line in (tmp_path / "worker.jsonl").read_text().splitlines():
        event = parse_line(line).event
        if event.kind == "group_admitted":
            admitted[event.group] += 1
        elif event.kind in ("group_queued", "group_dropped"):
            ends[event.group] += 1
    assert ends == admitted
    assert len(admitted) >= 10


def test_a_full_queue_and_a_paused_engine_do_not_delay_stop():
    with serving() as engine:
        with started(make_spec(engine.url, capacity=2)) as (worker, _):
            worker.rollout_buffer.get(timeout=60)
            time.sleep(0.3)
        engine.held.clear()
        with started(make_spec(engine.url)) as (worker, _), pytest.raises(queue.Empty):
            worker.rollout_buffer.get(timeout=1.5)


def test_a_reward_function_that_sleeps_does_not_delay_stop():
    with (
        serving() as engine,
        started(make_spec(engine.url, sleeps)) as (worker, _),
        pytest.raises(queue.Empty),
    ):
        worker.rollout_buffer.get(timeout=2)


def test_sigkill_is_noticed_at_once_although_a_forked_child_holds_the_connection(tmp_path):
    note = tmp_path / "child"
    with serving() as engine, started(make_spec(engine.url, ForksAndHolds(str(note)))) as (worker, recorder):
        worker.rollout_buffer.get(timeout=60)
        os.kill(worker._process.pid, signal.SIGKILL)
        began = time.monotonic()
        try:
            error = failure(worker)
        finally:
            os.kill(int(note.read_text()), signal.SIGKILL)
        assert time.monotonic() - began < 50, "not only when the heartbeat is old"
        assert type(error) is WorkerDied
        assert "was killed by SIGKILL" in str(error)
        assert isinstance(failure(worker), WorkerDied), "it says so again when asked again"
    assert kinds(recorder) == ["member_started", "member_died"]


def test_a_worker_that_died_unseen_is_not_told_as_stopped():
    with serving() as engine, started(make_spec(engine.url)) as (worker, recorder):
        worker.rollout_buffer.get(timeout=60)
        os.kill(worker._process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
    assert kinds(recorder) == ["member_started", "member_died"]
    assert "was killed by SIGKILL" in recorder.records[-1].event.detail


def test_a_raising_reward_function_ends_the_run_with_its_words():
    with serving() as engine, started(make_spec(engine.url, raises)) as (worker, recorder):
        error = failure(worker)
        assert "groups in a row" in str(error)
        assert "ZeroDivisionError('division by zero in my reward')" in str(error)
        assert "reward function raises" in str(error)
    assert kinds(recorder) == ["member_started", "member_died"]


def test_an_engine_that_goes_away_ends_the_run_within_seconds():
    with serving() as engine, started(make_spec(engine.url)) as (worker, _):
        worker.rollout_buffer.get(timeout=60)
        engine.die()
        began = time.monotonic()
        assert "engine-0 has been gone for 0.5 s" in str(failure(worker))
        assert time.monotonic() - began < 50, "not only when the heartbeat is old"


def test_an_engine_that_is_paused_for_ever_is_a_stall_that_says_what_to_do():
    with serving() as engine:
        engine.held.clear()
        with started(make_spec(engine.url), stale_after_s=8.0) as (worker, _):
            error = failure(worker, within_s=80)
            assert type(error) is WorkerStalled
            assert "heartbeat_stale_after_s=8" in str(error)
            assert "waits for: inflight" in str(error)


def test_one_engine_that_is_not_there_does_not_keep_the_worker_from_the_other():
    """An engine may die between its first weights and the worker's start: nobody waits for it."""
    with serving() as engine:
        urls = ("http://127.0.0.1:9", engine.url)
        with started(make_spec(engine.url, engine_urls=urls, engine_wait_s=60.0)) as (worker, _):
            groups = [worker.rollout_buffer.get(timeout=60) for _ in range(3)]
            assert {span.version for group in groups for span in group.samples[0].spans} == {1}
        fenced = make_spec(engine.url, engine_urls=urls, engine_wait_s=60.0, fenced=("engine-0",))
        with started(fenced) as (worker, _):
            worker.rollout_buffer.get(timeout=60)


def test_no_engine_and_no_data_are_told_in_words():
    with started(make_spec("http://127.0.0.1:9")) as (worker, _):
        assert "EngineUnreachable: GET /v1/models of engine-0 (http://127.0.0.1:9)" in str(failure(worker))
    with serving() as engine, started(make_spec(engine.url, dataset=[])) as (worker, _):
        assert "DataError: train_dataset has no rows" in str(failure(worker))


def test_a_module_that_the_worker_cannot_import_is_told_in_words(tmp_path, monkeypatch):
    (tmp_path / "only_in_trainer.py").write_text(
        "import multiprocessing\n"
        "if multiprocessing.parent_process() is not None:\n"
        "    raise ImportError('no library libfoo in this process')\n"
        "def reward(completions, **_):\n"
        "    return [0.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import only_in_trainer

    with started(make_spec("http://127.0.0.1:9", only_in_trainer.reward)) as (worker, _):
        words = "the rollout worker could not start: ImportError: no library libfoo in this process"
        assert str(failure(worker)) == words


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reward_funcs": (constant, lambda **_: [0.0])}, "reward_funcs='.*lambda"),
        ({"dataset": [{"prompt": lambda: 0}]}, "train_dataset='list'"),
        ({"tokenizer": lambda text: {"input_ids": [1]}}, "processing_class='function'"),
    ],
)
def test_what_cannot_be_pickled_is_named_and_nothing_is_started(changes, field):
    worker = WorkerProcess(
        make_spec("http://127.0.0.1:9", **changes), ListRecorder("trainer", lambda: 0.0), 5
    )
    with pytest.raises(ConfigError, match=field):
        worker.start()
    assert multiprocessing.active_children() == []
    worker.stop()


def test_a_script_without_main_guard_is_told_what_is_missing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            if multiprocessing.parent_process() is not None:
                raise RuntimeError("what spawn says to a script that starts processes while it is imported")
            sys.path.insert(0, sys.argv[1])
            from worker_kit import make_spec
            from grpo_lab.errors import WorkerDied
            from grpo_lab.recorders import ListRecorder
            from grpo_lab.trainer.worker_process import WorkerProcess

            worker = WorkerProcess(make_spec("http://127.0.0.1:9"), ListRecorder("trainer", lambda: 0.0), 100)
            worker.start()
            try:
                worker.get(timeout=100)
            except WorkerDied as error:
                print("told:", error)
            worker.stop()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script), os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "told: the rollout worker" in done.stdout, done.stderr
    assert "if __name__ == '__main__':" in done.stdout
