"""The starter of a real vLLM, with a stand-in package that is found under vLLM's name."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import psutil
import pytest

from grpo_lab.errors import ConfigError, EngineError
from grpo_lab.harness import vllm_server
from grpo_lab.harness.vllm_server import VllmServer, VllmServerConfig, running_vllm, vllm_python

REPOSITORY = Path(__file__).resolve().parents[2]

# An API server with one child, like vLLM's; the child maps a segment that nobody unlinks.
STAND_IN = """
    import http.server, json, mmap, multiprocessing, os, sys, time
    from grpo_lab.vllm_plugin.lifeline import watch_parents

    def engine(name):
        watch_parents()
        fd = os.open("/dev/shm/" + name, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 4096)
        memory = mmap.mmap(fd, 4096)
        time.sleep(600)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *words):
            pass

    if __name__ == "__main__":
        mode = os.environ["STAND_IN"]
        print("arguments:", json.dumps(sys.argv[1:]), flush=True)
        if mode == "fails":
            print("(Worker pid=1) ERROR 11-30 [executor.py:1] ValueError: no such model", flush=True)
            sys.exit(1)
        if mode == "hangs":
            time.sleep(600)
        watch_parents()
        name = f"grpo_lab_test_{os.getpid()}"
        child = multiprocessing.get_context("fork").Process(target=engine, args=(name,), daemon=True)
        child.start()
        while not os.path.exists("/dev/shm/" + name):
            time.sleep(0.01)
        port = int(sys.argv[sys.argv.index("--port") + 1])
        http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    (package / "api_server.py").write_text(textwrap.dedent(STAND_IN))

    def make(mode="serves", **changes):
        path = os.pathsep.join([str(tmp_path / "packages"), str(REPOSITORY)])
        environment = {"STAND_IN": mode, "PYTHONPATH": path}
        return VllmServerConfig(
            tmp_path / "model",
            tmp_path / "vllm.log",
            python=Path(sys.executable),
            environment=environment,
            **changes,
        )

    return make


def wait_for(condition, what, seconds=60):
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def segments():
    return [name for name in os.listdir("/dev/shm") if name.startswith("grpo_lab_test_")]


def test_it_is_ready_and_stops_without_a_trace(config):
    with running_vllm(config()) as [server]:
        assert httpx.get(server.url + "/health").text == "ok"
        pids = [process.pid for process in server._group()]
        assert len(pids) == 2
        assert segments()
        assert server.death() == ""
    assert server.death_seen == ""
    assert all(map(ended, pids))
    assert not segments()
    server.stop()


def test_the_engine_of_a_killed_api_server_ends_too(config):
    with running_vllm(config()) as [server]:
        pids = [process.pid for process in server._group()]
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: all(map(ended, pids)), "the child outlives its API server")
    assert "was killed by SIGKILL" in server.death_seen
    assert not segments()


def test_a_start_that_fails_says_why(config):
    words = r"ended with exit code 1 .*it said: ValueError: no such model"
    with pytest.raises(EngineError, match=words), running_vllm(config("fails")):
        pass


def test_a_start_that_hangs_is_bounded_and_leaves_nothing(config):
    hung = config("hangs")
    with pytest.raises(EngineError, match="not ready within 1 s"), running_vllm(hung, timeout_s=1.0):
        pass
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in running if str(hung.model) in command]


def test_nothing_outlives_whoever_started_it(config, tmp_path):
    """kill -9 of the starter: no clean-up code runs, and still the server ends."""
    starter = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from grpo_lab.harness.vllm_server import VllmServer, VllmServerConfig
        config = VllmServerConfig(
            Path("model"), Path({str(tmp_path / "vllm.log")!r}), python=Path(sys.executable),
            environment={dict(config().environment)!r},
        )
        server = VllmServer(config)
        server.wait_ready()
        print(" ".join(str(process.pid) for process in server._group()), flush=True)
        time.sleep(600)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, cwd=REPOSITORY)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    try:
        process.kill()
        process.wait(30)
        wait_for(lambda: all(map(ended, pids)), "the server outlives its starter")
    finally:
        process.stdout.close()
        for name in segments():  # the sweep belongs to the starter, which is dead
            os.unlink(f"/dev/shm/{name}")


def test_the_command_line(config, tmp_path, monkeypatch):
    words = " ".join(config(backend="lab_gloo", max_num_seqs=7, extra=("--seed", "3")).command(1234))
    assert words.startswith(
        f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {tmp_path}/model"
    )
    assert '--weight-transfer-config {"backend": "lab_gloo"}' in words
    assert "--port 1234" in words
    assert "--max-num-seqs 7" in words
    assert words.endswith("--seed 3")
    assert "--middleware" not in " ".join(config(plugin=False).command(1))
    assert "--weight-transfer-config" not in " ".join(config(backend="").command(1))


def test_an_interpreter_without_vllm_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv(vllm_server.PYTHON_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"make venv-vllm"):
        vllm_python(tmp_path)
    monkeypatch.setenv(vllm_server.PYTHON_VARIABLE, sys.executable)
    assert vllm_python(tmp_path) == Path(sys.executable).absolute()


def test_an_interpreter_that_cannot_run_is_an_error(config, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("no program")
    broken.chmod(0o755)
    with pytest.raises(EngineError, match="cannot run"):
        VllmServer(VllmServerConfig(tmp_path, tmp_path / "log", python=broken))
