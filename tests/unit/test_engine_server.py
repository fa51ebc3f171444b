"""``grpo-lab serve`` as a process: start, serve, end; and what it says about bad input."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from engine_kit import make_model

from grpo_lab.cli.serve import READY, ServeConfig
from grpo_lab.cli.serving import recorder_of
from grpo_lab.errors import ConfigError

START_S = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


def start(*arguments, command=("-m", "grpo_lab.cli.serve")):
    return subprocess.Popen(
        [sys.executable, *command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@contextmanager
def server(*arguments):
    """(process, url) of a ready server; killed at the end whatever happened."""
    process = start(*arguments, "--port", "0", "--rl-routes")
    try:
        line = process.stdout.readline()
        assert line.startswith(READY), process.stderr.read()
        yield process, line.removeprefix(READY).strip()
    finally:
        process.kill()
        process.communicate()


def refused(*arguments):
    process = start(*arguments)
    try:
        _, errors = process.communicate(timeout=START_S)
    finally:
        process.kill()
    return process.returncode, errors


def test_serves_writes_its_trace_and_ends_on_sigterm(directory, tmp_path):
    with server(directory, "--events", tmp_path, "--name", "engine-7") as (process, url):
        body = {"token_ids": [2, 3], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
        answer = httpx.post(f"{url}/inference/v1/generate", json=body)
        assert len(answer.json()["choices"][0]["token_ids"]) == 3
        backends = httpx.post(f"{url}/init_weight_transfer_engine", json={"init_info": {}}).text
        assert "lab_shm" in backends
        assert "lab_gloo" in backends
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "engine-7.jsonl").read_text().splitlines()]
    assert kinds == ["member_started", "request_admitted", *["model_step"] * 3, "request_finished"]


def test_a_server_that_starts_again_is_a_new_incarnation_in_its_trace(tmp_path):
    for _ in range(3):
        with ExitStack() as stack:
            recorder_of(ServeConfig(Path("model"), events=tmp_path), stack)
    rows = [json.loads(line) for line in (tmp_path / "engine-0.jsonl").read_text().splitlines()]
    assert [(row["seq"], row["member"], row["incarnation"]) for row in rows] == [
        (count, "engine-0", count + 1) for count in range(3)
    ]


def test_sigterm_is_quick_although_a_pause_holds_a_request(directory):
    with server(directory) as (process, url), httpx.Client(base_url=url) as http:
        http.post("/pause")
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as held:
            body = json.dumps({"token_ids": [2], "sampling_params": {}})
            head = "POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\n\r\n"
            held.sendall((head + body).encode())
            while " 1.0" not in http.get("/metrics").text.split("num_requests_waiting{")[1].split("\n")[0]:
                time.sleep(0.02)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert b"500" in held.recv(100)
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert time.monotonic() - began < 50, "not only when the held request times out"


def test_ends_when_its_parent_is_killed(directory):
    parent_code = (
        "import subprocess, sys, os, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'grpo_lab.cli.serve', sys.argv[1], '--port', '0',"
        " '--parent-pid', str(os.getpid())], stdout=subprocess.PIPE, text=True)\n"
        "print(child.pid, child.stdout.readline(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = start(directory, command=("-c", parent_code))
    child = 0
    try:
        pid, ready = parent.stdout.readline().split(" ", 1)
        child = int(pid)
        assert ready.startswith(READY)
        descriptor = os.pidfd_open(child)
        parent.kill()
        assert wait_for_end(descriptor, 60)
        child = 0
    finally:
        parent.kill()
        parent.communicate()
        if child:
            os.kill(child, signal.SIGKILL)


def wait_for_end(descriptor, limit_s):
    import select

    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(limit_s * 1000))


def test_a_port_in_use_is_one_line_and_exit_2(directory):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, errors = refused(directory, "--port", port)
    assert code == 2
    assert errors.count("\n") == 1
    assert f"port={port}: expected a free port of 127.0.0.1" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/no/such/model",), "/no/such/model/config.json: no such file"),
        (("MODEL", "--transports", "nccl"), r"transports=['nccl']: expected some of"),
        (("MODEL", "--events", "/dev/null/x"), "events='/dev/null/x'"),
        (("MODEL", "--parent-pid", str(2**22 + 1)), "parent_pid=4194305: expected a running process"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(directory, arguments, message):
    arguments = [directory if item == "MODEL" else item for item in arguments]
    code, errors = refused(*arguments, "--port", "0")
    assert (code, errors.count("\n")) == (2, 1)
    assert message in errors


def test_a_value_out_of_range_is_exit_2(directory):
    code, errors = refused(directory, "--kv-blocks", "0")
    assert code == 2
    assert "kv_blocks=0: expected an integer from 1" in errors
    assert "Traceback" not in errors


def test_values_out_of_range_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"port=70000: expected an integer from 0 to 65535"):
        ServeConfig(tmp_path, port=70000)
    with pytest.raises(ConfigError, match="kv_blocks=0"):
        ServeConfig(tmp_path, kv_blocks=0)
    with pytest.raises(ConfigError, match="max_model_len=-5: expected nothing, or an integer from 2"):
        ServeConfig(tmp_path, max_model_len=-5)
