"""The ordered task group: order of cancellation, one exception, bounds."""

import asyncio
import math
import subprocess
import sys
import traceback

import pytest

from grpo_lab.errors import PhaseTimeout
from grpo_lab.protocol.nursery import Nursery, run_all
from grpo_lab.sim.loop import VirtualLoop
from grpo_lab.sim.tape import random_tape


def run(main, seed=None):
    loop = VirtualLoop(random_tape(seed, 200) if seed is not None else None)
    try:
        return loop.run_until_complete(main), loop.time()
    finally:
        loop.shutdown()
        loop.close()


async def fail_after(delay_s, error):
    await asyncio.sleep(delay_s)
    raise error


async def log_cancel(log, name, delay_s=1000.0):
    try:
        await asyncio.sleep(delay_s)
    except asyncio.CancelledError:
        log.append(name)
        raise


def test_waits_for_children_and_gives_their_results():
    async def main():
        async with Nursery("n", timeout_s=10) as nursery:
            children = [nursery.start(asyncio.sleep(i, result=i), name=f"c{i}") for i in range(3)]
            assert nursery.running == ("c0", "c1", "c2")
        assert nursery.running == ()
        return [child.result() for child in children]

    assert run(main()) == ([0, 1, 2], 2.0)


def test_run_all_keeps_the_order_given():
    async def main():
        return await run_all("r", [(f"c{i}", asyncio.sleep(5 - i, result=i)) for i in range(5)], timeout_s=9)

    assert run(main()) == ([0, 1, 2, 3, 4], 5.0)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_first_failure_cancels_the_block_and_siblings_and_is_the_only_exception(seed):
    log: list[str] = []

    async def main():
        async with Nursery("n", timeout_s=math.inf) as nursery:
            for name in "abc":
                nursery.start(log_cancel(log, name), name=name)
            nursery.start(fail_after(1, ValueError("first")), name="bad")
            await asyncio.sleep(500)
            log.append("the block went on")

    with pytest.raises(ValueError, match="first") as caught:
        run(main(), seed)
    assert sorted(log) == ["a", "b", "c"]
    if seed is None:
        assert log == ["a", "b", "c"]
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_failure_while_leaving_cancels_siblings_in_order_of_creation():
    log: list[str] = []

    async def main():
        async with Nursery("n", timeout_s=math.inf) as nursery:
            for name in "cab":
                nursery.start(log_cancel(log, name), name=name)
            nursery.start(fail_after(1, ValueError("x")), name="bad")

    with pytest.raises(ValueError, match="x") as caught:
        run(main())
    assert log == ["c", "a", "b"]
    assert caught.value.__context__ is None


def test_later_failures_are_notes():
    async def fail_in_cleanup():
        try:
            await asyncio.sleep(100)
        finally:
            raise KeyError("cleanup")

    async def main():
        async with Nursery("n", timeout_s=math.inf) as nursery:
            nursery.start(fail_in_cleanup(), name="messy")
            nursery.start(fail_after(1, ValueError("first")), name="bad")

    with pytest.raises(ValueError, match="first") as caught:
        run(main())
    assert caught.value.__notes__ == ["also failed: messy: KeyError: 'cleanup'"]


def test_error_of_the_block_cancels_children_and_wins():
    log: list[str] = []

    async def main():
        async with Nursery("n", timeout_s=math.inf) as nursery:
            nursery.start(log_cancel(log, "a"), name="a")
            await asyncio.sleep(1)
            raise RuntimeError("block")

    with pytest.raises(RuntimeError, match="block"):
        run(main())
    assert log == ["a"]


def test_cancellation_from_outside_cancels_children_and_stays_a_cancellation():
    log: list[str] = []

    async def inner(leave_at_once):
        async with Nursery("n", timeout_s=math.inf) as nursery:
            nursery.start(log_cancel(log, "a"), name="a")
            if not leave_at_once:
                await asyncio.sleep(100)

    async def main(leave_at_once):
        task = asyncio.get_running_loop().create_task(inner(leave_at_once))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert run(main(False)) == (True, 1.0)
    assert run(main(True)) == (True, 1.0)
    assert log == ["a", "a"]


def test_cancellation_from_outside_does_not_hide_a_failure_of_the_same_moment():
    outcomes = set()

    async def inner(children):
        async with Nursery("n", timeout_s=math.inf) as nursery:
            children.append(nursery.start(fail_after(1, ValueError("x")), name="bad"))
            await asyncio.sleep(100)

    async def main():
        loop = asyncio.get_running_loop()
        children: list[asyncio.Task] = []
        task = loop.create_task(inner(children))
        await asyncio.sleep(0)
        loop.call_at(1.0, task.cancel)
        try:
            await task
        except ValueError:
            return "failed"
        except asyncio.CancelledError:
            assert children[0].cancelled()
            return "cancelled"

    for seed in (None, *range(20)):
        outcomes.add(run(main(), seed)[0])
    assert outcomes == {"failed", "cancelled"}


