"""Every bounded wait of the protocol in one table, and the one way to wait."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_lab.errors import ConfigError, PhaseTimeout

T = TypeVar("T")

AGREE_MARGIN_S = 10.0  # for what ranks do between two phases

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. Owner: who waits; the configuration field that sets it stands in brackets, if one does.

    The bounds of whole phases, of a sync and of the shutdown follow from these (the properties below), so
    that nobody who waits for a phase gives up before those who are in it.

    Attributes:
        connect_s: coordinator, until an engine answers /health [vllm_server_timeout].
        handshake_s: coordinator, until the transport is open, and then until all engines have joined it.
        pause_s: coordinator, until a pause is acknowledged; ``wait`` drains the running requests
            [pause_timeout].
        transfer_s: coordinator, for the first gather, for start, and until the last engine has received
            [sync_timeout].
        finish_s: coordinator, until the engine has loaded [sync_timeout].
        look_s: coordinator, for the question whether an engine has restarted.
        resume_s: coordinator, for a resume or another short call: health, weight_info, abandon.
        score_s: every rank, for a canary.
        close_s: coordinator, until the transport is closed.
    """

    connect_s: float = 60.0
    handshake_s: float = 30.0
    pause_s: float = 60.0
    transfer_s: float = 120.0
    finish_s: float = 60.0
    look_s: float = 2.0
    resume_s: float = 30.0
    score_s: float = 30.0
    close_s: float = 10.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not 0 < value < 86_400:
                raise ConfigError(item.name, value, "seconds above 0 and below 86,400")

    @property
    def pause_phase_s(self) -> float:
        """The pause, and when it failed the questions who lives and who has restarted, and their pause."""
        return 2 * self.pause_s + self.resume_s + self.look_s

    @property
    def join_s(self) -> float:
        """Closing the transport, two rounds of opening it and joining everybody, and the pause of who has
        restarted.
        """
        return self.close_s + 4 * self.handshake_s + self.look_s + self.pause_s

    @property
    def attempt_s(self) -> float:
        """First gather, start and move; finish, and the question after a lost reply; the canary."""
        return 3 * self.transfer_s + self.finish_s + self.resume_s + self.score_s

    @property
    def probation_s(self) -> float:
        """Resume and canary, and the pause of those that failed it."""
        return self.resume_s + self.score_s + self.pause_s

    @property
    def release_s(self) -> float:
        """From anywhere in a sync back to the previous version: abandon, stop who runs ahead, ask what the
        heirs of an earlier term hold, resume.
        """
        return 3 * self.resume_s + self.pause_s

    @property
    def agree_s(self) -> float:
        """Every rank, until all ranks have reported a phase: the longest one, and some."""
        phases = (self.connect_s + self.look_s + self.join_s, self.pause_phase_s, self.resume_s + self.join_s)
        return max(*phases, self.attempt_s, self.probation_s, self.release_s) + AGREE_MARGIN_S

    @property
    def connect_phase_s(self) -> float:
        """The trainer, for a whole connect: finding the engines, agreeing, waiting for health, joining."""
        return 2 * self.connect_s + self.look_s + self.join_s + 2 * self.agree_s

    def sync_s(self, attempts: int, turns: int = 1) -> float:
        """The trainer, for a whole sync on its worst path: in every turn every attempt fails at its last
        moment, then the way back, and a rank that does not answer.
        """
        tries = self.join_s + attempts * (self.attempt_s + self.resume_s + self.join_s)
        begin_s = self.look_s + self.score_s
        turn_s = self.pause_phase_s + tries + self.probation_s + self.resume_s
        return begin_s + turns * turn_s + self.release_s + self.resume_s + self.agree_s

    @property
    def shutdown_s(self) -> float:
        """The trainer, for all of the shutdown."""
        return self.release_s + self.close_s + AGREE_MARGIN_S


async def bounded(awaitable: Awaitable[T], timeout_s: float, what: str) -> T:
    """Awaits with a limit; what ran out is said with every task and where it stands.

    Raises:
        PhaseTimeout: after ``timeout_s`` seconds of the loop's clock.
    """
    try:
        async with asyncio.timeout(timeout_s) as scope:
            return await awaitable
    except TimeoutError as error:
        if not scope.expired():
            raise
        waiting = describe_tasks()
        message = f"{what}: no answer within {timeout_s:g} s. Waiting tasks:\n{waiting}"
        raise PhaseTimeout(message) from error


def describe_tasks() -> str:
    """One line per task of the running loop, sorted: its name, and where it is suspended.

    The lines are sorted, not the tasks: equal names must not come in the order of a set. Addresses are
    left out. So two runs of one simulation say the same.
    """
    lines = [f"  {task.get_name()}: {_where(task)}" for task in sorted(asyncio.all_tasks(), key=_name)]
    return _ADDRESS.sub("", "\n".join(sorted(lines)))


def _name(task: asyncio.Task[Any]) -> str:
    return task.get_name()


def _where(task: asyncio.Task[Any]) -> str:
    coroutine: Any = task.get_coro()
    place = "?"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None:
            place = f"{frame.f_code.co_qualname} line {frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None)
        if coroutine is not None and not hasattr(coroutine, "cr_frame"):
            return f"{place}, awaiting {coroutine!r}"
    return place
