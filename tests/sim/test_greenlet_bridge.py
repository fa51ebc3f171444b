"""Blocking actors in virtual time: calls, timeouts, exceptions both ways, deadlocks, several actors."""

import asyncio
import contextvars
import time

import pytest

from grpo_lab.errors import Deadlock, EscapedSimulation, PhaseTimeout, SimulationError
from grpo_lab.events import Reached
from grpo_lab.sim import (
    GreenletBridge,
    RankGroup,
    current_actor,
    explore,
    random_tape,
    run_simulation,
    run_twice,
    spawn_blocking,
    virtual_sleep,
)


def simulate(blocking, tape=None):
    """Runs ``blocking(context, bridge)`` as a blocking actor named trainer."""

    async def main(context):
        bridge = GreenletBridge(context.loop)
        try:
            return await spawn_blocking(context.loop, lambda: blocking(context, bridge), name="trainer")
        finally:
            bridge.close()

    return run_simulation(main, tape)


async def answer_after(delay_s, value):
    await asyncio.sleep(delay_s)
    return value


async def fail_after(delay_s, error):
    await asyncio.sleep(delay_s)
    raise error


def test_call_returns_the_result_in_virtual_time():
    def blocking(context, bridge):
        first = bridge.call(answer_after(5, "a"), timeout_s=10)
        return first, bridge.call(answer_after(7, "b"), timeout_s=10), context.now_s

    result = simulate(blocking)
    assert result.value == ("a", "b", 12)
    assert result.virtual_s == 12


def test_clocks_and_sleep_are_virtual_in_an_actor():
    def blocking(context, bridge):
        began_s, began_mono_s = time.time(), time.monotonic()
        time.sleep(3600)
        virtual_sleep(1800)
        return time.time() - began_s, time.monotonic() - began_mono_s, current_actor().name

    started_s = time.monotonic()
    assert simulate(blocking).value == (5400, 5400, "trainer")
    assert time.monotonic() - started_s < 5


def test_exceptions_propagate_both_ways():
    log = []

    def blocking(context, bridge):
        try:
            bridge.call(fail_after(1, KeyError("from the coroutine")), timeout_s=5)
        except KeyError as error:
            log.append(str(error))
        raise RuntimeError("from the actor")

    with pytest.raises(RuntimeError, match="from the actor") as caught:
        simulate(blocking)
    assert log == ["'from the coroutine'"]
    names = [entry.name for entry in caught.traceback]
    assert "blocking" in names
    assert caught.value.__context__ is None


def test_timeout_is_virtual_cancels_the_call_and_says_who_waited():
    log = []

    async def slow():
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(2)
            log.append("cleaned up")

    def blocking(context, bridge):
        with pytest.raises(
            PhaseTimeout, match=r"trainer calls .*slow: not done after 30 virtual s"
        ) as caught:
            bridge.call(slow(), timeout_s=30)
        assert "trainer calls" in str(caught.value)
        assert log == ["cleaned up"]
        assert caught.value.__context__ is None
        return context.now_s

    assert simulate(blocking).value == 32


def test_call_that_ignores_its_cancellation_does_not_hang_the_actor():
    async def mule():
        deadline_s = asyncio.get_running_loop().time() + 100
        while (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left_s)
            except asyncio.CancelledError:
                continue

    async def broken_cleanup():
        try:
            await asyncio.sleep(1000)
        finally:
            raise KeyError("cleanup")

    def blocking(context, bridge):
        with pytest.raises(PhaseTimeout) as caught:
            bridge.call(mule(), timeout_s=30)
        assert caught.value.__notes__ == ["it did not end within 10.0 s of being cancelled either"]
        assert context.now_s == 40
        with pytest.raises(PhaseTimeout) as caught:
            bridge.call(broken_cleanup(), timeout_s=1)
        assert caught.value.__notes__ == ["while being cancelled it raised KeyError: 'cleanup'"]
        time.sleep(100)

    simulate(blocking)


