"""Whichever weight update an engine's trainer speaks: ours (packed, hashed, staged) or a stock vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.failures import UpdateError
from grpo_lab.engine.rl_state import ReceiverFactory, RlState
from grpo_lab.engine.runner import StepRunner
from grpo_lab.engine.stock import StockReceiver, StockUpdates
from grpo_lab.types import JsonDict, SyncId

StockFactory = Callable[[], StockReceiver]


class Updates:
    """``init_info`` decides where both are there: with a ``backend`` it is ours, with a ``master_address``
    a stock trainer's.

    Without any receiver the engine answers like a vLLM without ``--weight-transfer-config``.
    """

    def __init__(
        self,
        core: EngineCore,
        receivers: Mapping[str, ReceiverFactory],
        stock: StockFactory | None,
        *,
        faithful: bool,
        runner: StepRunner | None = None,
    ) -> None:
        self._core, self._faithful = core, faithful
        self._lab = RlState(core, receivers, runner)
        self._has_lab = bool(receivers)
        self._stock = None if stock is None else StockUpdates(core, stock, faithful=faithful)
        self._speaks_stock = self._stock is not None and not self._has_lab

    @property
    def lab(self) -> RlState:
        return self._lab

    @property
    def receiving(self) -> bool:
        """Whether a stock transfer is joining or receiving, which keeps the engine from anything else."""
        return self._stock is not None and self._stock.receiving

    @property
    def weights_on_meta(self) -> bool:
        return self._stock is not None and self._stock.weights_on_meta

    async def init(self, info: JsonDict, term: int) -> str:
        """The digest of the plan that was joined; "" for a stock trainer, which has none."""
        self._check_configured()
        ours = self._has_lab and ("backend" in info or "master_address" not in info)
        if self._stock is not None and not ours:
            await self._stock.init(info)
            self._speaks_stock = True
            return ""
        digest = await self._lab.init(info, term)
        self._speaks_stock = False
        return digest

    async def start(self, sync: SyncId | None, term: int) -> None:
        stock = self._session()
        await (stock.start() if stock is not None else self._lab.start(sync, term))

    async def update(self, info: Any, sync: SyncId | None, term: int) -> None:
        stock = self._session()
        if stock is not None:
            await stock.update(info)
        elif isinstance(info, list):
            await self._lab.update(info[0], sync, term)
        else:
            await self._lab.update(info, sync, term)

    async def finish(self, label: str | None, sync: SyncId | None, term: int) -> None:
        stock = self._session()
        if stock is not None:
            await stock.finish(label)
            return
        old = self._core.identity.label
        await self._lab.finish(label, sync, term)
        if self._faithful:  # vLLM's label is the client's business, and stays if it names none
            kept = old if label is None else label
            self._core.identity = replace(self._core.identity, label=kept)

    async def abandon(self, sync: SyncId | None, term: int) -> None:
        stock = self._session()
        await (stock.abandon() if stock is not None else self._lab.abandon(sync, term))

    async def start_draft(self) -> None:
        self._check_configured()
        raise UpdateError("Draft model weight update requested, but no draft model is configured.")

    async def shutdown(self) -> None:
        stock = self._stock if self._speaks_stock else None
        await (stock.shutdown() if stock is not None else self._lab.shutdown())

    async def close(self) -> None:
        try:
            if self._stock is not None:
                await self._stock.close()
        finally:
            await self._lab.close()

    def _session(self) -> StockUpdates | None:
        self._check_configured()
        return self._stock if self._speaks_stock else None

    def _check_configured(self) -> None:
        if not self._has_lab and self._stock is None:
            raise UpdateError(
                "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
            )
