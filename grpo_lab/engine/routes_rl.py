"""vLLM's RL routes (pause, resume, weight updates) and grpo_lab's own additions to them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from grpo_lab.engine import layers
from grpo_lab.engine.context import Context
from grpo_lab.engine.failures import EngineDead, StaleTerm, UpdateError, WorkerKilled
from grpo_lab.engine.generation import DEAD
from grpo_lab.engine.metrics import Metrics
from grpo_lab.engine.routes_tokens import PREFIX
from grpo_lab.engine.updates import Updates
from grpo_lab.engine.wire import (
    PLAN_HEADER,
    ApiError,
    Fields,
    answer,
    choice,
    flat_error,
    invalid,
    invalid_union,
    query_flag,
    read_body,
    refused,
    sync_of,
    term_of,
    worker_error,
)
from grpo_lab.errors import HandshakeError, PackingError, TransportError
from grpo_lab.types import EngineCapabilities, PauseMode, SyncId

T = TypeVar("T")
CAPABILITIES = EngineCapabilities(
    staged=True, hashes=True, token_versions=True, term_fencing=True, score_while_paused=True, events=True
)
_REFUSED = (UpdateError, HandshakeError, PackingError, TransportError, WorkerKilled)
# What a broken body of a tensor, a name or a receiving end raises while a stock update is loaded.
_WORKER = (*_REFUSED, ValueError, TypeError, AttributeError, RuntimeError, LookupError)
# vLLM waits so long at the end of a pause, for outputs that are under way (async_llm.pause_generation).
PAUSE_TAIL_S = 0.02


class RlRoutes:
    """Handlers by (method, path). A worker's failure is a 500 in vLLM's words.

    A faithful engine reads none of our headers and has none of our routes; its calls wait for the engine, as
    vLLM's do, which is why some of them hang while an update is received.
    """

    def __init__(self, context: Context, updates: Updates, metrics: Metrics) -> None:
        self._context, self._core, self._updates = context, context.core, updates
        self._metrics = metrics
        self._faithful = context.faithful
        self.table = {
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("GET", "/is_paused"): self.is_paused,
            ("POST", "/init_weight_transfer_engine"): self.init,
            ("POST", "/start_weight_update"): self.start,
            ("POST", "/start_draft_weight_update"): self.start_draft,
            ("POST", "/update_weights"): self.update,
            ("POST", "/finish_weight_update"): self.finish,
            ("POST", "/shutdown_weight_transfer_engine"): self.shutdown,
            ("POST", "/update_weight_version"): self.set_version,
            ("GET", "/weight_info"): self.weight_info,
            ("GET", "/get_world_size"): self.world_size,
            ("POST", "/weight_checker"): self.weight_checker,
            ("POST", "/abort_requests"): self.abort,
        }
        if not self._faithful:
            self.table |= {
                ("GET", "/grpo_lab/capabilities"): self.capabilities,
                ("POST", "/grpo_lab/score"): self.score,
                ("POST", "/grpo_lab/abandon_weight_update"): self.abandon,
            }

    # --- pauses ---------------------------------------------------------------------------------------

    async def pause(self, http: HttpRequest) -> Response:
        mode = choice(http.query_params.get("mode", "abort"), "query.mode", ("abort", "wait", "keep"))
        clear_cache = query_flag(http, "clear_cache", True)
        try:
            await self._core.pause(cast(PauseMode, mode), clear_cache, self._term(http))
        except EngineDead as error:
            return flat_error(f"Failed to pause generation: {self._words(error)}")
        if self._faithful:
            await asyncio.sleep(PAUSE_TAIL_S)
        return answer({"status": "paused"})

    async def resume(self, http: HttpRequest) -> Response:
        term = self._term(http)
        try:
            await self._for_the_engine()
            await self._core.resume(term)
        except EngineDead as error:
            return flat_error(f"Failed to resume generation: {self._words(error)}")
        return answer({"status": "resumed"})

    async def is_paused(self, http: HttpRequest) -> Response:
        try:
            await self._for_the_engine()
            self._core.check_alive()
        except EngineDead as error:
            return flat_error(f"Failed to fetch pause status: {self._words(error)}")
        return answer({"is_paused": self._core.is_paused})

    async def _for_the_engine(self) -> None:
        """vLLM's engine takes one call at a time: this one waits while weights are received."""
        if self._faithful and self._updates.receiving:
            async with self._core.held():
                pass

    # --- weight updates -------------------------------------------------------------------------------

    async def init(self, http: HttpRequest) -> Response:
        info = (await read_body(http)).object("init_info")
        digest = await self._call("init", self._updates.init(info, self._term(http)))
        response = answer({"message": "Weight transfer initialized"})
        if digest:
            response.headers[PLAN_HEADER] = digest  # not in the body, which is vLLM's own
        return response

    async def start(self, http: HttpRequest) -> Response:
        await self._call("start", self._updates.start(self._sync(http), self._term(http)))
        return answer({"message": "Weight update started"})

    async def start_draft(self, http: HttpRequest) -> Response:
        await self._call("start_draft", self._updates.start_draft())
        return answer({"message": "Draft weight update started"})

    async def update(self, http: HttpRequest) -> Response:
        info = _update_info(await read_body(http))
        await self._call("update", self._updates.update(info, self._sync(http), self._term(http)))
        return answer({"message": "Weights updated"})

    async def finish(self, http: HttpRequest) -> Response:
        label = (await read_body(http, required=False)).text("weight_version", None)
        await self._call("finish", self._updates.finish(label, self._sync(http), self._term(http)))
        return answer({"message": "Weight update finished"})

    async def abandon(self, http: HttpRequest) -> Response:
        await self._call("abandon", self._updates.abandon(self._sync(http), self._term(http)))
        return answer({"message": "Weight update abandoned"})

    async def shutdown(self, http: HttpRequest) -> Response:
        await self._call("shutdown", self._updates.shutdown())
        return answer({"message": "Weight transfer shut down"})

    async def _call(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Awaits a worker's call; its failure is a 500 that says what vLLM's would."""
        with self._metrics.operation(name, asyncio.get_running_loop().time):
            try:
                self._core.check_alive()
                return await work
            except WorkerKilled as error:
                raise ApiError(500, "Call to collective_rpc method failed: cancelled") from error
            except (EngineDead, StaleTerm):
                raise
            except _WORKER as error:
                raise worker_error(str(error)) from error
            finally:
                work.close()

    async def set_version(self, http: HttpRequest) -> Response:
        version = (await read_body(http)).text("new_version")
        self._core.check_alive()
        if not self._faithful:
            message = "the version moves with the weights alone: give it to finish_weight_update"
            raise refused(message, "new_version", version)
        self._core.identity = dataclasses.replace(self._core.identity, label=version)
        return answer({"success": True, "new_version": version})

    async def weight_info(self, http: HttpRequest) -> Response:
        await self._for_the_engine()
        self._core.check_alive()
        return answer({"weight_version": self._core.identity.label})

    async def world_size(self, http: HttpRequest) -> Response:
        query_flag(http, "include_dp", True)
        return answer({"world_size": self._core.config.ranks})

    # --- checks ---------------------------------------------------------------------------------------

    async def weight_checker(self, http: HttpRequest) -> Response:
        fields = await read_body(http)
        action = choice(fields.text("action"), "body.action", ("checksum", "reset", "compare"))
        baseline = fields.object("baseline", {}) if fields.data.get("baseline") is not None else None
        if action == "reset":
            return await self._reset()
        if action == "compare" and baseline is None:
            raise ApiError(400, "action='compare' requires a 'baseline' object")
        self._core.check_alive()
        if self._updates.weights_on_meta:
            raise ApiError(
                500,
                "Call to compute_weight_checksums method failed: Worker failed with error 'Cannot copy out "
                "of meta tensor; no data!', please check the stack trace above for the root cause",
            )
        parameters = self._core.policy.parameters
        checksums = await self._core.exclusively(lambda: layers.checksums(parameters(), blind=self._faithful))
        if action == "checksum":
            return answer({"checksums": checksums})
        assert baseline is not None
        names = sorted(checksums.keys() | baseline.keys())
        mismatches = [name for name in names if checksums.get(name) != baseline.get(name)]
        return answer({"match": not mismatches, "mismatches": mismatches})

    async def _reset(self) -> Response:
        if not self._faithful:
            raise refused("action='reset' zeroes the weights that are served; this engine does not offer it")
        await self._core.exclusively(lambda: layers.reset(self._core.policy.parameters()))
        return answer({"status": "reset"})

    # --- requests -------------------------------------------------------------------------------------

    async def abort(self, http: HttpRequest) -> Response:
        if not await http.body():
            raise ApiError(400, "Invalid JSON format")
        fields = await _object_or_400(http)
        ids = fields.data.get("request_ids") or []
        if isinstance(ids, str):
            ids = list(ids)  # vLLM iterates whatever it is given
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise invalid("list_type", "body.request_ids", "Input should be a list of strings", ids)
        try:
            if not ids:
                return answer({"status": "aborted", "aborted": len(await self._core.abort_all())})
            await self._core.abort(self._internal_ids(ids))
        except EngineDead as error:
            return flat_error(f"Failed to abort requests: {self._words(error)}")
        return answer({"status": "aborted", "aborted": len(ids)})  # vLLM counts the ids given

    def _internal_ids(self, ids: Sequence[str]) -> list[str]:
        """Ids as clients know them: several samples of a prompt go by its one id, and what the token route
        calls ``generate-tokens-X`` is X here. (Strict: X alone will do.)
        """
        names: list[str] = []
        for name in ids:
            if name.startswith(PREFIX):
                names.append(name.removeprefix(PREFIX))
            elif not self._faithful or "cmpl-" in name:
                names.append(name)
        return [
            request.request_id
            for request in self._core.live()
            if request.request_id in names or request.request_id.partition("_")[2] in names
        ]

    # --- our own --------------------------------------------------------------------------------------

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

    def _term(self, http: HttpRequest) -> int:
        return 0 if self._faithful else term_of(http)

    def _sync(self, http: HttpRequest) -> SyncId | None:
        return None if self._faithful else sync_of(http)

    def _words(self, error: EngineDead) -> str:
        return DEAD if self._faithful else str(error)


def _update_info(body: Fields) -> Any:
    """A dictionary, or a list of one per rank."""
    info = body.data.get("update_info")
    if info is None:
        raise invalid("missing", "body.update_info", "Field required", None)
    if isinstance(info, dict) or (isinstance(info, list) and all(isinstance(item, dict) for item in info)):
        return info
    raise invalid_union(
        "body.update_info",
        (("dict_type", "Input should be a valid dictionary"), ("list_type", "Input should be a valid list")),
        info,
    )


async def _object_or_400(http: HttpRequest) -> Fields:
    try:
        return await read_body(http)
    except ApiError as error:
        not_object = error.param == "body"
        message = "Request body must be a JSON object" if not_object else "Invalid JSON format"
        raise ApiError(400, message) from error
