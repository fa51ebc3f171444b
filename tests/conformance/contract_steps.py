"""Plays a row: each step is a mapping whose first known key says what is done, the others what is expected.

Calls
    call: "METHOD /path" with ``json`` or ``raw``, ``headers``; see ``contract_checks.check``. ``as`` sends
    it in the background; returned: waits for it, with the same checks; pending: it has not returned.
Generations, by name
    generate: begins one (``route``, ``stream``, ``tokens``, ``prompt``, ``logprobs``, ``json``, ``id``).
    tokens: waits until it has ``at_least`` tokens. frozen: none comes for ``for_s``. unanswered: not even a
    status. headed: a status, no data. gone: hangs up. ended: waits for the end, checked by
    ``contract_checks.check_end``. same: they have the same tokens.
Metrics
    requests: waits until so many are ``running`` and ``waiting``. mark, metric: what a counter ``rises`` by.
Weights
    join, send: our transfer, with a ``fault``. sync: a whole good update (``label``). stock_join, stock: in
    vLLM's own form, ``change`` and ``fault`` say how it is spoiled. serves: the engine's logprobs are those
    of the set ("other": of none; "garbage": or they are NaN). stays: so are a generation's (``from_frozen``:
    of the tokens after it was frozen). version: what /weight_info says. checksums, checksums_equal,
    checksums_differ.
Ends
    dead: health is 503, or gone, within a bound. exits: the process ends with this code. sleep: seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import httpx
from contract_checks import check, check_end, largest_gap, metric_of
from contract_client import WAIT_S, Generation, generation_body
from contract_engines import Target
from contract_rows import Row
from contract_stock import UNSENT, stock_update, stock_wire
from contract_weights import MAX_MODEL_LEN, PROMPT, TOLERANCE, packed

from grpo_lab.errors import GrpoLabError
from grpo_lab.types import SyncId

Step = Mapping[str, Any]
POLL_S = 0.05
# A generation that goes on for a while, or for longer than anybody waits: a client that is short of processor
# time must still be able to pause it in time. In virtual time nobody is, and short ones will do.
LENGTHS = {
    "sim": {"long": 150, "endless": 400},
    "sim-http": {"long": 1500, "endless": 8000},
    "vllm": {"long": 3000, "endless": 16000},
}
STRETCHES = (1, 3, 5)  # of "long", for a row whose generation had ended before it could be paused
PREFIX_TOKENS = 140
NOT_A_NUMBER = "Out of range float values are not JSON compliant"
# A vLLM that has served NaN weights goes on to answer NaN for a few requests: it is left in reused KV blocks.
HEALING_REQUESTS = 40
_EXPECTED = ("status", "body", "has", "message", "text", "absent")


class TooLate(AssertionError):
    """What failed may have failed because a generation, or a server that dies, had ended before its turn."""


class Player:
    """One row on one engine. ``play`` raises ``AssertionError`` naming the step."""

    def __init__(self, target: Target, numbers: Iterator[int], stretch: int = 1) -> None:
        self.target = target
        lengths = LENGTHS[target.kind]
        self._lengths = {**lengths, "long": stretch * lengths["long"]}
        longest = MAX_MODEL_LEN[target.kind]
        self._prompts = {"$long": longest - 4, "$too_long": longest + 4, "$prefix": PREFIX_TOKENS}
        self.http = target.http
        self.generations: dict[str, Generation] = {}
        self._calls: dict[str, asyncio.Task[httpx.Response]] = {}
        self._sums: dict[str, dict[str, str]] = {}
        self._marks: dict[str, float] = {}
        self._frozen_at: dict[str, int] = {}
        self._numbers = numbers
        self._sync = self._last = SyncId(1, next(numbers), 1)
        self._joined = False

    async def play(self, row: Row) -> None:
        for number, written in enumerate(row.steps, 1):
            step = {key: self._length(key, value) for key, value in written.items()}
            name = next(key for key in step if key in _ACTIONS)
            try:
                await _ACTIONS[name](self, step)
            except AssertionError as error:
                problem = TooLate if self._may_be_too_late() else AssertionError
                raise problem(f"{row.id}, step {number} {dict(step)}:\n{error}") from None
            except (httpx.ConnectError, httpx.ReadError) as error:
                if row.server != "doomed":
                    raise
                # It answers for some seconds after its engine's death, up to 5 for a vLLM.
                raise TooLate(f"{row.id}, step {number} {dict(step)}: it has gone: {error}") from error
            except Exception as error:
                error.add_note(f"{row.id}, step {number} {dict(step)}")
                raise

    def _may_be_too_late(self) -> bool:
        least = min(self._lengths.values())
        runs = self.generations.values()
        return any(run.finish_reason == "length" and len(run.token_ids) >= least for run in runs)

    def _length(self, key: str, value: Any) -> Any:
        return self._lengths.get(value, value) if key in ("tokens", "count", "below") else value

    async def restore(self) -> None:
        """Brings a server that other rows use back to w0: nothing in flight, no session, not paused."""
        await self.http.post("/abort_requests", json={})
        await self.http.post("/pause?mode=abort")
        await self._join({})
        started = await self.http.post("/start_weight_update")
        assert started.status_code == 200 or "already active" in started.text, started.text
        await self._send({"send": "w0"})
        check({}, await self.http.post("/finish_weight_update", json={"weight_version": str(self._sync)}))
        self._advance()
        await self.http.post("/update_weight_version", json={"new_version": "default"})
        await self._resume_all()

    async def restore_stock(self) -> None:
        """The same on a server with the stock backend."""
        await self.http.post("/abort_requests", json={})
        await self.http.post("/pause?mode=abort")
        await self._stock_join({})
        started = await self.http.post("/start_weight_update")
        assert started.status_code == 200 or "already active" in started.text, started.text
        await self._stock({"stock": "w0"})
        check({}, await self.http.post("/finish_weight_update", json={"weight_version": "default"}))
        await self._resume_all()
        for _ in range(HEALING_REQUESTS):
            if (await self._asked()).status == 200:
                return
        raise AssertionError(f"NaN is still there after {HEALING_REQUESTS} requests on good weights")

    async def _resume_all(self) -> None:
        check({}, await self.http.post("/resume"))

    async def settle(self) -> None:
        """Ends what a row left in flight."""
        await self.http.post("/abort_requests", json={})
        await self.http.post("/resume")

    async def close(self) -> None:
        tasks = [*self._calls.values(), *(g.task for g in self.generations.values() if g.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- calls ------------------------------------------------------------------------------------------

    async def _call(self, step: Step) -> None:
        method, path = step["call"].split(" ", 1)
        headers = dict(step.get("headers", {}))
        content = self._named(json.dumps(step["json"])) if "json" in step else step.get("raw")
        if content is not None:
            headers.setdefault("content-type", "application/json")
        request = self.http.request(method, path, content=content, headers=headers)
        if "as" in step:
            self._calls[step["as"]] = asyncio.get_running_loop().create_task(request)
            await asyncio.sleep(0)
            return
        check(step, await request)
        if path == "/finish_weight_update" and step.get("status", 200) == 200:
            self._advance()

    def _named(self, text: str) -> str:
        """``$next`` is the identity of the sync at hand, ``$sync`` that of the last one that was finished."""
        for name, length in self._prompts.items():
            text = text.replace(f'"{name}"', json.dumps([3 + index * index % 17 for index in range(length)]))
        return text.replace("$next", str(self._sync)).replace("$sync", str(self._last))

    async def _returned(self, step: Step) -> None:
        async with asyncio.timeout(WAIT_S):
            check(step, await self._calls.pop(step["returned"]))

    async def _pending(self, step: Step) -> None:
        await asyncio.sleep(step.get("for_s", 0.2))
        assert not self._calls[step["pending"]].done(), "the call has returned"

    async def _version(self, step: Step) -> None:
        found = (await self._json("GET", "/weight_info"))["weight_version"]
        wanted = self._named(step["version"])
        assert found == wanted, f"/weight_info says {found!r}, not {wanted!r}"

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        response = await self.http.request(method, path, json=body)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text[:500]}"
        return response.json()

    # --- generations ------------------------------------------------------------------------------------

    async def _generate(self, step: Step) -> None:
        route, stream = step.get("route", "completions"), step.get("stream", False)
        prompt = list(step.get("prompt", PROMPT))
        more = dict(step.get("json", {}))
        if stream and route == "completions" and not step.get("logprobs"):
            more.setdefault("logprobs", "-")
        body = generation_body(route, prompt, step.get("tokens", 16), stream, more)
        headers = {"x-request-id": step["id"]} if "id" in step else {}
        generation = Generation(route, stream)
        self.generations[step["generate"]] = generation
        generation.task = asyncio.get_running_loop().create_task(generation.run(self.http, body, headers))
        await asyncio.sleep(0)

    async def _tokens(self, step: Step) -> None:
        generation = self.generations[step["tokens"]]
        least = step["at_least"]
        await generation.wait_until(lambda: len(generation.token_ids) >= least, f"{least} tokens")

    async def _frozen(self, step: Step) -> None:
        """What was on its way when the pause was answered may still come in; then nothing for ``for_s``."""
        generation = self.generations[step["frozen"]]
        before = -1
        async with asyncio.timeout(WAIT_S):
            while before != len(generation.token_ids):
                before = len(generation.token_ids)
                await asyncio.sleep(step.get("for_s", 0.5))
        assert not generation.ended, f"it ended: {generation.finish_reason} after {before} tokens"
        self._frozen_at[step["frozen"]] = before

    async def _unanswered(self, step: Step) -> None:
        generation = self.generations[step["unanswered"]]
        await asyncio.sleep(step.get("for_s", 0.5))
        assert generation.status == 0, f"answered {generation.status}"

    async def _headed(self, step: Step) -> None:
        generation = self.generations[step["headed"]]
        await generation.wait_until(lambda: generation.status != 0, "its status")
        await asyncio.sleep(step.get("for_s", 0.5))
        assert generation.status == 200
        assert not generation.chunks, f"data came: {generation.chunks[0]}"

    async def _gone(self, step: Step) -> None:
        task = self.generations[step["gone"]].task
        assert task is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _ended(self, step: Step) -> None:
        generation = self.generations[step["ended"]]
        await generation.wait_ended()
        check_end(step, generation, str(self._last))

    async def _same(self, step: Step) -> None:
        first, *others = (self.generations[name].token_ids for name in step["same"])
        assert first
        assert all(ids == first for ids in others), f"tokens differ: {first[:20]} and {others[0][:20]}"

    async def _requests(self, step: Step) -> None:
        wanted = (step.get("running", 0), step.get("waiting", 0))
        found = (-1, -1)
        for _ in range(int(WAIT_S / POLL_S)):
            text = (await self.http.get("/metrics")).text
            found = (
                int(metric_of(text, "num_requests_running")),
                int(metric_of(text, "num_requests_waiting")),
            )
            if found == wanted or ("running_at_least" in step and found[0] >= step["running_at_least"]):
                return
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"running and waiting are {found}, not {wanted}")

    async def _mark(self, step: Step) -> None:
        self._marks[step["mark"]] = metric_of((await self.http.get("/metrics")).text, step["mark"])

    async def _metric(self, step: Step) -> None:
        name = step["metric"]
        value = metric_of((await self.http.get("/metrics")).text, name)
        rise = value - self._marks.get(name, 0.0)
        assert rise == step["rises"], f"{name} rose by {rise}, not {step['rises']}"

    # --- weights ----------------------------------------------------------------------------------------

    async def _join(self, step: Step) -> None:
        await self.target.transport.open(["engine-0"], self.target.model.plan().to_json())
        info = {**self.target.transport.init_info("engine-0"), **step.get("info", {})}
        fault = step.get("fault", "")
        if fault == "renamed":
            plan = self.target.model.renamed_plan()
            info.update(plan=plan.to_json(), plan_digest=plan.digest())
        elif fault == "unknown field":
            info["bogus"] = 1
        response = await self.http.post("/init_weight_transfer_engine", json={"init_info": info})
        check(step, response)
        if response.status_code == 200:
            await self.target.transport.accept()
            self._joined = True

    async def _send(self, step: Step) -> None:
        """The update's call and the sender side by side, as a trainer does it."""
        transport, model = self.target.transport, self.target.model
        info = {**transport.update_info(self._sync), **step.get("info", {})}
        call = self._background("/update_weights", {"update_info": info})
        buckets = packed(
            model.tensors(step["send"]), model.plan(), transport.ring, step.get("fault", ""), _until(call)
        )
        try:
            await transport.send(self._sync, buckets)
        except GrpoLabError:
            self._joined = False  # a failed send closes the transport
        check(step, await call)

    async def _sync_all(self, step: Step) -> None:
        if not self._joined:
            await self._join({})
        check({}, await self.http.post("/start_weight_update"))
        await self._send({"send": step["sync"]})
        label = step.get("label", str(self._sync))
        check({}, await self.http.post("/finish_weight_update", json={"weight_version": label}))
        self._advance()

    def _advance(self) -> None:
        self._last, self._sync = self._sync, SyncId(1, next(self._numbers), 1)

    async def _serves(self, step: Step) -> None:
        generation = await self._asked()
        if step["serves"] == "garbage" and generation.status == 400:
            assert NOT_A_NUMBER in generation.text, generation.text[:500]
            return
        assert generation.status == 200, generation.text[:500]
        self._compare(generation, step["serves"], 0)

    async def _asked(self) -> Generation:
        generation = Generation("completions", False)
        more: dict[str, Any] = {}
        body = generation_body("completions", list(PROMPT), 12, False, more)
        async with asyncio.timeout(WAIT_S):
            await generation.run(self.http, body, {})
        return generation

    async def _stays(self, step: Step) -> None:
        name = step["stays"]
        start = self._frozen_at[name] if step.get("from_frozen") else 0
        self._compare(self.generations[name], step["weights"], start)

    def _compare(self, generation: Generation, wanted: str, start: int) -> None:
        model = self.target.model
        ids = [*PROMPT, *generation.token_ids]
        gaps = {
            name: largest_gap(model.logprobs(name, ids), generation.logprobs, start) for name in model.sets
        }
        fits = [name for name, gap in gaps.items() if gap <= TOLERANCE]
        expected = [] if wanted in ("other", "garbage") else [wanted]
        assert fits == expected, f"logprob gaps are {gaps}: the weights are {fits or 'none of ours'}"

    async def _checksums(self, step: Step) -> None:
        answer = await self._json("POST", "/weight_checker", {"action": "checksum"})
        self._sums[step["checksums"]] = answer["checksums"]

    async def _checksums_equal(self, step: Step) -> None:
        first, second = (self._sums[name] for name in step["checksums_equal"])
        assert first
        assert first == second, f"differ: {[key for key in first if first[key] != second.get(key)]}"

    async def _checksums_differ(self, step: Step) -> None:
        first, second = (self._sums[name] for name in step["checksums_differ"])
        assert first.keys() == second.keys()
        assert first != second, "they are all the same"

    async def _stock_join(self, step: Step) -> None:
        """As ``join``, in vLLM's own form. ``info`` changes the init info, ``trainer`` what this end does."""
        trainer = self.target.trainer
        info = await trainer.prepare(step.get("trainer", {}), **step.get("info", {}))
        call = self._background("/init_weight_transfer_engine", {"init_info": info})
        if "as" in step:  # nobody waits for the engine
            self._calls[step["as"]] = call
            return
        if step.get("status", 200) == 200:
            await trainer.join()
        check(step, await call)

    async def _stock(self, step: Step) -> None:
        """``change`` spoils what is announced and sent, ``fault`` the sending; ``listed``: an info a rank."""
        change = step.get("change", "whole")
        wire = stock_wire(self.target.model, step["stock"], change)
        info = stock_update(wire, change)
        body = {"update_info": [info] * step["listed"] if "listed" in step else info}
        call = self._background("/update_weights", body)
        if change not in UNSENT and not step.get("unsent"):
            await self.target.trainer.send(wire, step.get("fault", ""))
        if "as" in step:
            self._calls[step["as"]] = call
            return
        check(step, await call)

    def _background(self, path: str, body: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.get_running_loop().create_task(self.http.post(path, json=body))

    # --- deaths -----------------------------------------------------------------------------------------

    async def _dead(self, step: Step) -> None:
        """503, or nobody listens any more: the API process ends a few seconds after the engine."""
        status: object = None
        for _ in range(int(WAIT_S / POLL_S)):
            try:
                status = (await self.http.get("/health")).status_code
            except httpx.TransportError:
                return
            if status == 503:
                return
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"/health says {status!r}")

    async def _exits(self, step: Step) -> None:
        server = self.target.server
        assert server is not None
        code = await asyncio.to_thread(server.wait, WAIT_S)
        assert code == step["exits"], f"exit code {code}"

    async def _sleep(self, step: Step) -> None:
        await asyncio.sleep(step["sleep"])


_ACTIONS: dict[str, Callable[[Player, Step], Awaitable[None]]] = {
    "call": Player._call,
    "returned": Player._returned,
    "pending": Player._pending,
    "version": Player._version,
    "generate": Player._generate,
    "tokens": Player._tokens,
    "frozen": Player._frozen,
    "unanswered": Player._unanswered,
    "headed": Player._headed,
    "gone": Player._gone,
    "ended": Player._ended,
    "same": Player._same,
    "requests": Player._requests,
    "mark": Player._mark,
    "metric": Player._metric,
    "join": Player._join,
    "send": Player._send,
    "sync": Player._sync_all,
    "serves": Player._serves,
    "stays": Player._stays,
    "checksums": Player._checksums,
    "checksums_equal": Player._checksums_equal,
    "checksums_differ": Player._checksums_differ,
    "stock_join": Player._stock_join,
    "stock": Player._stock,
    "dead": Player._dead,
    "exits": Player._exits,
    "sleep": Player._sleep,
}


async def _until(call: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Yields when the call has returned: a sender that hangs for as long as the engine waits for it."""
    await asyncio.wait({call})
    yield
