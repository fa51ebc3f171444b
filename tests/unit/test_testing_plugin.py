"""The pytest fixtures, in test runs of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

import grpo_lab

pytest_plugins = ["pytester"]

USERS_TESTS = """
import asyncio
import time
from datetime import datetime

import pytest
from grpo_lab.errors import UserError
from grpo_lab.events import Reached, SyncBegan, RunDeclared
from grpo_lab.recorders import ListRecorder

def test_virtual_loop(virtual_loop):
    async def nap():
        await asyncio.sleep(3600)
        return time.time(), datetime.now().year
    began = time.monotonic()
    assert virtual_loop.run_until_complete(nap()) == (1_000_003_600, 2001)
    assert virtual_loop.time() == 3600
    assert time.monotonic() - began < 60

def test_virtual_loop_reports_what_is_left(virtual_loop):
    async def forgets():
        asyncio.get_running_loop().create_task(asyncio.sleep(1e6), name="forgotten")
    virtual_loop.run_until_complete(forgets())

def test_simulate(simulate):
    async def main(context):
        await asyncio.sleep(60)
        context.recorder("trainer").emit(Reached(mark="a minute"))
        return context.now_s
    result = simulate(main)
    assert (result.value, len(result.records)) == (60.0, 1)

def test_simulate_compares(simulate):
    runs = []
    async def main(context):
        runs.append(1)
        context.recorder("trainer").emit(Reached(mark=f"run {len(runs)}"))
    simulate(main)

def test_cluster(cluster, trace_check, tmp_path):
    result = cluster(engines=2, steps=2)
    assert result.value.version == 2
    assert trace_check(result.records).violations == 0
    path = tmp_path / "events.jsonl"
    path.write_text("".join(record.to_line() + chr(10) for record in result.records))
    assert trace_check(path).records == len(result.records)

def test_trace_check_finds(trace_check):
    records = []
    recorder = ListRecorder("trainer", lambda: 0.0, records)
    recorder.emit(RunDeclared())
    for _ in range(2):
        recorder.emit(SyncBegan(term=1, version=1, attempt=1, view=1, members=("engine-0",)))
    trace_check(records, allow=("S1",))

def test_trace_check_refuses_an_empty_trace(trace_check):
    trace_check([])

def test_wrong_input_is_told(cluster, simulate, trace_check, tmp_path):
    async def main(context):
        pass
    for call, words in (
        (lambda: cluster(engine=2), "field of a Scenario='engine': expected one of engines"),
        (lambda: cluster(engines="two"), "engines='two': expected an integer from 1 to 1024"),
        (lambda: cluster(engines=1.5), "engines=1.5: expected an integer from 1 to 1024"),
        (lambda: cluster(faults=("crash",)), "faults='crash': expected a tuple of Fault"),
        (lambda: cluster(tape=[1, 2]), "tape=.1, 2.: expected a grpo_lab.sim.tape.Tape"),
        (lambda: cluster(parts=dict), "parts=.*: expected a grpo_lab.sim.parts.Parts"),
        (lambda: simulate(main(None)), "main=.*: expected a function of one argument"),
        (lambda: simulate(main, tape=3), "tape=3: expected a grpo_lab.sim.tape.Tape"),
        (lambda: trace_check([], allow=("S99",)), "allow='S99': expected one of S1, "),
        (lambda: trace_check([], allow="S1"), "allow='S1': expected a collection of rules"),
        (lambda: trace_check(tmp_path / "nothing"), "no such run directory or trace file"),
        (lambda: trace_check(["S1"]), "or records"),
        (lambda: trace_check(7), "or records"),
    ):
        with pytest.raises(UserError, match=words):
            call()
"""


def test_the_fixtures_work_and_can_fail(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(grpo_lab.__file__).parents[1]))
    pytester.makepyfile(USERS_TESTS)
    # A process of its own: numpy cannot be imported a second time in this one.
    result = pytester.runpytest_subprocess("-p", "grpo_lab.testing.plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, failed=3, errors=1)  # a left task is an error at teardown
    said = result.stdout.str()
    assert "tasks were left when the test ended: forgotten" in said
    assert "two runs differ at record 0" in said
    assert "S13 (1): at most one sync is in flight" in said
    assert "the trace holds no event" in said


def test_loading_the_plugin_imports_nothing_heavy():
    """pytest loads it in every run of everybody who has the package."""
    program = (
        "import sys, grpo_lab.testing.plugin\n"
        "heavy = {'torch', 'transformers', 'datasets', 'hypothesis', 'fastapi', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("name", ["clusters", "CoordinatorMachine", "Scope", "load_case", "TRANSITIONS"])
def test_what_the_package_exports_is_there(name):
    import grpo_lab.testing as package

    assert name in package.__all__
    assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
