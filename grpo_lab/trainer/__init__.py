"""Asynchronous GRPO on ``transformers.Trainer``.

Names are imported when they are asked for, so that the rollout worker's process, which needs a few
light modules of this package only, does not load transformers' trainer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lab.trainer.config import AsyncGRPOConfig
    from grpo_lab.trainer.protocols import RolloutWorkerProtocol, WeightTransferProtocol
    from grpo_lab.trainer.trainer import AsyncGRPOTrainer

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "RolloutWorkerProtocol", "WeightTransferProtocol"]

_MODULES = {
    "AsyncGRPOConfig": "config",
    "AsyncGRPOTrainer": "trainer",
    "RolloutWorkerProtocol": "protocols",
    "WeightTransferProtocol": "protocols",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
