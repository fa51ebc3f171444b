"""Runs the points of a sweep side by side: in local processes, or as tasks of a Ray cluster."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Protocol

from grpo_lab.errors import ConfigError, GrpoLabError
from grpo_lab.harness.experiment import Point, Setting
from grpo_lab.trainer.interrupts import children_born_deaf, children_ended_early

RunPoint = Callable[[Point, Path], Mapping[str, Setting]]
RAY_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class PointResult:
    """What became of a point: its figures, or why there are none. ``wall_s`` is the run's own time."""

    point: Point
    figures: Mapping[str, Setting]
    error: str
    wall_s: float


class Executor(Protocol):
    """Runs points and yields results as they come; every point gets exactly one."""

    @property
    def workers(self) -> int:
        """Runs at a time."""
        ...

    def run(self, function: RunPoint, points: Sequence[Point], folder: Path) -> Iterator[PointResult]:
        """``folder/<hash>`` is a point's own folder."""
        ...


class LocalExecutor:
    """Processes of this machine that live for many points, so that imports are paid once.

    A point that kills its process (out of memory, a segmentation fault) costs its neighbours nothing: those
    that ran beside it run once more, one at a time, and the one that does it again is reported.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers if workers is not None else os.cpu_count() or 1
        if not 1 <= self._workers <= 1024:
            raise ConfigError("workers", workers, "from 1 to 1024")

    @property
    def workers(self) -> int:
        return self._workers

    def run(self, function: RunPoint, points: Sequence[Point], folder: Path) -> Iterator[PointResult]:
        waiting = list(reversed(points))
        while waiting:
            suspects = yield from self._until_broken(function, waiting, folder)
            for point in suspects:
                yield self._alone(function, point, folder)

    def _until_broken(
        self, function: RunPoint, waiting: list[Point], folder: Path
    ) -> Generator[PointResult, None, list[Point]]:
        """Takes points off ``waiting``; returns those that ran when a process died."""
        running: dict[Future[PointResult], Point] = {}
        with self._pool(self._workers) as pool, children_ended_early():
            try:
                while waiting or running:
                    while waiting and len(running) < self._workers:
                        with children_born_deaf():
                            future = pool.submit(_guarded, function, waiting[-1], folder)
                        running[future] = waiting.pop()
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        result = future.result()
                        del running[future]
                        yield result
            except BrokenProcessPool:
                return list(running.values())
        return []

    def _alone(self, function: RunPoint, point: Point, folder: Path) -> PointResult:
        started_s = time.monotonic()
        try:
            with self._pool(1) as pool, children_ended_early():
                with children_born_deaf():
                    future = pool.submit(_guarded, function, point, folder)
                return future.result()
        except BrokenProcessPool:
            error = "its process died (killed, out of memory, or a crash in native code)"
            return PointResult(point, {}, error, time.monotonic() - started_s)

    @staticmethod
    def _pool(workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent)


class RayExecutor:
    """Plain tasks, one a point, on a running Ray cluster.

    A worker that dies fails its own tasks only. Every machine of the cluster needs grpo_lab installed.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise ConfigError("ray", address, "the extra: pip install 'grpo-lab[ray]'") from error
        self._ray: Any = ray
        try:
            _require_listener(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError("ray", address, f"the address of a running Ray cluster ({error})") from error

    @property
    def workers(self) -> int:
        """Cores of the cluster: a task has one."""
        resources: Mapping[str, float] = self._ray.cluster_resources()
        return max(1, int(resources.get("CPU", 1)))

    def run(self, function: RunPoint, points: Sequence[Point], folder: Path) -> Iterator[PointResult]:
        remote = self._ray.remote(max_retries=0)(_unpacked)
        running: dict[Any, Point] = {
            remote.remote(sys.path, pickle.dumps((function, point, folder.resolve()))): point
            for point in points
        }
        try:
            while running:
                (done,), _ = self._ray.wait(list(running), num_returns=1)
                point = running.pop(done)
                try:
                    yield self._ray.get(done)
                except self._ray.exceptions.RayError as error:
                    reason = str(error).strip().splitlines()[-1]  # below a traceback of Ray's own
                    yield PointResult(point, {}, f"{type(error).__name__}: {reason[:500]}", 0.0)
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leaves the cluster; it goes on."""
        self._ray.shutdown()


def _require_listener(address: str) -> None:
    """Raises ``OSError``: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), RAY_CONNECT_S).close()


def _unpacked(path: Sequence[str], task: bytes) -> PointResult:
    """In a worker of Ray's: the experiment's module is looked for where the sweep found it."""
    sys.path.extend(place for place in path if place not in sys.path)
    return _guarded(*pickle.loads(task))  # noqa: S301 - from the sweep that this worker works for


def _end_with_parent() -> None:
    """Without it a worker of a killed sweep waits for its next point for ever, at a pipe it keeps open."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="watches the sweep", daemon=True).start()


def _guarded(function: RunPoint, point: Point, folder: Path) -> PointResult:
    """Runs in the other process: an error becomes a result, with its traceback in the point's folder."""
    own = folder / point.hash
    own.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    figures: Mapping[str, Setting] = {}
    error = ""
    try:
        figures = dict(function(point, own))
    except GrpoLabError as failure:
        error = f"{type(failure).__name__}: {failure}"
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure} (traceback in {own / 'error.txt'})"
        (own / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
    return PointResult(point, figures, error, time.monotonic() - started_s)
