"""Server processes of the suite, ``grpo-lab serve`` and a real vLLM: started when needed, always stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from contract_weights import MAX_MODEL_LEN

from grpo_lab.harness.shared_files import mapped_by, remove_unmapped

REPOSITORY = Path(__file__).resolve().parents[2]
VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
STOCK_PLUGIN = Path(__file__).parent / "stock_plugin"
START_S = float(os.environ.get("CONFORMANCE_START_S", "600"))  # 20 s are usual, 60 s where it is cold
PORT_TRIES = 3
API_KEY = "a-key-of-the-conformance-suite"
MAX_NUM_SEQS = 32


@dataclass
class Server:
    """A process of its own group, and its address."""

    process: subprocess.Popen[bytes] | None  # None: started by somebody else
    url: str
    log: Path
    segments: set[Path] = field(default_factory=set)  # of a vLLM, which a violent end leaves behind

    def note_segments(self) -> None:
        assert self.process is not None
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(process.pid) == self.process.pid:
                    self.segments |= mapped_by(process.pid)

    def alive(self) -> bool:
        return self.process is None or self.process.poll() is None

    def wait(self, timeout_s: float) -> int:
        """Its exit code. Raises ``subprocess.TimeoutExpired``."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        if self.process is None:
            return
        self.note_segments()
        try:
            self._end_group(self.process)
        finally:
            remove_unmapped(self.segments)

    def _end_group(self, process: subprocess.Popen[bytes]) -> None:
        for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            deadline_s = time.monotonic() + patience_s
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
            while _group_lives(process.pid) and number == signal.SIGKILL and time.monotonic() < deadline_s:
                time.sleep(0.05)  # they map their segments until they are gone
            if not _group_lives(process.pid):
                return


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def vllm_command(model: Path, port: int, profile: str, more: Sequence[str] = ()) -> list[str]:
    """The fast flags of a CPU server: eager, an explicit KV size, no warm-up."""
    command = [
        str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--enforce-eager",
        "--max-model-len", str(MAX_MODEL_LEN["vllm"]), "--max-num-seqs", str(MAX_NUM_SEQS),
        "--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20), "--enable-scale-out",
    ]  # fmt: skip
    command += _profile_words(profile)
    return [*command, *more]


def vllm_environment(profile: str) -> dict[str, str]:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two servers would bind themselves to the same core
        "GRPO_LAB_PARENT_PID": str(os.getpid()),  # it ends when the suite does, whatever happened
        "PYTHONPATH": f"{STOCK_PLUGIN}{os.pathsep}{REPOSITORY}",
    }
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    environment.pop("VLLM_SERVER_DEV_MODE", None)
    if profile != "keyed":
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    return environment


def simulated_command(model: Path, port: int, profile: str, more: Sequence[str] = ()) -> list[str]:
    """The same words as vLLM's where it has them."""
    command = [
        sys.executable, "-m", "grpo_lab.cli.serve", str(model), "--faithful", "--port", str(port),
        "--served-model-name", "m", "--max-num-seqs", str(MAX_NUM_SEQS),
        "--max-model-len", str(MAX_MODEL_LEN["sim-http"]), "--enable-scale-out",
        "--parent-pid", str(os.getpid()), *_profile_words(profile),
    ]  # fmt: skip
    return [*command, *more]


def _profile_words(profile: str) -> list[str]:
    backend = {"main": "lab_shm", "stock": "gloo_packed", "doomed": "gloo_packed"}.get(profile)
    if backend:
        return ["--weight-transfer-config", json.dumps({"backend": backend})]
    return ["--api-key", API_KEY] if profile == "keyed" else []


def start(command: Sequence[str], environment: dict[str, str], port: int, log: Path) -> Server:
    """Raises ``RuntimeError`` with the end of the log when it ends, or is not ready within ``START_S``."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    deadline_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == 200:
                server.note_segments()
                return server
        if not server.alive() or time.monotonic() > deadline_s:
            server.stop()
            end = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{command[:3]} was not ready within {START_S:g} s:\n{end}")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def attached() -> dict[tuple[str, str], str]:
    """Servers that run already: ``CONFORMANCE_ATTACH=vllm-main=http://127.0.0.1:8000,...``."""
    pairs = filter(None, os.environ.get("CONFORMANCE_ATTACH", "").split(","))
    split = (pair.split("=", 1) for pair in pairs)
    return {tuple(name.rsplit("-", 1)): url for name, url in split}  # type: ignore[misc]


def _healthy(server: Server) -> bool:
    """An engine that has died leaves its server for some seconds, which answers 503."""
    if not server.alive():
        return False
    try:
        return httpx.get(f"{server.url}/health", timeout=10, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Servers:
    """One server at a time, kept until another is wanted: rows of one server lie together. Dead: replaced."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[tuple[str, str, Path], Server] = {}
        self._attached = attached()
        self.starts_s: list[tuple[str, float]] = []

    def get(self, kind: str, profile: str, model: Path) -> Server:
        if (kind, profile) in self._attached:
            return Server(None, self._attached[kind, profile], self._logs)
        key = (kind, profile, model)
        server = self._running.get(key)
        if server is not None and not _healthy(server):
            server.stop()
            server = None
        if server is None:
            self.close()
            server = self._running[key] = self._start(kind, profile, model)
        return server

    def drop(self, kind: str, profile: str, model: Path) -> None:
        server = self._running.pop((kind, profile, model), None)
        if server is not None:
            server.stop()

    def _start(self, kind: str, profile: str, model: Path) -> Server:
        began_s = time.monotonic()
        for left in reversed(range(PORT_TRIES)):
            try:
                server = self._start_at(free_port(), kind, profile, model)
            except RuntimeError as error:  # a port is free until somebody else takes it
                if left == 0 or "address already in use" not in str(error).lower():
                    raise
            else:
                break
        self.starts_s.append((f"{kind} {profile}", time.monotonic() - began_s))
        return server

    def _start_at(self, port: int, kind: str, profile: str, model: Path) -> Server:
        log = self._logs / f"{kind}-{profile}-{port}.log"
        if kind == "vllm":
            return start(vllm_command(model, port, profile), vllm_environment(profile), port, log)
        dev_mode = {} if profile == "keyed" else {"VLLM_SERVER_DEV_MODE": "1"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **dev_mode}
        return start(simulated_command(model, port, profile), environment, port, log)

    def close(self) -> None:
        running, self._running = self._running, {}
        for server in running.values():
            server.stop()


@contextlib.contextmanager
def servers(logs: Path) -> Iterator[Servers]:
    owner = Servers(logs)
    try:
        yield owner
    finally:
        owner.close()
