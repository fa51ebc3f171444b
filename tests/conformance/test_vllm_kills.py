"""kill -9 of a real vLLM and of its trainer at every step of a sync, of the worker, of a whole run.

Every victim's end is noticed within a bound, by an error that says what died; no server is left paused or
running; what is started again serves. The table is printed, and written to ``runs/vllm_kills.txt``; rows that
were not played this time stay in it (``VLLM_KILLS=api:pause,core:transfer`` plays some of the first test's).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from vllm_syncs import LEASE_S, STEPS, Trainer

from grpo_lab.errors import GrpoLabError
from grpo_lab.harness.vllm_server import DEFAULT_PYTHON, VllmServerConfig, running_vllm
from grpo_lab.tasks import get_task
from grpo_lab.tasks.tiny_model import TinyModelSpec, build_model

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = REPOSITORY / DEFAULT_PYTHON
NOTICED_S = 60.0  # no bound of the protocol may be what ends it: the death itself is seen
TABLE = REPOSITORY / "runs" / "vllm_kills.txt"
ROWS_FILE = TABLE.with_suffix(".json")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-vllm: run `make venv-vllm`"),
]

ROWS: list[tuple[str, str, str, str, str, str]] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    network, tokenizer = build_model(TinyModelSpec(), get_task("sort_digits"), 0)
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    kept = json.loads(ROWS_FILE.read_text(encoding="utf-8")) if ROWS_FILE.exists() else []
    merged = {tuple(row[:2]): row for row in [*kept, *map(list, ROWS)]}
    order = {words: number for number, words in enumerate(("vLLM (api)", "vLLM (core)", "vLLM (worker)"))}
    rows = sorted(merged.values(), key=lambda row: order.get(row[0], len(order)))
    rows.insert(0, ["killed", "at", "noticed by", "after", "the rest", "then"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
    ROWS_FILE.parent.mkdir(exist_ok=True)
    ROWS_FILE.write_text(json.dumps(rows[1:], indent=1) + "\n", encoding="utf-8")
    TABLE.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    print("\n" + "\n".join(lines))  # noqa: T201


def server_config(model, tmp_path):
    return VllmServerConfig(model, tmp_path / "vllm.log", python=PYTHON, max_num_seqs=16)


def generates(url: str, timeout_s: float = 60.0) -> str:
    """One completion's finish reason."""
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as client:
        served = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": served, "prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["finish_reason"]


def is_paused(url: str) -> bool:
    return httpx.get(f"{url}/is_paused", timeout=60, trust_env=False).json()["is_paused"]


def ended(pids) -> bool:
    return all(
        not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids
    )


def wait_for(condition, what: str, seconds: float = NOTICED_S) -> float:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < seconds, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)
    return time.monotonic() - began_s


ALL_VICTIMS = [("api", step) for step in STEPS] + [
    ("core", "transfer"),
    ("worker", "transfer"),
    ("worker", "pause"),
]
ONLY = os.environ.get("VLLM_KILLS", "")
VICTIMS = [victim for victim in ALL_VICTIMS if not ONLY or ":".join(victim) in ONLY.split(",")]


@pytest.mark.timeout(2400)
def test_a_vllm_that_dies_ends_the_sync_and_a_restarted_one_serves(model, tmp_path):
    restarted = ""
    for role, step in [*VICTIMS, ("", "")]:
        with running_vllm(server_config(model, tmp_path)) as [server]:
            with connected(server.url, model, 1) as trainer:
                assert trainer.sync().committed  # also: what was killed before is replaced
                assert generates(server.url) == "length"
                if restarted:
                    ROWS.append((*restarted, "restarted, synced, serves"))
                if not role:
                    return
                if step != "connect":
                    restarted = kill_in_a_sync(server, role, step, trainer)
            if step == "connect":
                restarted = kill_in_a_sync(server, role, step, None, model)


def kill_in_a_sync(server, role, step, trainer, model=None):
    """The row of the table, up to what comes after the restart."""
    victim, family = server.pids()[role], list(server.pids().values())
    killed_s = 0.0

    def trip(done: str) -> None:
        nonlocal killed_s
        if done == step and not killed_s:
            killed_s = time.monotonic()
            os.kill(victim, signal.SIGKILL)

    def until_it_fails() -> None:
        if trainer is None:
            with connected(server.url, model, 2, trip) as another:
                another.sync()
            return
        trainer.trips.append(trip)
        trainer.sync()
        trainer.sync()  # a death after the last step left that sync whole: the next one finds it

    with pytest.raises(GrpoLabError) as caught:
        until_it_fails()
    noticed_s = time.monotonic() - killed_s
    assert killed_s, f"step {step} never came"
    assert noticed_s < NOTICED_S
    words = f"{type(caught.value).__name__}: {caught.value}"
    assert "engine-0" in words
    gone_s = wait_for(lambda: ended(family), "the rest of the server outlives what was killed")
    return (f"vLLM ({role})", step, _short(words), f"{noticed_s:.1f} s", f"all gone {gone_s:.1f} s later")


