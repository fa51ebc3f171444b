"""A real vLLM as a child process: started, waited for, watched, and stopped without a trace.

vLLM is an API server, an engine core and one worker a rank. They get a process group of their own, are
stopped as a group, and what they left in /dev/shm is removed: vLLM unlinks its segments itself only when it
ends in peace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil

from grpo_lab.errors import ConfigError, EngineError
from grpo_lab.harness.shared_files import mapped_by, remove_unmapped

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
LOOK_EVERY_S = 0.25
SHOWN_LOG_LINES = 15
PYTHON_VARIABLE = "GRPO_LAB_VLLM_PYTHON"
DEFAULT_PYTHON = Path(".venv-vllm", "bin", "python")
PARENT_VARIABLE = "GRPO_LAB_PARENT_PID"  # read by grpo_lab.vllm_plugin.lifeline

_ERROR_LINE = re.compile(r"^.*?\bERROR\b[^\]]*\] (\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the RL routes
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two servers would bind themselves to the same core
    "PYTHONUNBUFFERED": "1",
}
_PLUGIN_FLAGS = ("--middleware", "grpo_lab.vllm_plugin.LabMiddleware")


@dataclass(frozen=True, slots=True)
class VllmServerConfig:
    """How to start one server; the flags are those that make a small model start fast on a CPU.

    Attributes:
        log: standard output and error of all its processes.
        backend: of the weight transfer; empty: none is configured.
        plugin: with grpo_lab's middleware (its headers and routes); the backends ``lab_*`` exist either way.
        extra: further flags, which win over those before.
        environment: further variables.
    """

    model: Path
    log: Path
    name: str = "engine-0"
    python: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    served_model_name: str = ""
    backend: str = "lab_shm"
    plugin: bool = True
    dtype: str = "float32"
    max_model_len: int = 256
    max_num_seqs: int = 256
    kv_cache_bytes: int = 64 << 20
    threads: int = 1
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """The whole command line. ``vllm serve`` itself does not start where the distribution is vllm-cpu."""
        flags = [
            *("--model", str(self.model), "--host", self.host, "--port", str(port)),
            *("--dtype", self.dtype, "--enforce-eager", "--enable-scale-out"),
            *("--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)),
            *("--kv-cache-memory-bytes", str(self.kv_cache_bytes)),  # explicit: no profiling run
            # vLLM 0.32 dies of a chunked prefill of a seeded request ("CPU Generator does not use offset").
            *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(2048, self.max_model_len))),
        ]
        if self.served_model_name:
            flags += ["--served-model-name", self.served_model_name]
        if self.backend:
            flags += ["--weight-transfer-config", json.dumps({"backend": self.backend})]
        flags += _PLUGIN_FLAGS if self.plugin else ()
        python = str(self.python or vllm_python())
        return [python, "-m", "vllm.entrypoints.openai.api_server", *flags, *self.extra]


def vllm_python(root: Path = Path()) -> Path:
    """The interpreter that has vLLM: from ``GRPO_LAB_VLLM_PYTHON``, or ``.venv-vllm`` below ``root``.

    Raises ``ConfigError`` when there is none.
    """
    told = os.environ.get(PYTHON_VARIABLE)
    path = Path(told) if told else root / DEFAULT_PYTHON
    if not path.is_file():
        raise ConfigError(
            "vllm python",
            str(path),
            "an interpreter with vLLM",
            f"Run `make venv-vllm`, or set {PYTHON_VARIABLE} to the python of an environment that has it",
        )
    return path.absolute()  # not resolved: that would leave the environment


class VllmServer:
    """One running server. ``stop`` may be called at any time and more than once."""

    def __init__(self, config: VllmServerConfig) -> None:
        self.config = config
        self.name = config.name
        port = config.port or _free_port(config.host)
        self.url = f"http://{config.host}:{port}"
        self.death_seen = ""  # how it ended before anybody asked it to
        self._segments: set[Path] = set()
        command = config.command(port)
        config.log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = config.log.open("ab")
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "OMP_NUM_THREADS": str(config.threads),
            PARENT_VARIABLE: str(os.getpid()),
            **config.environment,
        }
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the explicit size
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise EngineError(f"{self.name}: cannot run {command[0]}: {error}") from error

    @property
    def pid(self) -> int:
        """Of the API server, and of the process group."""
        return self._process.pid

    def pids(self) -> dict[str, int]:
        """Its living processes by role: ``api``, ``core``, ``worker`` and others by their own names."""
        found: dict[str, int] = {}
        for process in self._group():
            with contextlib.suppress(psutil.Error):
                found.setdefault(_role(process, self.pid), process.pid)
        return found

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Its address, once /health says 200. Raises ``EngineError`` with the tail of the log."""
        deadline_s = time.monotonic() + timeout_s
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").is_success:
                        self._segments |= self._mapped()
                        return self.url
                if time.monotonic() >= deadline_s:
                    raise EngineError(
                        f"{self.name} was not ready within {timeout_s:g} s; the end of {self.config.log}:\n"
                        + self.log_tail()
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(LOOK_EVERY_S)
                    raise EngineError(f"{self.name} did not start: it {self.death()}\n{self.log_tail()}")

    def death(self) -> str:
        """How it ended; empty while its API server lives. vLLM exits with 0 also when its engine died."""
        code = self._process.poll()
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = self._first_error()
        return f"{how} (pid {self.pid}){f'; it said: {words}' if words else ''}; see {self.config.log}"

    def _first_error(self) -> str:
        """What the first traceback of its log ends with: the others follow from it."""
        with contextlib.suppress(OSError):
            found = _ERROR_LINE.search(self.config.log.read_text(encoding="utf-8", errors="replace"))
            return found[1][:300] if found else ""
        return ""

    def log_tail(self, lines: int = SHOWN_LOG_LINES) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError):
            text = self.config.log.read_text(encoding="utf-8", errors="replace")
            return "\n".join(text.strip().splitlines()[-lines:])
        return ""

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Asks the API server, then ends the whole group and removes its shared memory."""
        self._segments |= self._mapped()
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout_s)
            rest = self._group()
            _, rest = psutil.wait_procs(rest, timeout=2.0)
            if rest:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                psutil.wait_procs(rest, timeout=timeout_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        finally:
            self._log.close()
            remove_unmapped(self._segments)

    def _group(self) -> list[psutil.Process]:
        """Living members of the process group; it outlives its leader."""
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        return members

    def _mapped(self) -> set[Path]:
        return {path for process in self._group() for path in mapped_by(process.pid)}


@contextlib.contextmanager
def running_vllm(
    *configs: VllmServerConfig, timeout_s: float = START_TIMEOUT_S
) -> Iterator[list[VllmServer]]:
    """Servers, started side by side and ready; stopped on every path.

    >>> with running_vllm(VllmServerConfig(model, log)) as [server]:  # doctest: +SKIP
    ...     httpx.get(server.url + "/v1/models")
    """
    servers: list[VllmServer] = []
    try:
        for config in configs:
            servers.append(VllmServer(config))
        for server in servers:
            server.wait_ready(timeout_s)
        yield servers
    finally:
        for server in servers:
            server.death_seen = server.death()
        for server in servers:
            server.stop()


def _free_port(host: str) -> int:
    """Free now; whoever takes it before the server binds it makes the start fail, with these words."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _role(process: psutil.Process, leader: int) -> str:
    if process.pid == leader:
        return "api"
    name = process.name() + " " + " ".join(process.cmdline())
    for word, role in (("EngineCore", "core"), ("Worker", "worker"), ("resource_tracker", "tracker")):
        if word in name:
            return role
    return str(process.name())
