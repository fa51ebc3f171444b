"""Small programs that must do the same, in the same order, on stock asyncio and on the virtual loop.

Standard library only, so that every CPython at hand can run them: ``python loop_programs.py`` prints the
names of those that differ and exits with their number.
"""

import asyncio
import contextvars
import sys
import types
from pathlib import Path

PROGRAMS = []
STEP_S = 0.02  # apart enough for the order to be certain on a wall clock


def program(function):
    PROGRAMS.append(function)
    return function


@program
async def tasks_take_turns(log):
    async def worker(name):
        for step in range(3):
            log.append((name, step))
            await asyncio.sleep(0)

    await asyncio.gather(*(worker(name) for name in "abc"))


@program
async def call_soon_is_first_in_first_out(log):
    loop = asyncio.get_running_loop()
    for number in range(4):
        loop.call_soon(log.append, number)
    loop.call_soon(loop.call_soon, log.append, "nested")
    loop.call_soon_threadsafe(log.append, "threadsafe")
    handle = loop.call_soon(log.append, "cancelled")
    handle.cancel()
    await asyncio.sleep(0)
    log.append("main")
    await asyncio.sleep(0)


@program
async def timers_fire_in_order_of_time(log):
    loop = asyncio.get_running_loop()
    for factor in (3, 1, 2):
        loop.call_later(factor * STEP_S, log.append, factor)
    cancelled = loop.call_later(STEP_S, log.append, "never")
    cancelled.cancel()
    loop.call_at(loop.time() + 4 * STEP_S, log.append, 4)
    await asyncio.sleep(5 * STEP_S)
    log.append(round((cancelled.when() - loop.time()) / STEP_S) < 0)


@program
async def many_cancelled_timers(log):
    loop = asyncio.get_running_loop()
    handles = [loop.call_later(STEP_S + number * 1e-6, log.append, number) for number in range(500)]
    for handle in handles[:490]:
        handle.cancel()
    await asyncio.sleep(3 * STEP_S)


@program
async def zero_delay_timer_comes_after_what_is_ready(log):
    loop = asyncio.get_running_loop()
    loop.call_later(0, log.append, "timer")
    loop.call_soon(log.append, "soon")
    loop.call_soon(loop.call_soon, log.append, "soon after")
    for turn in range(4):
        log.append(turn)
        await asyncio.sleep(0)


@program
async def wait_for_gives_the_result_or_times_out(log):
    log.append(await asyncio.wait_for(asyncio.sleep(STEP_S, "result"), 10 * STEP_S))

    async def slow():
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    try:
        await asyncio.wait_for(slow(), STEP_S)
    except TimeoutError:
        log.append("timeout")
    try:
        await asyncio.wait_for(slow(), 0)
    except TimeoutError:
        log.append("timeout at once")


@program
async def timeout_blocks(log):
    try:
        async with asyncio.timeout(STEP_S):
            await asyncio.sleep(100)
    except TimeoutError:
        log.append("outer")
    async with asyncio.timeout(10) as bound:
        bound.reschedule(asyncio.get_running_loop().time() + 50)
        await asyncio.sleep(0)
    log.append(bound.expired())


@program
async def event(log):
    ready = asyncio.Event()

    async def waiter(name):
        await ready.wait()
        log.append(name)

    tasks = [asyncio.create_task(waiter(name)) for name in "abc"]
    await asyncio.sleep(0)
    ready.set()
    await asyncio.gather(*tasks)


@program
async def queue_with_back_pressure(log):
    queue = asyncio.Queue(maxsize=2)

    async def producer():
        for number in range(6):
            await queue.put(number)
            log.append(("put", number, queue.qsize()))

    async def consumer(name):
        while True:
            log.append((name, await queue.get()))
            queue.task_done()

    made = asyncio.create_task(producer())
    consumers = [asyncio.create_task(consumer(name)) for name in "xy"]
    await made
    await queue.join()
    for task in consumers:
        task.cancel()
    log.append([repr(item) for item in await asyncio.gather(*consumers, return_exceptions=True)])


@program
async def priority_and_lifo_queues(log):
    for kind in (asyncio.PriorityQueue, asyncio.LifoQueue):
        queue = kind()
        for number in (2, 3, 1):
            queue.put_nowait(number)
        log.append([await queue.get() for _ in range(3)])


@program
async def condition(log):
    changed, value = asyncio.Condition(), []

    async def waiter(name, need):
        async with changed:
            await changed.wait_for(lambda: len(value) >= need)
            log.append((name, len(value)))

    tasks = [asyncio.create_task(waiter(f"w{need}", need)) for need in (2, 1, 3)]
    for number in range(3):
        await asyncio.sleep(0)
        async with changed:
            value.append(number)
            changed.notify_all()
    await asyncio.gather(*tasks)


@program
async def lock_and_semaphore_are_fair(log):
    async def use(guard, name):
        async with guard:
            log.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(use(lock, name) for lock in [asyncio.Lock()] for name in "abc"))
    semaphore = asyncio.Semaphore(2)
    await asyncio.gather(*(use(semaphore, name) for name in "defgh"))
    bounded = asyncio.BoundedSemaphore(1)
    try:
        bounded.release()
    except ValueError as error:
        log.append(str(error))


