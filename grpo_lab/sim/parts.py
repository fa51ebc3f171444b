"""Which class plays each part of a simulated cluster: the protocol's own, unless a test gives another one."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.rl_state import RlState
from grpo_lab.protocol.coordinator import Coordinator
from grpo_lab.protocol.rollout_worker import RolloutWorker
from grpo_lab.sim.engine_host import SimulatedPolicy
from grpo_lab.sim.light_trainer import LightTrainer
from grpo_lab.sim.light_worker import LightWorker
from grpo_lab.sim.network import ABILITIES, SimulatedEngine, SimulatedTransport
from grpo_lab.trainer.term import TrainingTerm
from grpo_lab.trainer.weight_source import PackedSource
from grpo_lab.types import EngineCapabilities


@dataclass(frozen=True, slots=True)
class Parts:
    """Each field is the class itself or a subclass of it. ``abilities`` is what the engines are declared to
    be able to do; a ``client`` with others must say so too.
    """

    coordinator: type[Coordinator] = Coordinator
    source: type[PackedSource] = PackedSource
    transport: type[SimulatedTransport] = SimulatedTransport
    client: type[SimulatedEngine] = SimulatedEngine
    core: type[EngineCore] = EngineCore
    rl: type[RlState] = RlState
    policy: type[SimulatedPolicy] = SimulatedPolicy
    worker: type[RolloutWorker] = RolloutWorker
    worker_actor: type[LightWorker] = LightWorker
    term: type[TrainingTerm] = TrainingTerm
    trainer: type[LightTrainer] = LightTrainer
    abilities: EngineCapabilities = ABILITIES
