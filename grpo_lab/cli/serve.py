"""``grpo-lab serve``: the simulated vLLM under uvicorn, on the wall clock."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from grpo_lab.errors import ConfigError, GrpoLabError

READY = "grpo-lab serve: ready at"
_PR_SET_PDEATHSIG = 1
AFTER_DEATH_S = 2.0  # a vLLM whose engine died ends within 6 s, with exit code 0


@dataclass(frozen=True)
class ServeConfig:
    """Serve a Llama or Qwen2 model directory like a vLLM server."""

    model: Annotated[Path | None, tyro.conf.Positional] = None
    """Model directory in Hugging Face format. Not needed for a synthetic policy."""
    policy: Literal["model", "synthetic"] = "model"
    """Where tokens come from: the model, or a draw of tokens and lengths without any maths (and without
    text), to load-test clients and HTTP."""
    mean_tokens: float = 64.0
    """Mean length of a synthetic completion that is not told how long to be."""
    faithful: bool = False
    """Answer as a stock vLLM even where that is a defect: labels that move without weights, half-loaded
    models, death at the next step, blind checksums. Else such requests are refused. See docs/serve.md."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback lets others update the weights: set --api-key."""
    port: int = 8000
    """0 takes a free one; the ready line names it."""
    name: str = "engine-0"
    """Member name in the trace."""
    served_model_name: str = ""
    """Name in /v1/models; the directory's name by default."""
    events: Path | None = None
    """Directory for this engine's part of the trace (<name>.jsonl)."""
    clock_zero: float | None = None
    """time.monotonic() at which the run began, so that all parts of a trace share a zero."""
    threads: int = 1
    """CPU threads of a model step."""
    max_num_seqs: int = 128
    """Sequences in a batch."""
    max_batched_tokens: int = 2048
    """Tokens in a step."""
    max_model_len: int | None = None
    """Longest sequence; the model's own limit by default."""
    kv_blocks: int = 2048
    """KV cache size, in blocks of 16 tokens."""
    prefix_cache: Literal["auto", "versioned", "flush", "shared", "off"] = "auto"
    """How the prefix cache treats weight versions; shared, as in vLLM, is unsafe on purpose. By default
    shared if faithful, else versioned."""
    seed: int = 0
    """Part of every sample's random key."""
    batch_invariant: bool = False
    """Numbers that do not depend on a sequence's neighbours (slow)."""
    transports: tuple[str, ...] = ()
    """Weight transports to accept: lab_shm, lab_gloo (ours), gloo_packed (a stock vLLM's wire format). All by
    default; none by default if faithful."""
    weight_transfer_config: str = ""
    """The same in vLLM's words: '{"backend": "gloo_packed"}'."""
    rl_routes: bool = field(default_factory=lambda: os.environ.get("VLLM_SERVER_DEV_MODE") == "1")
    """vLLM's development routes: pause, resume, weight updates. Off, unless VLLM_SERVER_DEV_MODE=1 is set."""
    enable_scale_out: bool = False
    """The token route /inference/v1/generate. Always there unless faithful."""
    logprobs_mode: Literal["auto", "raw_logprobs", "processed_logprobs"] = "auto"
    """Logprobs of the model's own distribution (as vLLM's default) or of the one drawn from, which training
    needs. By default raw if faithful, else processed."""
    api_key: str | None = field(default=None, repr=False)
    """Required as a bearer token on every path but /health, /ping and /metrics; if faithful on the paths that
    a vLLM protects, which leaves the RL routes open."""
    parent_pid: int | None = None
    """End when this process ends."""

    def __post_init__(self) -> None:
        bounds = {"threads": 256, "max_num_seqs": 65_536, "max_batched_tokens": 1 << 20, "kv_blocks": 1 << 24}
        for name, high in bounds.items():
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise ConfigError(name, value, f"an integer from 1 to {high}")
        if self.max_model_len is not None and not 2 <= self.max_model_len <= 1 << 24:
            raise ConfigError(
                "max_model_len", self.max_model_len, f"nothing, or an integer from 2 to {1 << 24}"
            )
        if self.model is None and self.policy == "model":
            raise ConfigError("model", None, "a model directory", "Or serve --policy synthetic without one")
        if not self.mean_tokens >= 1:
            raise ConfigError("mean_tokens", self.mean_tokens, "at least 1")
        if not 0 <= self.port <= 65_535:
            raise ConfigError("port", self.port, "an integer from 0 to 65535")


def run_server(config: ServeConfig) -> int:
    """Serves until SIGTERM, SIGINT or the parent's end; returns the exit code.

    Bad input (port in use, missing model, ...) is one line on stderr and exit code 2.
    """
    try:
        with ExitStack() as stack:
            watched = _watch_parent(config.parent_pid, stack)
            listener = stack.enter_context(_listen(config.host, config.port))
            return asyncio.run(_serve(config, listener, watched, stack))
    except GrpoLabError as error:
        print(f"grpo-lab serve: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def serve(config: tyro.conf.OmitArgPrefixes[ServeConfig]) -> int:
    """Serve a model directory like a vLLM server (see ServeConfig)."""
    return run_server(config)


async def _serve(config: ServeConfig, listener: socket.socket, watched: int | None, stack: ExitStack) -> int:
    loop, caught = asyncio.get_running_loop(), []

    def stop(number: int) -> None:
        caught.append(number)
        server.should_exit = True  # the loop gets to call this only when the server is there

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    # Imported here, as they take a second that --help and a refused port need not wait for.
    import torch  # noqa: PLC0415

    from grpo_lab.cli.serving import EngineServer, build_app  # noqa: PLC0415

    torch.set_num_threads(config.threads)
    app = build_app(config, stack)
    server = EngineServer(app, lambda: _announce(listener))
    if watched is not None:
        loop.add_reader(watched, _parent_ended, loop, watched, stop)
    if config.faithful:
        app.state.core.on_death = lambda: loop.call_later(AFTER_DEATH_S, stop, 0)
    await server.serve(sockets=[listener])
    if not server.started:
        return 3
    return 130 if signal.SIGINT in caught else 0


def _announce(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    print(f"{READY} http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)  # noqa: T201


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ``ConfigError`` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only on sockets that name their protocol; with it on, every
    # answer waits for the client's delayed acknowledgement (40 ms on loopback).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        fix = "Choose another --port, or 0 for a free one"
        raise ConfigError("port", port, f"a free port of {host} ({error.strerror})", fix) from error
    return listener


def _watch_parent(parent_pid: int | None, stack: ExitStack) -> int | None:
    """A descriptor that becomes readable when the parent ends, and a signal as second line.

    The kernel's parent-death signal alone is not enough: it also fires when merely the *thread* that
    started this process ends. So it is set only where the descriptor cannot be had.
    """
    if parent_pid is None:
        return None
    try:
        descriptor = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        raise ConfigError("parent_pid", parent_pid, "a running process") from None
    except (AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:
            raise ConfigError("parent_pid", parent_pid, f"the parent ({os.getppid()})") from None
        return None
    stack.callback(os.close, descriptor)
    return descriptor


def _parent_ended(loop: asyncio.AbstractEventLoop, watched: int, stop: Callable[[int], None]) -> None:
    loop.remove_reader(watched)
    stop(0)


if __name__ == "__main__":
    sys.exit(run_server(tyro.cli(ServeConfig)))
