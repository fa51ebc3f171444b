"""The virtual loop: deadlocks, ways out, bounds, exceptions, the end, speed."""

import asyncio
import math
import re
import signal
import sys
import threading
import time

import pytest

from grpo_lab.errors import Deadlock, EscapedSimulation, SimulationBoundExceeded, SimulationError
from grpo_lab.sim.loop import VirtualLoop
from grpo_lab.sim.tape import Tape, pct_tape, random_tape


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    if not loop.is_closed():
        loop.shutdown()
        loop.close()


# Time


def test_clock_jumps_only_when_nothing_is_ready(loop):
    seen = []

    async def busy():
        for _ in range(50):
            seen.append(loop.time())
            await asyncio.sleep(0)

    async def main():
        child = loop.create_task(busy())
        await asyncio.sleep(1e-9)
        assert child.done()
        await asyncio.sleep(86_400)

    started_s = time.monotonic()
    loop.run_until_complete(main())
    assert set(seen) == {0.0}
    assert loop.time() == 86_400 + 1e-9
    assert time.monotonic() - started_s < 5


def test_timer_of_the_past_does_not_turn_the_clock_back(loop):
    async def main():
        await asyncio.sleep(5)
        loop.call_at(1.0, lambda: None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return loop.time()

    assert loop.run_until_complete(main()) == 5.0
    with pytest.raises(ValueError, match="nan"):
        loop.call_later(math.nan, print)


# Deadlocks


def test_deadlock_names_every_task_and_what_it_waits_for(loop):
    async def take(queue):
        return await queue.get()

    async def main():
        queue, ready = asyncio.Queue(), asyncio.Event()
        worker = loop.create_task(take(queue), name="rollout-0")
        loop.create_task(ready.wait(), name="canary")
        loop.create_task(asyncio.sleep(math.inf), name="sleeper")
        await worker

    with pytest.raises(Deadlock) as caught:
        loop.run_until_complete(main())
    text = str(caught.value)
    assert text.startswith("deadlock at virtual second 0: nothing is ready, no timer is set")
    assert "task-1 waits for task rollout-0\n    at test_loop.py:" in text
    assert "main: await worker" in text
    assert "rollout-0 waits for Queue.get of <Queue maxsize=0 _getters[1]>" in text
    assert "take: return await queue.get()" in text
    assert "canary waits for Event.wait of <asyncio.locks.Event object [unset, waiters:1]>" in text
    assert "sleeper waits for <Future pending" in text
    assert re.search(r"0x[0-9a-f]{4}", text) is None
    assert caught.value.__context__ is None


def test_deadlock_text_repeats():
    def text_of_one_run():
        loop = VirtualLoop()
        lock = asyncio.Lock()

        async def twice():
            async with lock, lock:
                pass

        with pytest.raises(Deadlock) as caught:
            loop.run_until_complete(asyncio.wait_for(twice(), None))
        loop.shutdown()
        loop.close()
        return str(caught.value)

    assert text_of_one_run() == text_of_one_run()
    assert "Lock.acquire of <asyncio.locks.Lock object [locked, waiters:1]>" in text_of_one_run()


def test_deadlock_tells_of_failures_that_nobody_read(loop):
    async def main():
        loop.create_task(_fail("the worker broke"), name="worker")
        await asyncio.Event().wait()

    with pytest.raises(Deadlock) as caught:
        loop.run_until_complete(main())
    assert any(
        "ValueError: the worker broke" in note and "'worker'" in note for note in caught.value.__notes__
    )


def test_waiting_with_a_timeout_is_no_deadlock(loop):
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 30)
        return loop.time()

    assert loop.run_until_complete(main()) == 30


# Ways out

ESCAPES = {
    "loop.create_connection": lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 1),
    "loop.create_server": lambda loop: loop.create_server(asyncio.Protocol, "localhost", 0),
    "loop.getaddrinfo": lambda loop: loop.getaddrinfo("localhost", 1),
    "loop.subprocess_exec": lambda loop: asyncio.create_subprocess_exec("true"),
    "loop.subprocess_shell": lambda loop: asyncio.create_subprocess_shell("true"),
    "asyncio.to_thread": lambda loop: asyncio.to_thread(int),
    "loop.run_in_executor": lambda loop: loop.run_in_executor(None, int),
    "loop.add_signal_handler": lambda loop: _call(loop.add_signal_handler, signal.SIGUSR1, int),
    "loop.add_reader": lambda loop: _call(loop.add_reader, 0, int),
    "loop.sock_connect": lambda loop: loop.sock_connect(None, ("localhost", 1)),
}


async def _call(function, *args):
    return function(*args)


