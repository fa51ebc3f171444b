"""What an event loop offers for the real world, and a simulated one refuses by name."""

from __future__ import annotations

import asyncio
from typing import Any

from grpo_lab.errors import EscapedSimulation

# Its thirty I/O methods are refused at run time, which a type checker cannot follow.
_AbstractLoop: Any = asyncio.AbstractEventLoop


class NoIoLoop(_AbstractLoop):  # type: ignore[misc]
    """An event loop whose I/O, processes, executors and signal handlers raise ``EscapedSimulation``.

    The refusal is also kept in ``escaped``, because a retry loop may swallow it; the loop checks
    that after every callback.
    """

    escaped: EscapedSimulation | None = None

    def escape(self, call: str, instead: str) -> EscapedSimulation:
        """Notes that ``call`` was made and returns the exception to raise for it."""
        error = EscapedSimulation(f"escaped into simulation: {call}; {instead}")
        if self.escaped is None:
            self.escaped = error
        return error


_SOCKETS = "use a simulated port (grpo_lab.ports) instead of a real connection"
_PROCESSES = "use an actor: a task, or spawn_blocking for blocking code"
_EXECUTORS = "run it as a coroutine, or as a blocking actor with spawn_blocking"
_SIGNALS = "model the signal as a fault that a task receives"

_INSTEAD = {
    "subprocess_exec": _PROCESSES,
    "subprocess_shell": _PROCESSES,
    "run_in_executor": _EXECUTORS,
    "set_default_executor": _EXECUTORS,
    "add_signal_handler": _SIGNALS,
    "remove_signal_handler": _SIGNALS,
}
_ALSO_CALLED = {"run_in_executor": "loop.run_in_executor (or asyncio.to_thread)"}


def refuse_the_rest(cls: type[NoIoLoop]) -> None:
    """Makes every loop method that ``cls`` does not define raise; new ones of later Pythons too."""
    for name in dir(asyncio.AbstractEventLoop):
        inherited = getattr(cls, name) is getattr(asyncio.AbstractEventLoop, name)
        if inherited and not name.startswith("_"):
            setattr(cls, name, _refusal(name))


def _refusal(name: str) -> Any:
    call, instead = _ALSO_CALLED.get(name, f"loop.{name}"), _INSTEAD.get(name, _SOCKETS)

    def refuse(self: NoIoLoop, *args: object, **kwargs: object) -> Any:
        raise self.escape(call, instead)

    refuse.__name__ = name
    return refuse
