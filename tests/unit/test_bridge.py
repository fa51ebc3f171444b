"""The bridge from blocking code to the protocol's loop, with real threads."""

import asyncio
import os
import signal
import threading
import time

import pytest

from grpo_lab.errors import PhaseTimeout
from grpo_lab.trainer import bridge as bridge_module
from grpo_lab.trainer.bridge import ThreadBridge


def ctrl_c_soon():
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.fixture
def bridge():
    made = ThreadBridge("test-bridge")
    yield made
    made.close()
    assert not any(thread.name == "test-bridge" for thread in threading.enumerate())


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(bridge_module, "INTERRUPT_GRACE_S", 0.5)


def test_value_and_exception_leave_through_call(bridge):
    async def double(value):
        await asyncio.sleep(0)
        return 2 * value

    async def fail():
        raise ValueError("from the coroutine")

    assert bridge.call(double(21), 5) == 42
    with pytest.raises(ValueError, match="from the coroutine"):
        bridge.call(fail(), 5)
    assert bridge.call(double(1), 5) == 2


def test_jobs_run_in_the_callers_thread_and_their_exceptions_reach_the_coroutine(bridge):
    caller = threading.get_ident()

    def fail():
        raise ValueError("from the caller")

    async def main():
        assert threading.get_ident() != caller
        assert await bridge.in_caller(threading.get_ident) == caller
        with pytest.raises(ValueError, match="from the caller"):
            await bridge.in_caller(fail)
        several = [bridge.in_caller(lambda n=n: n) for n in range(5)]
        return [await one for one in several]

    assert bridge.call(main(), 5) == [0, 1, 2, 3, 4]


def test_in_caller_outside_of_a_call_is_refused(bridge):
    with pytest.raises(RuntimeError, match="outside of a call"):
        bridge.in_caller(lambda: None)


def test_a_second_call_at_once_is_refused(bridge):
    async def main():
        await bridge.in_caller(lambda: bridge.call(asyncio.sleep(0), 1))

    with pytest.raises(RuntimeError, match="one blocking caller"):
        bridge.call(main(), 5)


def test_time_out_names_the_coroutine_and_lets_its_clean_up_use_the_caller(bridge):
    log = []

    async def stuck():
        try:
            await asyncio.sleep(100)
        finally:
            log.append(await bridge.in_caller(lambda: "gathered the rest"))
            await asyncio.sleep(0.05)
            log.append("resumed the engines")

    began = time.monotonic()
    with pytest.raises(PhaseTimeout, match=r"stuck did not end within 0.1 s$"):
        bridge.call(stuck(), 0.1)
    assert log == ["gathered the rest", "resumed the engines"]
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("short_grace")
def test_a_coroutine_that_refuses_to_end_is_bounded_and_said_so(bridge):
    let_go = asyncio.Event()

    async def stubborn():
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(PhaseTimeout, match=r"nor within 0.5 s of being cancelled"):
        bridge.call(stubborn(), 0.1)
    with pytest.raises(PhaseTimeout, match="test-bridge did not end"):
        bridge.close()


def test_ctrl_c_in_a_job_cancels_the_coroutine_which_still_cleans_up(bridge):
    log = []

    def interrupted():
        raise KeyboardInterrupt

    async def sync():
        try:
            await bridge.in_caller(interrupted)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            log.append("resumed the engines")
            raise

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        bridge.call(sync(), 60)
    assert log == ["resumed the engines"]
    assert time.monotonic() - began < 30
    assert bridge.call(asyncio.sleep(0, result="still usable"), 5) == "still usable"


def test_ctrl_c_lets_a_short_call_end(bridge):
    ended = []

    async def sync():
        await asyncio.sleep(2.0)
        ended.append(True)

    ctrl_c_soon()
    with pytest.raises(KeyboardInterrupt):
        bridge.call(sync(), 60)
    assert ended == [True]


@pytest.mark.usefixtures("short_grace")
def test_ctrl_c_ends_a_long_call_in_seconds(bridge):
    log = []

    async def sync():
        try:
            await asyncio.sleep(1000)
        finally:
            log.append(await bridge.in_caller(lambda: "cleaned up"))

    ctrl_c_soon()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        bridge.call(sync(), 60)
    assert log == ["cleaned up"]
    assert time.monotonic() - began < 30


def test_close_cancels_what_is_left_and_may_be_called_twice():
    bridge, log, tasks = ThreadBridge(), [], []

    async def forgotten():
        try:
            await asyncio.sleep(1000)
        finally:
            log.append("ended")

    async def main():
        tasks.append(asyncio.create_task(forgotten(), name="forgotten"))
        await asyncio.sleep(0)

    bridge.call(main(), 5)
    bridge.close()
    bridge.close()
    assert log == ["ended"]
