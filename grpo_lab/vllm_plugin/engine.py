"""The weight-transfer backends ``lab_shm`` and ``lab_gloo`` of a vLLM worker.

==========  =======================  ==================================================================
vLLM calls  here                     what is served if it fails
==========  =======================  ==================================================================
init        compare plans, join      the previous version: nothing was touched
start       nothing                  the same
update      receive, verify, stage   the same; vLLM closes the session, and ``start`` begins a new one
finish      load what is staged      nothing: the weights are *torn*, and the error says so. The middleware
                                     refuses requests until a later update has loaded whole
==========  =======================  ==================================================================

Stock backends load while they receive, so there every failure of ``update`` leaves torn weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from grpo_lab.errors import GrpoLabError, HandshakeError
from grpo_lab.transport.receivers import RECEIVERS
from grpo_lab.types import JsonDict
from grpo_lab.vllm_plugin.checksums import report_served_weights
from grpo_lab.vllm_plugin.loading import load_weights
from grpo_lab.vllm_plugin.model_plan import Expected, plan_of
from grpo_lab.vllm_plugin.staging import StagedUpdate
from grpo_lab.vllm_plugin.words import ABANDON_KEY, ABANDONED, TORN

logger = init_logger(__name__)


@dataclass
class LabInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm may not be here
    """As the sender's transport says it; checked where it is used."""

    info: JsonDict


@dataclass
class LabUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The same for one update."""

    info: JsonDict


class LabWeightTransferEngine(WeightTransferEngine[LabInitInfo, LabUpdateInfo]):  # type: ignore[misc]
    """One per worker. Serves engines of one worker; a sharded engine is refused when it joins."""

    init_info_cls = LabInitInfo
    update_info_cls = LabUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._staged = StagedUpdate(RECEIVERS)
        self._expected = Expected.of_config(self.model_config.hf_config)
        if self._expected is None:
            logger.warning("grpo_lab: transformers does not know this model; bucket plans are not compared")
        report_served_weights()

    def parse_init_info(self, init_dict: dict[str, Any]) -> LabInitInfo:
        return LabInitInfo(dict(init_dict))

    def parse_update_info(self, update_dict: dict[str, Any]) -> LabUpdateInfo:
        return LabUpdateInfo(dict(update_dict))

    def init_transfer_engine(self, init_info: LabInitInfo) -> None:
        """Raises ``HandshakeError`` naming what differs from the model."""
        workers = self.parallel_config.world_size_across_dp
        if workers != 1:
            raise HandshakeError(
                f"this engine has {workers} workers; lab_shm and lab_gloo serve engines of one (TP=PP=DP=1). "
                "Use one engine per GPU, or vLLM's nccl backend"
            )
        backend = init_info.info.get("backend")
        if backend != self.config.backend:
            raise HandshakeError(
                f"backend={backend!r}; this server was started with --weight-transfer-config "
                f"backend {self.config.backend!r}"
            )
        self._staged.join(init_info.info, plan_of(init_info.info, self._expected))

    def start_weight_update(self) -> None:
        self._staged.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Every bucket is received and verified; no weight is touched. A failure makes vLLM close the
        session, which is also how a sender's request to abandon it is carried out.
        """
        if update_info.get(ABANDON_KEY):
            self._staged.begin()
            raise GrpoLabError(ABANDONED)
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: LabUpdateInfo) -> None:
        sync = self._staged.receive(update_info.info)
        logger.info("grpo_lab: %s is staged and verified", sync)

    def finish_weight_update(self) -> None:
        """Loads what is staged; without a whole update it raises and changes nothing."""
        tensors = self._staged.take()
        try:
            load_weights(self.model, self.model_config, tensors)
        except Exception as error:
            raise GrpoLabError(
                f"{TORN}: {self._staged.sync} failed while it was loaded: {type(error).__name__}: {error}"
            ) from error
        self._staged.begin()

    def shutdown(self) -> None:
        self._staged.leave()
