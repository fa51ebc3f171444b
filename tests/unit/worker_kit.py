"""What tests of the worker's process share: a tiny HTTP engine in a thread, reward functions that pickle."""

import contextlib
import json
import os
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.protocol.rollout_worker import RolloutSettings
from grpo_lab.protocol.sample_request import RequestSettings
from grpo_lab.trainer.worker_main import WorkerSpec
from grpo_lab.types import CursorState, SamplingParams

ROWS = [{"prompt": f"prompt {number}", "answer": str(number)} for number in range(20)]


class Tokenizer:
    def __call__(self, text):
        return {"input_ids": [ord(letter) % 50 for letter in text]}

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def constant(completions, **_):
    return [1.0] * len(completions)


def raises(completions, **_):
    raise ZeroDivisionError("division by zero in my reward")


def sleeps(completions, **_):
    time.sleep(60)


class ForksAndHolds:
    """Leaves a child behind that has inherited every descriptor of the worker, and writes down its id."""

    def __init__(self, path):
        self.path = path

    def __call__(self, completions, **_):
        # Groups are scored side by side: one of them forks, the others wait until its note is whole.
        note, claim = Path(self.path), Path(f"{self.path}.claim")
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            deadline = time.monotonic() + 5
            while not note.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return [1.0] * len(completions)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        whole = Path(f"{self.path}.whole")
        whole.write_text(str(child))
        whole.rename(note)
        return [1.0] * len(completions)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/v1/models":
            self.answer(200, {"data": [{"id": "tiny"}]})
        elif self.path == "/grpo_lab/capabilities":
            self.answer(200, {"token_versions": True})
        else:
            self.answer(404, {"error": "no such route"})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.server.held.wait()
        version = [{"version": "t1.v1.a1", "start": 0, "end": 3}]
        logprobs = {"content": [{"logprob": -0.5}] * 3}
        choice = {"token_ids": [5, 6, 7], "logprobs": logprobs, "finish_reason": "stop"}
        self.answer(200, {"choices": [choice | {"weight_versions": version}]})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        with contextlib.suppress(ConnectionError):  # a client that gave up
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """``held`` is an event: while it is clear, generation hangs, as on a paused engine."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.held = threading.Event()
        self.held.set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._connections = []

    def get_request(self):
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def die(self):
        """No new connections, and the old ones break."""
        self.shutdown()
        self.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.held.set()
        server.die()
        thread.join(5)


def make_spec(url, *reward_funcs, capacity=100, **changes):
    settings = RolloutSettings(
        num_generations=2,
        sampling=SamplingParams(max_tokens=3),
        bound=StalenessBound("drop", groups_per_step=2, max_staleness=1),
        max_inflight=8,
        request=RequestSettings(timeout_s=30, retry_delay_s=0.05, engine_gone_after_s=0.5),
        heartbeat_every_s=0.1,
    )
    spec = {
        "term": 1,
        "version": 1,
        "cursor": CursorState(),
        "engine_urls": (url,),
        "settings": settings,
        "queue_capacity": capacity,
        "dataset": ROWS,
        "reward_funcs": reward_funcs or (constant,),
        "reward_weights": None,
        "reward_timeout_s": 90.0,
        "tokenizer": Tokenizer(),
        "chat_template_kwargs": None,
        "max_prompt_tokens": None,
        "prompt_seed": 0,
        "events_dir": None,
        "started_s": time.monotonic(),
        "engine_wait_s": 0.5,
    }
    return WorkerSpec(**(spec | changes))
