"""The trainer's ranks for the protocol: one process, or a torch.distributed group."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from grpo_lab.errors import PhaseTimeout
from grpo_lab.ports import Bridge, Ranks


class SingleRank:
    """A trainer of one process agrees with itself."""

    rank = 0
    size = 1

    async def barrier(self, timeout_s: float) -> None:
        """Nobody to wait for."""

    async def agree(self, ok: bool, timeout_s: float) -> bool:
        return ok


class TorchRanks:
    """All ranks of the default process group. Collectives run in the trainer's thread, in one order.

    Agreement has its own gloo group, so that its bound does not depend on the trainer's.
    """

    def __init__(self, bridge: Bridge, timeout_s: float) -> None:
        self._bridge = bridge
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    async def barrier(self, timeout_s: float) -> None:
        await self.agree(True, timeout_s)

    async def agree(self, ok: bool, timeout_s: float) -> bool:
        return await self._bridge.in_caller(lambda: self._all_true(ok))

    def _all_true(self, ok: bool) -> bool:
        flag = torch.tensor([1 if ok else 0])
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise PhaseTimeout(f"rank {self.rank}: the ranks did not agree on a phase: {error}") from error
        return bool(flag.item())


def make_ranks(bridge: Bridge, timeout_s: float) -> Ranks:
    """The ranks of this process: the default group's if there is one of several processes."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchRanks(bridge, timeout_s)
    return SingleRank()