@program
async def barrier(log):
    meeting = asyncio.Barrier(3)

    async def meet(name):
        log.append((name, await meeting.wait()))

    await asyncio.gather(*(meet(name) for name in "abc"))


@program
async def gather_with_failures(log):
    async def fail(delay_s, text):
        await asyncio.sleep(delay_s)
        raise ValueError(text)

    async def succeed():
        await asyncio.sleep(2 * STEP_S)
        log.append("finished all the same")
        return 1

    other = asyncio.create_task(succeed())
    try:
        await asyncio.gather(fail(STEP_S, "first"), other)
    except ValueError as error:
        log.append(str(error))
    results = await asyncio.gather(fail(0, "kept"), other, return_exceptions=True)
    log.append([repr(result) for result in results])


@program
async def cancellation(log):
    async def stubborn():
        for _ in range(2):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError as error:
                log.append(("ignored", error.args))
        return "done"

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    task.cancel("once")
    await asyncio.sleep(0)
    task.cancel("twice")
    log.append((await task, task.cancelling(), task.cancelled()))
    early = asyncio.create_task(stubborn())
    early.cancel()
    try:
        await early
    except asyncio.CancelledError:
        log.append("cancelled before it began")


@program
async def shield_and_task_group(log):
    inner = asyncio.create_task(asyncio.sleep(2 * STEP_S, "inner"))
    outer = asyncio.ensure_future(asyncio.shield(inner))
    await asyncio.sleep(0)
    outer.cancel()
    log.append((await asyncio.gather(outer, return_exceptions=True), await inner)[1])
    async with asyncio.TaskGroup() as group:
        child = group.create_task(asyncio.sleep(STEP_S, "child"))
    log.append(child.result())


@program
async def future_callbacks(log):
    future = asyncio.get_running_loop().create_future()
    for number in range(3):
        future.add_done_callback(lambda done, number=number: log.append((number, done.result())))
    future.add_done_callback(log.append)
    future.remove_done_callback(log.append)
    future.set_result("x")
    log.append(await future)
    await asyncio.sleep(0)


@program
async def context_variables(log):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("main")

    async def child():
        log.append(variable.get())
        variable.set("child")

    await asyncio.create_task(child())
    log.append(variable.get())
    context = contextvars.copy_context()
    await asyncio.create_task(child(), context=context)
    log.append(context[variable])
    asyncio.get_running_loop().call_soon(lambda: log.append(variable.get()), context=context)
    await asyncio.sleep(0)


@program
async def async_generators_are_closed(log):
    async def numbers():
        try:
            for number in range(10):
                yield number
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            log.append("closed")

    async for number in numbers():
        log.append(number)
        if number == 2:
            break
    await asyncio.sleep(STEP_S)
    unfinished = numbers()
    log.append(await anext(unfinished))
    log.append(("kept open", unfinished.ag_running))
    asyncio.get_running_loop().keep = unfinished  # closed by shutdown_asyncgens


@program
async def names_and_current_task(log):
    task = asyncio.create_task(asyncio.sleep(0), name="given")
    log.append((task.get_name(), asyncio.current_task() is not task, task in asyncio.all_tasks()))
    await task
    log.append(asyncio.get_running_loop().is_running())


@program
async def exception_handler_of_the_user(log):
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: log.append(repr(context["exception"])))
    loop.call_soon(int, "no number")
    await asyncio.sleep(0)
    loop.set_exception_handler(None)


@program
async def staggered_by_stream_reader(log):
    reader = asyncio.StreamReader()
    asyncio.get_running_loop().call_later(STEP_S, reader.feed_data, b"line one\nli")
    asyncio.get_running_loop().call_later(2 * STEP_S, reader.feed_data, b"ne two\n")
    log.append(await reader.readline())
    log.append(await reader.readline())


def run_on(make_loop, function):
    log = []
    with asyncio.Runner(loop_factory=make_loop) as runner:
        try:
            log.append(("result", runner.run(function(log))))
        except BaseException as error:
            log.append(("raised", repr(error)))
    return log


def virtual_loop():
    """The class, also where the packages that the rest of ``grpo_lab.sim`` needs are not installed."""
    if "grpo_lab.sim" not in sys.modules:
        root = Path(__file__).parents[2]
        sys.path.insert(0, str(root))
        package = types.ModuleType("grpo_lab.sim")
        package.__path__ = [str(root / "grpo_lab" / "sim")]
        sys.modules["grpo_lab.sim"] = package
    from grpo_lab.sim.loop import VirtualLoop

    return VirtualLoop


def main():
    loop_class = virtual_loop()
    different = [
        f"{function.__name__}: {expected!r} != {ours!r}"
        for function in PROGRAMS
        if (expected := run_on(asyncio.new_event_loop, function)) != (ours := run_on(loop_class, function))
    ]
    sys.stdout.write("\n".join([*different, f"{len(PROGRAMS)} programs on {sys.version.split()[0]}"]) + "\n")
    return len(different)


if __name__ == "__main__":
    sys.exit(main())
