"""The dump that every time-out carries."""

import asyncio

import pytest

from grpo_lab.errors import ConfigError, PhaseTimeout
from grpo_lab.protocol.timeouts import Timeouts, bounded
from grpo_lab.sim import run_simulation


def test_a_time_out_names_every_task_and_place_the_same_way_every_time():
    async def waits_for_room():
        await asyncio.Event().wait()

    async def main(context):
        # Equal names on purpose: they come out of a set.
        tasks = [asyncio.create_task(waits_for_room(), name="group") for _ in range(20)]
        tasks.append(asyncio.create_task(asyncio.sleep(1000), name="beat"))
        await asyncio.sleep(0)
        with pytest.raises(PhaseTimeout) as caught:
            await bounded(asyncio.Event().wait(), 3, "pause of engine-0")
        for task in tasks:
            task.cancel()
        assert context.now_s == 3
        return str(caught.value)

    texts = {run_simulation(main).value for _ in range(5)}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("pause of engine-0: no answer within 3 s. Waiting tasks:\n")
    assert text.count("  group: ") == 20
    assert "beat: sleep line" in text
    assert "0x" not in text


def test_the_callers_own_time_out_is_not_mistaken_for_the_bound():
    async def main(context):
        async def raises():
            raise TimeoutError("from inside")

        with pytest.raises(TimeoutError, match="from inside"):
            await bounded(raises(), 3, "a call")

    run_simulation(main)


@pytest.mark.parametrize("value", [0, -1, 86_400, float("nan")])
def test_bounds_must_be_seconds(value):
    with pytest.raises(ConfigError, match="pause_s"):
        Timeouts(pause_s=value)