def test_failure_in_cleanup_after_a_cancellation_from_outside_is_raised():
    async def fail_in_cleanup():
        try:
            await asyncio.sleep(100)
        finally:
            raise KeyError("cleanup")

    async def main():
        async with asyncio.timeout(1), Nursery("n", timeout_s=math.inf) as nursery:
            nursery.start(fail_in_cleanup(), name="messy")

    with pytest.raises(KeyError, match="cleanup"):
        run(main())


def test_failure_that_comes_just_as_the_block_ends_leaves_no_cancellation_behind():
    async def main():
        task = asyncio.current_task()

        async def nursed():
            async with Nursery("n", timeout_s=math.inf) as nursery:
                bad = nursery.start(fail_after(0, ValueError("now")), name="bad")
                while not bad.done():
                    await asyncio.sleep(0)

        with pytest.raises(ValueError, match="now"):
            await nursed()
        assert task.cancelling() == 0
        await asyncio.sleep(1)
        return "alive"

    for seed in (None, *range(8)):
        assert run(main(), seed)[0] == "alive"


def test_timeout_inside_a_nursery_inside_a_timeout():
    async def main():
        async def nursed():
            async with asyncio.timeout(2), Nursery("n", timeout_s=math.inf) as nursery:
                nursery.start(asyncio.sleep(100), name="slow")
                await asyncio.sleep(100)

        with pytest.raises(TimeoutError):
            await nursed()
        return asyncio.current_task().cancelling()

    assert run(main()) == (0, 2.0)


def test_bound_names_the_unfinished():
    async def main():
        async with Nursery("pause engines", timeout_s=3) as nursery:
            nursery.start(asyncio.sleep(1), name="engine-0")
            nursery.start(asyncio.sleep(100), name="engine-1")

    with pytest.raises(PhaseTimeout, match=r"'pause engines': engine-1 did not end within 3 s") as caught:
        run(main())
    assert caught.value.__context__ is None


def test_child_that_ignores_cancellation_is_named():
    async def stubborn(release):
        while not release.done():
            try:
                await asyncio.shield(release)
            except asyncio.CancelledError:
                continue

    async def main():
        loop = asyncio.get_running_loop()
        release = loop.create_future()
        loop.call_at(50.0, release.set_result, None)
        with pytest.raises(PhaseTimeout, match="did not end within 3 s") as caught:
            async with Nursery("n", timeout_s=3, cancel_timeout_s=4) as nursery:
                nursery.start(stubborn(release), name="mule")
        assert "mule did not end within 4 s of being cancelled" in caught.value.__notes__[0]
        assert loop.time() == 7.0
        await asyncio.sleep(100)

    run(main())


def test_cancel_ends_the_block_normally():
    log: list[str] = []

    async def main():
        async with Nursery("n", timeout_s=math.inf) as nursery:
            nursery.start(log_cancel(log, "a"), name="a")
            nursery.start(log_cancel(log, "b"), name="b")
            await asyncio.sleep(1)
            nursery.cancel()
        return "after"

    assert run(main()) == ("after", 1.0)
    assert log == ["a", "b"]


def test_start_is_refused_outside_the_block():
    async def main():
        nursery = Nursery("n", timeout_s=1)
        with pytest.raises(RuntimeError, match="'n' is not entered"):
            nursery.start(asyncio.sleep(0), name="early")
        async with nursery:
            pass
        with pytest.raises(RuntimeError, match="cannot start 'late'"):
            nursery.start(asyncio.sleep(0), name="late")

    run(main())


def test_traceback_shows_where_the_child_failed():
    async def main():
        async with Nursery("n", timeout_s=1) as nursery:
            nursery.start(fail_after(0, ValueError("x")), name="bad")

    with pytest.raises(ValueError, match="x") as caught:
        run(main())
    assert "fail_after" in "".join(traceback.format_exception(caught.value))


def test_same_results_on_stock_asyncio():
    async def main():
        log: list[str] = []
        try:
            async with Nursery("n", timeout_s=5) as nursery:
                for name in "abc":
                    nursery.start(log_cancel(log, name), name=name)
                nursery.start(fail_after(0.01, ValueError("first")), name="bad")
                await asyncio.sleep(100)
        except ValueError as error:
            log.append(str(error))
        return log

    assert asyncio.run(main()) == run(main())[0] == ["a", "b", "c", "first"]


def test_imports_without_torch():
    code = "import sys, grpo_lab.protocol.nursery; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