async def _fail(text, delay_s=0.0):
    if delay_s:
        await asyncio.sleep(delay_s)
    raise ValueError(text)


@pytest.mark.parametrize("name", ESCAPES)
def test_ways_out_are_refused_by_name(loop, name):
    async def main():
        await ESCAPES[name](loop)

    with pytest.raises(EscapedSimulation, match=r"^escaped into simulation: ") as caught:
        loop.run_until_complete(main())
    assert name in str(caught.value)


def test_no_method_of_a_loop_is_left_unanswered():
    for name in dir(asyncio.AbstractEventLoop):
        if not name.startswith("__"):
            assert getattr(VirtualLoop, name) is not getattr(asyncio.AbstractEventLoop, name), name


def test_swallowed_escape_still_ends_the_run(loop):
    log = []

    async def main():
        for _ in range(100):
            try:
                await asyncio.to_thread(int)
            except Exception:
                log.append("retry")
            await asyncio.sleep(1)

    with pytest.raises(EscapedSimulation, match="to_thread"):
        loop.run_until_complete(main())
    assert log == ["retry"]


def test_call_from_another_thread_is_refused_there_and_here(loop):
    seen = []

    def other():
        try:
            loop.call_soon_threadsafe(print)
        except EscapedSimulation as error:
            seen.append(str(error))

    async def main():
        thread = threading.Thread(target=other, name="stray")
        thread.start()
        thread.join()

    with pytest.raises(EscapedSimulation, match="from thread 'stray'"):
        loop.run_until_complete(main())
    assert len(seen) == 1


# Bounds


def test_virtual_time_is_bounded():
    loop = VirtualLoop(max_virtual_s=100)

    async def main():
        while True:
            await asyncio.sleep(7)

    with pytest.raises(
        SimulationBoundExceeded, match=r"virtual second 105, past max_virtual_s=100"
    ) as caught:
        loop.run_until_complete(main())
    assert "task-1 waits for" in str(caught.value)
    loop.shutdown()
    loop.close()


def test_callbacks_are_bounded():
    loop = VirtualLoop(max_callbacks=1000)

    async def main():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimulationBoundExceeded, match=r"max_callbacks=1000 met a livelock"):
        loop.run_until_complete(main())
    loop.shutdown()
    loop.close()


# Exceptions


def test_exception_of_a_callback_ends_the_run(loop):
    loop.call_soon(int, "no number")
    with pytest.raises(ValueError, match="no number") as caught:
        loop.run_until_complete(asyncio.sleep(1))
    assert caught.value.__context__ is None


def test_exception_that_nobody_awaited_is_raised_by_close():
    loop = VirtualLoop()

    async def main():
        loop.create_task(_fail("first", 1.0), name="a")
        loop.create_task(_fail("second", 0.5), name="b")
        for _ in range(500):  # more tasks than are kept: failures survive the pruning
            await loop.create_task(asyncio.sleep(0))
        await asyncio.sleep(5)

    loop.run_until_complete(main())
    with pytest.raises(ValueError, match="first") as caught:
        loop.close()
    assert caught.value.__notes__ == [
        "raised in task 'a', which nobody awaited",
        "also lost: ValueError: second",
    ]
    assert loop.is_closed()


def test_exception_that_was_read_is_not_lost(loop):
    async def main():
        bad = loop.create_task(_fail("read"))
        await asyncio.sleep(1)
        assert str(bad.exception()) == "read"
        results = await asyncio.gather(_fail("gathered"), return_exceptions=True)
        return str(results[0])

    assert loop.run_until_complete(main()) == "gathered"
    assert loop.lost_exceptions() == []


def test_lost_exceptions_are_notes_on_the_failure_of_main(loop):
    async def main():
        loop.create_task(_fail("background"), name="helper")
        await asyncio.sleep(1)
        raise RuntimeError("main")

    with pytest.raises(RuntimeError, match="main") as caught:
        loop.run_until_complete(main())
    assert "also lost: ValueError: background" in caught.value.__notes__[0]


def test_future_that_nobody_read_is_lost_too():
    loop = VirtualLoop()

    async def main():
        loop.create_future().set_exception(ValueError("dropped future"))

    loop.run_until_complete(main())
    with pytest.raises(ValueError, match="dropped future"):
        loop.close()


def test_what_is_reported_without_an_exception_is_an_error(loop):
    loop.call_exception_handler({"message": "something odd"})
    with pytest.raises(SimulationError, match="something odd"):
        loop.close()


# The end


