"""The same small programs on stock asyncio and on the virtual loop: same results, same order."""

import asyncio
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import loop_programs
import pytest

from grpo_lab.sim.loop import VirtualLoop

MINORS = (11, 12, 13, 14)


@pytest.mark.parametrize("function", loop_programs.PROGRAMS, ids=lambda function: function.__name__)
def test_same_as_stock_asyncio(function):
    expected = loop_programs.run_on(asyncio.new_event_loop, function)
    assert len(expected) > 1, "the program logs something"
    assert loop_programs.run_on(VirtualLoop, function) == expected


def interpreter(minor):
    """A CPython 3.``minor`` that runs, from PATH or pyenv; None when there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [f"python3.{minor}", *sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python3"))]
    for candidate in candidates:
        path = shutil.which(candidate)
        if (
            path
            and subprocess.run([path, "-V"], check=False, capture_output=True, timeout=30).returncode == 0
        ):
            return path
    return None


@pytest.mark.parametrize("minor", [minor for minor in MINORS if minor != sys.version_info.minor])
def test_same_on_every_cpython_at_hand(minor):
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"CPython 3.{minor} is not installed")
    run = subprocess.run(
        [python, loop_programs.__file__], check=False, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(loop_programs.PROGRAMS)} programs on 3.{minor}." in run.stdout


def _twice(loop):
    with pytest.raises(RuntimeError, match=r"already running|while another loop is running"):
        loop.run_until_complete(asyncio.sleep(0))


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, VirtualLoop])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_life_of_a_loop(make_loop):
    loop = make_loop()
    assert not loop.is_running()
    assert loop.run_until_complete(asyncio.sleep(0, 1)) == 1
    task = loop.create_task(asyncio.sleep(0, 2))
    assert loop.run_until_complete(task) == 2
    loop.call_soon(_twice, loop)
    loop.run_until_complete(asyncio.sleep(0))
    order = []
    loop.call_soon(loop.stop)
    loop.call_soon(order.append, "rest of the round")
    loop.call_soon(loop.call_soon, order.append, "next round")
    loop.run_forever()
    assert order == ["rest of the round"]
    loop.run_until_complete(asyncio.sleep(0))
    assert order == ["rest of the round", "next round"]
    loop.call_soon(loop.stop)
    with pytest.raises(RuntimeError, match=r"stopped before Future completed"):
        loop.run_until_complete(loop.create_future())
    with pytest.raises(TypeError):
        loop.run_until_complete(None)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    loop.close()
    assert loop.is_closed()
    for call in (loop.run_forever, functools.partial(loop.call_soon, print)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, VirtualLoop])
def test_task_factory(make_loop):
    made = []

    def factory(loop, coro, **kwargs):
        made.append(coro.__name__)
        return asyncio.Task(coro, loop=loop, **kwargs)

    loop = make_loop()
    loop.set_task_factory(factory)
    assert loop.get_task_factory() is factory
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert made == ["sleep"]
