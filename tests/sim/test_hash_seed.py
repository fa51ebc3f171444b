"""Whole simulations give the same digest under two values of PYTHONHASHSEED: no order of a set leaks in."""

import os
import subprocess
import sys
from pathlib import Path

import grpo_lab

PROGRAM = """
from grpo_lab.sim.scenario import Fault, Scenario
from grpo_lab.sim.tape import random_tape
from grpo_lab.sim.world import simulate
from grpo_lab.testing.scopes import Scope, run_scope

faults = (Fault("crash_after", "engine-1", "update", 2, 2.0), Fault("lose_reply", "engine-0", "resume", 3))
scenario = Scenario(engines=3, steps=4, faults=faults, canary=True, network_s=0.0)
for tape in (None, random_tape(5, 2000)):
    print(simulate(scenario, tape).digest)
    print(run_scope(Scope(2, "on-trial", fault=Fault("hang_reply", "engine-1", "resume", 3)), tape).digest)
"""


def test_clusters_and_scopes_do_not_depend_on_the_hash_seed():
    root = str(Path(grpo_lab.__file__).parents[1])
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            check=True,
            capture_output=True,
            text=True,
            timeout=110,
        ).stdout.split()
        for seed in ("0", "12345")
    ]
    assert len(outputs[0]) == 4
    assert outputs[0] == outputs[1]
