"""grpo_lab inside a real vLLM: the only package that imports vllm.

Installed beside vLLM, it is found by the entry point group ``vllm.general_plugins`` and offers

* the weight-transfer backends ``lab_shm`` and ``lab_gloo`` (``--weight-transfer-config
  '{"backend": "lab_shm"}'``): an update is staged whole and verified before any weight is touched;
* the middleware ``grpo_lab.vllm_plugin.LabMiddleware`` (``--middleware``): the lab's headers and
  ``/grpo_lab/*`` routes.

Nothing of vLLM is changed unless one of the two backends is chosen.
"""

from __future__ import annotations

from grpo_lab.vllm_plugin.middleware import LabMiddleware

__all__ = ["BACKENDS", "LabMiddleware", "register"]

BACKENDS = ("lab_shm", "lab_gloo")


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: PLC0415

    from grpo_lab.vllm_plugin.lifeline import watch_parents  # noqa: PLC0415

    for backend in BACKENDS:
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                backend, "grpo_lab.vllm_plugin.engine", "LabWeightTransferEngine"
            )
    watch_parents()