def test_in_caller_runs_on_the_stack_of_the_actor():
    def blocking(context, bridge):
        async def protocol():
            assert current_actor() is None
            first = await bridge.in_caller(lambda: current_actor().name)
            with pytest.raises(ZeroDivisionError):
                await bridge.in_caller(lambda: 1 // 0)
            await asyncio.sleep(1)
            both = await asyncio.gather(bridge.in_caller(lambda: 1), bridge.in_caller(lambda: 2))
            return first, both

        return bridge.call(protocol(), timeout_s=10)

    assert simulate(blocking).value == ("trainer", [1, 2])


def test_in_caller_may_block_and_call_again():
    def blocking(context, bridge):
        def gather_parameters():
            time.sleep(3)
            return bridge.call(answer_after(4, "nested"), timeout_s=10)

        async def protocol():
            return await bridge.in_caller(gather_parameters), asyncio.get_running_loop().time()

        return bridge.call(protocol(), timeout_s=60)

    assert simulate(blocking).value == ("nested", 7)


def test_timeout_during_a_nested_call_ends_the_outer_one():
    def blocking(context, bridge):
        async def protocol():
            await bridge.in_caller(lambda: bridge.call(answer_after(50, "late"), timeout_s=60))
            await asyncio.sleep(1000)

        with pytest.raises(PhaseTimeout, match="not done after 10 virtual s"):
            bridge.call(protocol(), timeout_s=10)
        return context.now_s

    assert simulate(blocking).value == 50  # as in a thread: the function in the caller runs to its end


def test_request_of_a_background_task_waits_for_the_next_call():
    def blocking(context, bridge):
        async def watch():
            await asyncio.sleep(1)
            return await bridge.in_caller(lambda: context.now_s)

        async def start():
            return asyncio.get_running_loop().create_task(watch())

        async def result_of(task):
            return await task

        task = bridge.call(start(), timeout_s=1)
        time.sleep(20)
        assert not task.done()
        return bridge.call(result_of(task), timeout_s=1)

    assert simulate(blocking).value == 20


def test_close_fails_what_waits_and_refuses_more():
    async def main(context):
        bridge = GreenletBridge(context.loop)
        waiting = bridge.in_caller(int)
        bridge.close()
        bridge.close()
        with pytest.raises(SimulationError, match="closed before the function could run"):
            await waiting
        with pytest.raises(SimulationError, match="the bridge is closed"):
            await bridge.in_caller(int)

        def blocking():
            bridge.call(answer_after(1, 1), timeout_s=5)

        with pytest.raises(SimulationError, match="late called through a bridge that is closed"):
            await spawn_blocking(context.loop, blocking, name="late")

    run_simulation(main)


def test_call_outside_an_actor_escapes():
    async def main(context):
        GreenletBridge(context.loop).call(answer_after(1, 1), timeout_s=5)

    with pytest.raises(EscapedSimulation, match=r"GreenletBridge\.call outside a blocking actor"):
        run_simulation(main)


def test_one_bridge_serves_one_actor():
    async def main(context):
        bridge = GreenletBridge(context.loop)
        first = spawn_blocking(context.loop, lambda: bridge.call(answer_after(9, 1), 20), name="first")
        await asyncio.sleep(1)
        second = spawn_blocking(context.loop, lambda: bridge.call(answer_after(9, 1), 20), name="second")
        with pytest.raises(SimulationError, match="second called through the bridge of first: make a bridge"):
            await second
        return await first

    assert run_simulation(main).value == 1


def test_hanging_actor_is_a_deadlock_with_its_python_stack():
    def deep_in_the_trainer(bridge, event):
        bridge.call(event.wait(), timeout_s=float("inf"))

    def blocking(context, bridge):
        deep_in_the_trainer(bridge, asyncio.Event())

    with pytest.raises(Deadlock) as caught:
        simulate(blocking)
    text = str(caught.value)
    assert "trainer waits for" in text
    inner = text.index("deep_in_the_trainer: bridge.call(event.wait()")
    outer = text.index("blocking: deep_in_the_trainer(bridge, asyncio.Event())")
    assert text.index("blocked in (innermost first):") < inner < outer
    assert "trainer calls Event.wait waits for Event.wait of <asyncio.locks.Event object [unset" in text
    assert "0x" not in text


def test_cancelling_an_actor_raises_where_it_is_blocked_and_lets_it_clean_up():
    log = []

    async def main(context):
        bridge = GreenletBridge(context.loop)

        def blocking():
            try:
                bridge.call(answer_after(1000, "never"), timeout_s=2000)
            except Exception:
                log.append("a broad handler must not see a cancellation")
            finally:
                log.append(bridge.call(answer_after(2, "cleaned"), timeout_s=5))

        task = spawn_blocking(context.loop, blocking, name="trainer")
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return context.now_s, [pending.get_name() for pending in context.loop.pending_tasks()]

    assert run_simulation(main).value == (3, ["task-1"])
    assert log == ["cleaned"]


def test_leftover_actor_is_cancelled_at_the_end():
    log = []

    def forgotten():
        try:
            time.sleep(1e5)
        finally:
            log.append("ended")

    async def main(context):
        spawn_blocking(context.loop, forgotten, name="forgotten")
        await asyncio.sleep(1)

    assert run_simulation(main).leftover_tasks == ("forgotten",)
    assert log == ["ended"]


def test_context_variables_are_those_of_the_task():
    variable = contextvars.ContextVar("variable", default="unset")

    async def main(context):
        seen = []

        def blocking(name):
            seen.append(variable.get())
            variable.set(name)
            time.sleep(1)
            seen.append(variable.get())

        variable.set("main")
        tasks = [spawn_blocking(context.loop, lambda name=name: blocking(name)) for name in "ab"]
        for task in tasks:
            await task
        return seen, variable.get()

    assert run_simulation(main).value == (["main", "main", "a", "b"], "main")


async def ranks_of_a_trainer(context, ranks=3, steps=4):
    """Blocking ranks that train, agree and talk to a coroutine engine: the shape of a real run."""
    group = RankGroup(ranks)
    served = []

    async def engine(queue):
        recorder = context.recorder("engine")
        while True:
            version = await queue.get()
            served.append(version)
            recorder.emit(Reached(mark=f"v{version}"))

    queue = asyncio.Queue(1)
    engine_task = context.loop.create_task(engine(queue), name="engine")

    def train(rank):
        bridge, recorder = GreenletBridge(context.loop), context.recorder(f"rank-{rank}")
        source = context.random(f"rank-{rank}")

        async def sync(version):
            gathered = await bridge.in_caller(lambda: version)
            if rank == 0:
                await queue.put(gathered)
            return await group.ranks[rank].agree(True, timeout_s=100)

        for step in range(steps):
            time.sleep(source.choice((1, 2)))
            assert bridge.call(sync(step), timeout_s=100)
            recorder.emit(Reached(mark=f"step {step} at {time.monotonic()}"))
        bridge.close()
        return time.monotonic()

    tasks = [
        spawn_blocking(context.loop, lambda rank=rank: train(rank), f"rank-{rank}") for rank in range(ranks)
    ]
    ended = [await task for task in tasks]
    await asyncio.sleep(0)
    engine_task.cancel()
    return served, ended


def test_several_actors_repeat_under_any_tape():
    digests = set()
    for seed in range(10):
        result = run_twice(ranks_of_a_trainer, random_tape(seed, 400), seed=1)
        served, ended = result.value
        assert served == [0, 1, 2, 3]
        assert len(set(ended)) == 1
        digests.add(result.digest)
    assert len(digests) > 1


def test_actors_can_be_explored_exhaustively():
    """A planted race between two blocking actors: a lost update, impossible in first-in-first-out order."""

    def run(tape):
        async def main(context):
            value = [0]

            def add(delays):
                for _ in range(delays):
                    time.sleep(0)
                seen = value[0]
                time.sleep(0)
                value[0] = seen + 1

            tasks = [spawn_blocking(context.loop, lambda n=n: add(n)) for n in (0, 3)]
            for task in tasks:
                await task
            return value[0]

        return run_simulation(main, tape).value

    assert run(None) == 2
    found = explore(run, depth=12)
    assert found.complete
    assert set(found.outcomes) == {1, 2}


def test_gradient_mode_belongs_to_the_actor():
    torch = pytest.importorskip("torch")

    async def main(context):
        seen = []

        def inside_no_grad():
            with torch.no_grad():
                time.sleep(2)
                seen.append(("no_grad", torch.is_grad_enabled()))
            seen.append(("after", torch.is_grad_enabled()))

        def outside():
            time.sleep(1)
            seen.append(("other", torch.is_grad_enabled()))

        tasks = [spawn_blocking(context.loop, function) for function in (inside_no_grad, outside)]
        await asyncio.sleep(1.5)
        seen.append(("coroutine", torch.is_grad_enabled()))
        for task in tasks:
            await task
        return seen

    assert run_simulation(main).value == [
        ("other", True),
        ("coroutine", True),
        ("no_grad", False),
        ("after", True),
    ]


def test_waiting_in_inference_mode_is_refused():
    torch = pytest.importorskip("torch")

    def blocking(context, bridge):
        with torch.inference_mode():
            time.sleep(1)

    with pytest.raises(SimulationError, match=r"trainer would wait inside torch\.inference_mode"):
        simulate(blocking)
    assert not torch.is_inference_mode_enabled()


def test_speed_of_switches(capsys):
    switches = 20_000

    def blocking(context, bridge):
        for _ in range(switches):
            virtual_sleep(0)

    started_s = time.process_time()
    simulate(blocking)
    per_s = switches / (time.process_time() - started_s)
    with capsys.disabled():
        print(f"\n{per_s:,.0f} blocking waits per CPU second")  # noqa: T201
    assert per_s > 20_000
