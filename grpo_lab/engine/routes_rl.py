"""vLLM's RL routes (pause, resume, weight updates) and grpo_lab's own additions to them."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, cast

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.rl_state import RlState, UpdateError
from grpo_lab.engine.wire import (
    PLAN_HEADER,
    ApiError,
    Fields,
    answer,
    choice,
    invalid,
    query_flag,
    read_body,
    sync_of,
    term_of,
    worker_error,
)
from grpo_lab.errors import HandshakeError, PackingError, TransportError
from grpo_lab.types import EngineCapabilities, PauseMode

CAPABILITIES = EngineCapabilities(
    staged=True, hashes=True, token_versions=True, term_fencing=True, score_while_paused=True, events=True
)
_REFUSED = (UpdateError, HandshakeError, PackingError, TransportError)
_CHECKSUM_PREFIX = "dp0:pp0:pcp0:tp0:"


class RlRoutes:
    """Handlers by (method, path). A worker's failure is a 500 in vLLM's words."""

    def __init__(self, core: EngineCore, rl: RlState) -> None:
        self._core, self._rl = core, rl
        self.table = {
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("GET", "/is_paused"): self.is_paused,
            ("POST", "/init_weight_transfer_engine"): self.init,
            ("POST", "/start_weight_update"): self.start,
            ("POST", "/update_weights"): self.update,
            ("POST", "/finish_weight_update"): self.finish,
            ("POST", "/shutdown_weight_transfer_engine"): self.shutdown,
            ("GET", "/weight_info"): self.weight_info,
            ("GET", "/get_world_size"): self.world_size,
            ("POST", "/weight_checker"): self.weight_checker,
            ("POST", "/abort_requests"): self.abort,
            ("POST", "/reset_prefix_cache"): self.reset_prefix_cache,
            ("GET", "/grpo_lab/capabilities"): self.capabilities,
            ("POST", "/grpo_lab/score"): self.score,
            ("POST", "/grpo_lab/abandon_weight_update"): self.abandon,
        }

    async def pause(self, http: HttpRequest) -> Response:
        mode = choice(http.query_params.get("mode", "abort"), "query.mode", ("abort", "wait", "keep"))
        clear_cache = query_flag(http, "clear_cache", True)
        await self._core.pause(cast(PauseMode, mode), clear_cache, term_of(http))
        return answer({"status": "paused"})

    async def resume(self, http: HttpRequest) -> Response:
        await self._core.resume(term_of(http))
        return answer({"status": "resumed"})

    async def is_paused(self, http: HttpRequest) -> Response:
        self._core.check_alive()
        return answer({"is_paused": self._core.is_paused})

    async def init(self, http: HttpRequest) -> Response:
        info = (await read_body(http)).object("init_info")
        try:
            digest = await self._rl.init(info, term_of(http))
        except _REFUSED as error:
            raise worker_error(str(error)) from error
        response = answer({"message": "Weight transfer initialized"})
        response.headers[PLAN_HEADER] = digest  # not in the body, which is vLLM's own
        return response

    async def start(self, http: HttpRequest) -> Response:
        try:
            await self._rl.start(sync_of(http), term_of(http))
        except _REFUSED as error:
            raise worker_error(str(error)) from error
        return answer({"message": "Weight update started"})

    async def update(self, http: HttpRequest) -> Response:
        info = (await read_body(http)).object("update_info")
        try:
            await self._rl.update(info, sync_of(http), term_of(http))
        except _REFUSED as error:
            raise worker_error(str(error)) from error
        return answer({"message": "Weights updated"})

    async def finish(self, http: HttpRequest) -> Response:
        label = (await read_body(http, required=False)).text("weight_version", None)
        try:
            await self._rl.finish(label, sync_of(http), term_of(http))
        except _REFUSED as error:
            raise worker_error(str(error)) from error
        return answer({"message": "Weight update finished"})

    async def abandon(self, http: HttpRequest) -> Response:
        try:
            await self._rl.abandon(sync_of(http), term_of(http))
        except _REFUSED as error:
            raise worker_error(str(error)) from error
        return answer({"message": "Weight update abandoned"})

    async def shutdown(self, http: HttpRequest) -> Response:
        try:
            await self._rl.shutdown()
        except _REFUSED as error:
            raise worker_error(str(error)) from error
        return answer({"message": "Weight transfer shut down"})

    async def weight_info(self, http: HttpRequest) -> Response:
        self._core.check_alive()
        return answer({"weight_version": self._rl.weight_version})

    async def world_size(self, http: HttpRequest) -> Response:
        query_flag(http, "include_dp", True)
        return answer({"world_size": 1})

    async def weight_checker(self, http: HttpRequest) -> Response:
        fields = await read_body(http)
        action = choice(fields.text("action"), "body.action", ("checksum", "reset", "compare"))
        if action == "reset":
            raise ApiError(400, "action='reset' zeroes the weights; this engine does not offer it")
        baseline = fields.data.get("baseline")
        if action == "compare" and not isinstance(baseline, dict):
            raise ApiError(400, "action='compare' requires a 'baseline' object")
        checksums = await self._core.exclusively(self._checksums)
        if action == "checksum":
            return answer({"checksums": checksums})
        assert isinstance(baseline, dict)
        names = sorted(checksums.keys() | baseline.keys())
        mismatches = [name for name in names if checksums.get(name) != baseline.get(name)]
        return answer({"match": not mismatches, "mismatches": mismatches})

    def _checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter's float32 bytes, row-major."""
        parameters = self._core.policy.parameters()
        return {
            _CHECKSUM_PREFIX + name: hashlib.sha256(np.ascontiguousarray(tensor.numpy()).data).hexdigest()
            for name, tensor in sorted(parameters.items())
        }

    async def abort(self, http: HttpRequest) -> Response:
        if not await http.body():
            raise ApiError(400, "Invalid JSON format")
        fields = await _object_or_400(http)
        ids = fields.data.get("request_ids") or []
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise invalid("list_type", "body.request_ids", "Input should be a list of strings", ids)
        if not ids:
            return answer({"status": "aborted", "aborted": len(await self._core.abort_all())})
        await self._core.abort([name.removeprefix("generate-tokens-") for name in ids])
        return answer({"status": "aborted", "aborted": len(ids)})  # vLLM counts the ids given

    async def reset_prefix_cache(self, http: HttpRequest) -> Response:
        self._core.flush_prefix_cache()
        return answer({"success": True})

    async def capabilities(self, http: HttpRequest) -> Response:
        start_id = self._core.config.start_id
        known = {**dataclasses.asdict(CAPABILITIES), "seen_term": self._core.term, "start_id": start_id}
        return answer(known)

    async def score(self, http: HttpRequest) -> Response:
        fields = await read_body(http)
        sequences: Any = fields.data.get("sequences")
        if not isinstance(sequences, list) or not sequences:
            raise invalid(
                "list_type", "body.sequences", "Input should be a list of token id lists", sequences
            )
        rows = [Fields({"sequences": ids}).token_ids("sequences") for ids in sequences]
        return answer({"logprobs": await self._core.score(rows)})


async def _object_or_400(http: HttpRequest) -> Fields:
    try:
        return await read_body(http)
    except ApiError as error:
        not_object = error.param == "body"
        message = "Request body must be a JSON object" if not_object else "Invalid JSON format"
        raise ApiError(400, message) from error
