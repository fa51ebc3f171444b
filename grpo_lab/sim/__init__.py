"""The simulated world: virtual time, one thread, and a schedule that comes from a tape."""

from grpo_lab.sim.explore import Exploration, FailingSchedule, explore, shrink
from grpo_lab.sim.greenlet_bridge import GreenletBridge, current_actor, spawn_blocking, virtual_sleep
from grpo_lab.sim.loop import VirtualLoop
from grpo_lab.sim.ranks import InProcessRanks, RankGroup
from grpo_lab.sim.simulation import SimContext, SimResult, digest, run_simulation, run_twice
from grpo_lab.sim.tape import PctTape, Tape, fifo, pct_tape, random_tape

__all__ = [
    "Exploration",
    "FailingSchedule",
    "GreenletBridge",
    "InProcessRanks",
    "PctTape",
    "RankGroup",
    "SimContext",
    "SimResult",
    "Tape",
    "VirtualLoop",
    "current_actor",
    "digest",
    "explore",
    "fifo",
    "pct_tape",
    "random_tape",
    "run_simulation",
    "run_twice",
    "shrink",
    "spawn_blocking",
    "virtual_sleep",
]