@contextlib.contextmanager
def connected(url, model, term, *trips):
    trainer = Trainer(url, model, term, *trips)
    try:
        trainer.connect()
        yield trainer
    finally:
        trainer.close()


def test_a_trainer_that_dies_leaves_no_server_paused(model, tmp_path):
    with running_vllm(server_config(model, tmp_path)) as [server]:
        for term, step in enumerate(STEPS, start=1):
            child = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("vllm_syncs.py")),
                    server.url,
                    str(model),
                    str(term),
                    step,
                ],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            said = child.communicate(timeout=300)[0]
            assert child.returncode == -signal.SIGKILL, said
            assert step == "connect" or "committed 1" in said
            released_s = wait_for(lambda: not is_paused(server.url), f"the server stays paused after {step}")
            assert released_s < LEASE_S + NOTICED_S
            assert generates(server.url) == "length"
            version = httpx.get(f"{server.url}/weight_info", trust_env=False).json()["weight_version"]
            loaded = STEPS.index(step) >= STEPS.index("finish")
            expected = f"t{term}.v{2 if loaded else 1}.a1" if step != "connect" else version
            assert version == expected
            ROWS.append(
                (
                    "trainer",
                    step,
                    "lease" if released_s > 0.5 else "not paused",
                    f"{released_s:.1f} s",
                    "server stays",
                    f"serves {version}; next trainer syncs",
                )
            )
        with connected(server.url, model, len(STEPS) + 1) as trainer:
            assert trainer.sync().committed


def start_run(out: Path, model: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "grpo_lab.cli.main",
        "run",
        "smoke",
        "--steps",
        "500",
        "--model",
        str(model),
    ]
    return subprocess.Popen(
        [*command, "--out", str(out), *options],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_version(out: Path, run: subprocess.Popen[str], version: int) -> None:
    trace = out / "latest" / "events" / "trainer.jsonl"
    words = '"kind":"version_committed","term":'

    def committed() -> bool:
        assert run.poll() is None, run.communicate()[0]
        lines = trace.read_text(encoding="utf-8").splitlines() if trace.exists() else []
        return any(words in line and f'"version":{version},' in line for line in lines)

    wait_for(committed, f"version {version}", seconds=300)


def test_a_worker_that_dies_ends_the_run_and_leaves_the_server_serving(model, tmp_path):
    with running_vllm(server_config(model, tmp_path)) as [server]:
        run = start_run(tmp_path / "runs", model, "--engine", server.url)
        try:
            wait_for_version(tmp_path / "runs", run, 3)
            children = psutil.Process(run.pid).children(recursive=True)
            spawned = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
            worker = max(spawned, key=psutil.Process.create_time)  # an older one checks the trace
            began_s = time.monotonic()
            worker.kill()
            output = run.communicate(timeout=120)[0]
            took_s = time.monotonic() - began_s
        finally:
            run.kill()
            run.wait(30)
        assert run.returncode == 3, output
        assert "was killed by SIGKILL" in output
        assert not is_paused(server.url)
        assert generates(server.url) == "length"
        again = start_run(tmp_path / "runs", model, "--engine", server.url, "--steps", "2")
        try:
            output = again.communicate(timeout=300)[0]
        finally:
            again.kill()
            again.wait(30)
        assert again.returncode == 0, output
    ROWS.append(
        ("worker", "any time", "WorkerDied", f"{took_s:.1f} s", "server stays", "serves; next run clean")
    )


def test_a_run_that_dies_takes_its_server_along(model, tmp_path):
    run = start_run(tmp_path / "runs", model, "--engine", "vllm")
    try:
        wait_for_version(tmp_path / "runs", run, 2)
        family = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        assert len(family) >= 4  # the worker, and vLLM's three
        run.kill()
        run.wait(30)
        gone_s = wait_for(lambda: ended(family), "a process outlives the run")
    finally:
        run.kill()
        run.stdout.close()
    again = start_run(tmp_path / "runs", model, "--engine", "vllm", "--steps", "2")
    try:
        output = again.communicate(timeout=400)[0]
    finally:
        again.terminate()
        again.wait(60)
    assert again.returncode == 0, output
    ROWS.append(("run (all of it)", "any time", "lifeline", f"{gone_s:.1f} s", "all gone", "next run clean"))


def _short(words: str) -> str:
    line = words.partition("\n")[0].rpartition("Lost: ")[2]
    return line if len(line) <= 90 else line[:87] + "..."