def test_shutdown_cancels_in_order_of_creation_and_lets_tasks_clean_up(loop):
    log = []

    async def worker(name):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            log.append(name)

    async def main():
        for name in ("c", "a", "b"):
            loop.create_task(worker(name), name=name)
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert loop.shutdown() == ["c", "a", "b"]
    assert log == ["c", "a", "b"]
    assert loop.pending_tasks() == []


def test_shutdown_names_a_task_that_refuses_to_end(loop):
    stop = asyncio.Event()

    async def mule():
        while not stop.is_set():
            try:
                await stop.wait()
            except asyncio.CancelledError:
                continue

    async def main():
        loop.create_task(mule(), name="mule")
        await asyncio.sleep(0)

    loop.run_until_complete(main())
    with pytest.raises(Deadlock, match=r"mule waits for Event\.wait"):
        loop.shutdown()
    stop.set()


def test_task_that_fails_in_shutdown_is_not_lost():
    loop = VirtualLoop()

    async def messy():
        try:
            await asyncio.sleep(100)
        finally:
            raise KeyError("cleanup")

    async def main():
        loop.create_task(messy())
        await asyncio.sleep(0)

    loop.run_until_complete(main())
    loop.shutdown()
    with pytest.raises(KeyError, match="cleanup"):
        loop.close()


# The schedule


def order_under(tape, count=4):
    loop, log = VirtualLoop(tape), []

    async def worker(name):
        for step in range(3):
            log.append((name, step))
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(*(worker(name) for name in range(count)))

    loop.run_until_complete(main())
    loop.close()
    return log


def test_tape_reorders_tasks_but_never_steps_of_one_task():
    orders = {tuple(order_under(random_tape(seed, 100))) for seed in range(30)}
    assert len(orders) > 20
    for order in orders:
        for name in range(4):
            assert [step for who, step in order if who == name] == [0, 1, 2]


def test_zero_tape_is_first_in_first_out():
    assert order_under(Tape([0] * 50)) == order_under(Tape())


def test_canonical_tape_gives_the_same_schedule():
    for original in (random_tape(5, 100), pct_tape(5)):
        order = order_under(original)
        replay = original.canonical()
        assert order_under(replay) == order
        assert all(choice < asked for choice, asked in zip(replay.choices, original.asked, strict=False))


def test_call_soon_keeps_its_order_and_simultaneous_timers_do_not():
    soon, timed = set(), set()
    for seed in range(40):
        loop, log = VirtualLoop(random_tape(seed, 100)), []

        async def main(loop=loop, log=log):
            for number in range(4):
                loop.call_soon(log.append, number)
            await asyncio.sleep(1)
            for number in range(4):
                loop.call_at(2.0, log.append, number)
            loop.call_at(2.5, log.append, "last")
            await asyncio.sleep(5)

        loop.run_until_complete(main())
        loop.close()
        soon.add(tuple(log[:4]))
        timed.add(tuple(log[4:8]))
        assert log[8] == "last"
    assert soon == {(0, 1, 2, 3)}
    assert len(timed) > 10


def test_asyncio_primitives_hold_under_any_tape():
    for seed in range(60):
        loop = VirtualLoop(pct_tape(seed) if seed % 2 else random_tape(seed, 500))
        queue, lock, got, inside = asyncio.Queue(2), asyncio.Lock(), [], [0]

        async def producer(name, queue=queue):
            for number in range(5):
                await queue.put((name, number))

        async def consumer(queue=queue, lock=lock, got=got, inside=inside):
            for _ in range(5):
                item = await asyncio.wait_for(queue.get(), 10)
                async with lock:
                    inside[0] += 1
                    assert inside[0] == 1
                    await asyncio.sleep(0)
                    inside[0] -= 1
                got.append(item)

        async def main(producer=producer, consumer=consumer):
            await asyncio.gather(producer("a"), consumer(), producer("b"), consumer())

        loop.run_until_complete(main())
        loop.close()
        assert sorted(got) == [(name, number) for name in "ab" for number in range(5)]


# Speed


@pytest.mark.parametrize("kind", ["fifo", "random", "pct"])
def test_speed(kind, capsys):
    tape = {"fifo": Tape(), "random": random_tape(1, 200_000), "pct": pct_tape(1, 3, 200_000)}[kind]
    loop = VirtualLoop(tape)

    async def worker():
        for _ in range(2_500):
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)

    async def main():
        await asyncio.gather(*(worker() for _ in range(10)))

    started_s = time.process_time()
    loop.run_until_complete(main())
    per_s = loop.callbacks / (time.process_time() - started_s)
    loop.close()
    with capsys.disabled():
        sys.stdout.write(f"\n{kind}: {per_s:,.0f} callbacks per CPU second\n")
    assert per_s > (100_000 if kind == "fifo" else 30_000)
