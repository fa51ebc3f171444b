"""The ``Engine`` port over HTTP: real vLLM, ``grpo-lab serve``, or an ASGI app in process.

Every status is read, every wait is bounded, and the three ways to fail are told apart: no connection
(``EngineUnreachable``), no answer in time (``EngineTimeout``), an answer that says no (``EngineRefused``,
with the server's own words).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from grpo_lab.errors import ConfigError, EngineError, EngineRefused, EngineTimeout, EngineUnreachable
from grpo_lab.ports import Recorder
from grpo_lab.transport.connections import KeepAliveTransport
from grpo_lab.transport.lab_wire import (
    ABANDON_PATH,
    CAPABILITIES_PATH,
    CAUSE_HEADER,
    KIND_HEADER,
    LEASE_HEADER,
    PLAN_HEADER,
    SCORE_PATH,
)
from grpo_lab.transport.vllm_features import OPENAPI_PATH, TOKEN_ROUTE, VllmFeatures, features_of
from grpo_lab.transport.vllm_wire import (
    UNSYNCED,
    error_words,
    sampling_json,
    sync_headers,
    term_header,
    typed_field,
    version_spans,
)
from grpo_lab.types import (
    Completion,
    EngineCapabilities,
    GenerateRequest,
    JsonDict,
    PauseMode,
    SyncId,
)

PROCESS_START = "process_start_time_seconds"
STOCK = EngineCapabilities()
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class HttpTimeouts:
    """Seconds. The protocol's own bounds are usually shorter; these hold where there is none.

    Attributes:
        connect_s: until a connection stands.
        answer_s: until a control call is answered.
        pause_s: until a pause is answered (``wait`` drains the running requests).
        transfer_s: until an update, a finish or a join is answered.
        generate_s: until a completion is there, pauses included.
        lease_s: until an engine with our plugin may take a trainer that paused it, and is silent, for dead;
            longer than any step between two calls.
    """

    connect_s: float = 5.0
    answer_s: float = 30.0
    pause_s: float = 300.0
    transfer_s: float = 300.0
    generate_s: float = 1800.0
    lease_s: float = 180.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not 0 < value < 86_400:
                raise ConfigError(item.name, value, "seconds above 0 and below 86,400")


class VllmHttpEngine:
    """One engine behind ``url``; implements ``grpo_lab.ports.Engine``.

    ``await discover()`` once before use: it reads the capabilities (a stock vLLM has none of the lab's
    routes) and the served model's name. With ``discover_on_use`` the first ``generate`` does it, for one
    that may not be there yet. ``transport`` replaces the network, e.g. by
    ``httpx.ASGITransport(app)``.
    """

    def __init__(
        self,
        name: str,
        url: str,
        recorder: Recorder,
        timeouts: HttpTimeouts | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        api_key: str | None = None,
        discover_on_use: bool = False,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("engine url", url, "http://host:port")
        self._name = name
        self._url = url.rstrip("/")
        self._recorder = recorder
        self._timeouts = timeouts or HttpTimeouts()
        self._capabilities = STOCK
        self._features = VllmFeatures()
        self._has_score_route = False
        self._seen_term = 0
        self._start_id = ""
        self._discovered = not discover_on_use
        self._model = ""
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        # It has no cap on connections: requests held by a pause must not block the resume behind them.
        self._client = httpx.AsyncClient(
            base_url=self._url, headers=headers, transport=transport or KeepAliveTransport(), trust_env=False
        )

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def seen_term(self) -> int:
        """The newest term that the engine had heard of at ``discover``; it refuses older ones."""
        return self._seen_term

    @property
    def model(self) -> str:
        """The served model's name, known after ``discover``."""
        return self._model

    async def discover(self) -> EngineCapabilities:
        """Reads what the engine can do. Raises as every call does."""
        models = await self._call("GET", "/v1/models")
        self._model = str(typed_field(models, "data", list)[0]["id"])
        try:
            known = await self._call("GET", CAPABILITIES_PATH)
        except EngineRefused as error:
            if error.status != _NOT_FOUND:
                raise
            self._features = features = await self._described()
            token_route = features.token_route
            self._capabilities = EngineCapabilities(
                token_versions=await self._has_token_route() if token_route is None else token_route
            )
            self._has_score_route = False
            self._start_id = await self._process_start()
        else:
            names = {item.name for item in dataclasses.fields(EngineCapabilities)}
            self._capabilities = EngineCapabilities(
                **{key: bool(value) for key, value in known.items() if key in names}
            )
            self._has_score_route = self._capabilities.score_while_paused
            self._seen_term = int(known.get("seen_term", 0))
            self._start_id = str(known.get("start_id", ""))
        self._discovered = True
        return self._capabilities

    async def start_id(self) -> str:
        """Discovers the engine anew: another process may have other abilities."""
        await self.discover()
        return self._start_id

    async def health(self) -> None:
        await self._send("GET", "/health", self._timeouts.answer_s)

    async def world_size(self) -> int:
        return int(typed_field(await self._call("GET", "/get_world_size"), "world_size", int))

    async def pause(self, mode: PauseMode, clear_cache: bool, term: int) -> None:
        query = self._features.pause_query(mode, clear_cache)
        headers = {LEASE_HEADER: f"{self._timeouts.lease_s:g}", **term_header(term)}
        await self._call("POST", "/pause", params=query, headers=headers, timeout_s=self._timeouts.pause_s)

    async def resume(self, term: int) -> None:
        await self._call("POST", "/resume", headers=term_header(term))

    async def is_paused(self) -> bool:
        return bool(typed_field(await self._call("GET", "/is_paused"), "is_paused", bool))

    async def init_transfer(self, info: JsonDict, term: int) -> str:
        path, limit_s = "/init_weight_transfer_engine", self._timeouts.transfer_s
        response = await self._send("POST", path, limit_s, {"init_info": info}, headers=term_header(term))
        return str(response.headers.get(PLAN_HEADER, ""))

    async def start_update(self, sync: SyncId) -> None:
        if self._features.four_phases:
            await self._call("POST", "/start_weight_update", headers=sync_headers(sync))

    async def update(self, sync: SyncId, info: JsonDict) -> None:
        await self._call(
            "POST",
            "/update_weights",
            {"update_info": info},
            headers=sync_headers(sync),
            timeout_s=self._timeouts.transfer_s,
        )

    async def finish_update(self, sync: SyncId) -> None:
        if not self._features.four_phases:  # the update itself has put the weights in force
            return
        await self._call(
            "POST",
            "/finish_weight_update",
            {"weight_version": str(sync)},
            headers=sync_headers(sync),
            timeout_s=self._timeouts.transfer_s,
        )

    async def abandon_update(self, sync: SyncId) -> None:
        await self._call("POST", ABANDON_PATH, {}, headers=sync_headers(sync))

    async def weight_info(self) -> str:
        return str(typed_field(await self._call("GET", "/weight_info"), "weight_version", str))

    async def checksums(self) -> dict[str, str]:
        body = await self._call("POST", "/weight_checker", {"action": "checksum"})
        return {str(key): str(value) for key, value in typed_field(body, "checksums", dict).items()}

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """By our own route, or as the logprobs of a prompt, which a paused vLLM does not answer."""
        if not self._has_score_route:
            return list(await asyncio.gather(*(self._prompt_logprobs(tuple(ids)) for ids in sequences)))
        body = {"sequences": [list(ids) for ids in sequences]}
        answer = await self._call("POST", SCORE_PATH, body, timeout_s=self._timeouts.transfer_s)
        return [[float(value) for value in row] for row in typed_field(answer, "logprobs", list)]

    async def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids:  # an empty list would abort everything
            await self._call("POST", "/abort_requests", {"request_ids": list(request_ids)})

    async def generate(self, request: GenerateRequest) -> Completion:
        """Token ids in and out. Where the engine does not report token versions, the spans are empty if its
        weight version moved meanwhile.
        """
        if not self._discovered:
            await self.discover()
        headers = {"x-request-id": request.request_id, KIND_HEADER: request.kind}
        headers |= term_header(request.term)
        with_versions = self._capabilities.token_versions
        sampling = sampling_json(request.sampling)
        if with_versions:
            path = TOKEN_ROUTE
            body: JsonDict = {"token_ids": list(request.prompt_token_ids), "sampling_params": sampling}
        else:
            path = "/v1/completions"
            body = {"prompt": list(request.prompt_token_ids), "return_token_ids": True, **sampling}
        if self._model:
            body["model"] = self._model
        before = "" if with_versions else await self._version_or_none()
        answer = await self._call("POST", path, body, headers=headers, timeout_s=self._timeouts.generate_s)
        try:
            completion = self._completion(request.request_id, answer["choices"][0], with_versions)
            if before and before == await self._version_or_none():  # it moves only while nothing is decoded
                whole = {"version": before, "start": 0, "end": len(completion.token_ids)}
                spans = version_spans([whole])
                return dataclasses.replace(completion, spans=spans, version_source="pause_windows")
            return completion
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._name} answered {path} in another form: {error!r} in {str(answer)[:300]}"
            ) from error

    def _completion(self, request_id: str, choice: JsonDict, with_versions: bool) -> Completion:
        tokens = tuple(int(token) for token in choice["token_ids"] or ())
        logprobs = choice["logprobs"] or {}
        if with_versions:
            values = tuple(float(item["logprob"]) for item in logprobs.get("content") or ())
        else:
            values = tuple(float(value) for value in logprobs.get("token_logprobs") or ())
        reason = choice["finish_reason"]
        if reason not in ("stop", "length", "abort"):
            raise ValueError(f"finish_reason={reason!r}")
        if len(values) != len(tokens):
            raise ValueError(f"{len(values)} logprobs for {len(tokens)} tokens")
        spans = version_spans(choice.get("weight_versions") or ())
        return Completion(request_id, tokens, values, reason, spans, self._name)

    async def close(self) -> None:
        await self._client.aclose()

    # --- inside ---------------------------------------------------------------------------------------

    async def _process_start(self) -> str:
        """Unix seconds, from the metrics that Prometheus' Python client gives of its process; "" without."""
        try:
            response = await self._send("GET", "/metrics", self._timeouts.answer_s)
        except EngineRefused:
            return ""
        lines = response.text.splitlines()
        return next((line.split()[1] for line in lines if line.startswith(f"{PROCESS_START} ")), "")

    async def _version_or_none(self) -> str:
        """The weight version, "" where it cannot be had or is not one of ours."""
        try:
            label = await self.weight_info()
            return label if label == UNSYNCED else str(SyncId.parse(label))
        except (EngineError, ValueError):
            return ""

    async def _described(self) -> VllmFeatures:
        try:
            return features_of(await self._call("GET", OPENAPI_PATH))
        except EngineRefused:
            return VllmFeatures()

    async def _prompt_logprobs(self, ids: tuple[int, ...]) -> list[float]:
        body: JsonDict = {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        if self._model:
            body["model"] = self._model
        headers = {KIND_HEADER: "canary"}
        limit_s = self._timeouts.transfer_s
        answer = await self._call("POST", "/v1/completions", body, headers=headers, timeout_s=limit_s)
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            return [float(rows[i][str(ids[i])]["logprob"]) for i in range(1, len(ids))]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._name} gave no logprobs of a prompt: {error!r} in {str(answer)[:300]}"
            ) from error

    async def _has_token_route(self) -> bool:
        """An empty body is a 400 where the route exists."""
        try:
            await self._call("POST", TOKEN_ROUTE, {})
        except EngineRefused as error:
            return error.status != _NOT_FOUND
        return True

    async def _call(
        self,
        method: str,
        path: str,
        body: JsonDict | None = None,
        *,
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> JsonDict:
        limit_s = timeout_s or self._timeouts.answer_s
        response = await self._send(method, path, limit_s, body, params, headers)
        try:
            data = response.json()
        except ValueError as error:
            raise EngineError(
                f"{self._name} answered {path} without JSON: {response.text[:200]!r}"
            ) from error
        if not isinstance(data, dict):
            raise EngineError(f"{self._name} answered {path} with {str(data)[:200]!r}, not an object")
        return data

    async def _send(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: JsonDict | None = None,
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        sent = {CAUSE_HEADER: self._recorder.last_id, **(headers or {})}
        timeout = httpx.Timeout(timeout_s, connect=min(self._timeouts.connect_s, timeout_s))
        where = f"{method} {path} of {self._name} ({self._url})"
        try:
            response = await self._client.request(
                method, path, json=body, params=params, headers=sent, timeout=timeout
            )
        except httpx.ConnectTimeout as error:
            raise EngineUnreachable(f"{where}: no connection within {timeout.connect:g} s") from error
        except httpx.TimeoutException as error:
            raise EngineTimeout(f"{where}: no answer within {timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise EngineUnreachable(f"{where}: {error or type(error).__name__}") from error
        self._observe(response)
        if not response.is_success:
            message = f"{where}: HTTP {response.status_code}: {error_words(response)}"
            raise EngineRefused(message, response.status_code, response.text)
        return response

    def _observe(self, response: httpx.Response) -> None:
        try:
            self._recorder.observe(response.headers.get(CAUSE_HEADER, ""))
        except ValueError:
            return  # no event id: not one of our engines
