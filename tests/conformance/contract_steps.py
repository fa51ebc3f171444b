"""Plays a row: each step is a mapping whose first known key says what is done, the others what is expected.

==============  ==================================================================================================
step            does, and checks
==============  ==================================================================================================
call            "METHOD /path": ``json`` or ``raw`` body, ``headers``; checks ``status`` (200), ``body`` (exact
                JSON), ``has`` (a part of it), ``message`` (a pattern, in the error's text), ``text`` (a pattern,
                in the body), ``absent`` (a pattern that must not be there). ``as`` sends it in the background.
returned        waits for a background call, with the same checks;  ``pending``: it has not returned
generate        begins a generation by name: ``route``, ``stream``, ``tokens``, ``prompt``, ``json``, ``id``
tokens          waits until a stream has ``at_least`` tokens
frozen          no token comes for ``for_s``;  ``unanswered``: not even a status;  ``headed``: a status, no data
ended           waits for the end: ``status``, ``finish_reason``, ``count``, ``below``, ``at_least``, ``usage``,
                ``done``, ``has``, ``message``, ``error_event``, ``last_chunk``, ``weight_versions``
gone            cancels a generation, as a client that hangs up
same            the generations have the same tokens;  ``differ``: they have not
requests        waits until /metrics shows ``running`` and ``waiting`` requests
metric          the rise of a counter since ``mark`` is ``rises``
join, send      hands out the init info (``fault``), sends a set of weights (``weights``, ``fault``), checks ``status``
stock_join      joins in vLLM's own form;  ``stock``: an update in it, ``change`` says how it is spoiled
sync            a whole good update to a set: start, send, finish (``label``)
serves          the engine's logprobs are those of the set of weights (or of ``other``: of none)
stays           a generation's logprobs are those of a set; ``from_frozen``: of the tokens after it was frozen
version         /weight_info says so
checksums       keeps them under a name;  ``checksums_equal`` / ``checksums_differ``: compares two
dead            health is 503 within a bound;  ``exits``: the process ends with this code
==============  ==================================================================================================
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import httpx
from contract_client import WAIT_S, Generation, generation_body
from contract_engines import Target
from contract_rows import Row
from contract_stock import UNSENT, stock_update, stock_wire
from contract_weights import PROMPT, TOLERANCE, packed

from grpo_lab.errors import GrpoLabError
from grpo_lab.types import SyncId

Step = Mapping[str, Any]
POLL_S = 0.05
PROMPTS = {"$long": 1020, "$too_long": 1030, "$prefix": 140}
_EXPECTED = ("status", "body", "has", "message", "text", "absent")


class Player:
    """One row on one engine. ``play`` raises ``AssertionError`` naming the step."""

    def __init__(self, target: Target, numbers: Iterator[int]) -> None:
        self.target = target
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
        for number, step in enumerate(row.steps, 1):
            name = next(key for key in step if key in _ACTIONS)
            try:
                await _ACTIONS[name](self, step)
            except AssertionError as error:
                raise AssertionError(f"{row.id}, step {number} {dict(step)}:\n{error}") from None
            except Exception as error:
                error.add_note(f"{row.id}, step {number} {dict(step)}")
                raise

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
        for name, length in PROMPTS.items():
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
        body = generation_body(route, prompt, step.get("tokens", 16), stream, dict(step.get("json", {})))
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
        generation = self.generations[step["frozen"]]
        await asyncio.sleep(step.get("settle_s", 0.5))  # what was on its way when the call returned
        before = len(generation.token_ids)
        await asyncio.sleep(step.get("for_s", 0.5))
        after = len(generation.token_ids)
        assert before == after, f"{after - before} tokens came"
        assert not generation.ended, f"it ended: {generation.finish_reason}"
        self._frozen_at[step["frozen"]] = after

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
        _check_end(step, generation, str(self._last))

    async def _same(self, step: Step) -> None:
        first, *others = (self.generations[name].token_ids for name in step["same"])
        assert first
        assert all(ids == first for ids in others), f"tokens differ: {first[:20]} and {others[0][:20]}"

    async def _requests(self, step: Step) -> None:
        wanted = (step.get("running", 0), step.get("waiting", 0))
        found = (-1, -1)
        for _ in range(int(WAIT_S / POLL_S)):
            text = (await self.http.get("/metrics")).text
            found = (int(_metric(text, "num_requests_running")), int(_metric(text, "num_requests_waiting")))
            if found == wanted or ("running_at_least" in step and found[0] >= step["running_at_least"]):
                return
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"running and waiting are {found}, not {wanted}")

    async def _mark(self, step: Step) -> None:
        self._marks[step["mark"]] = _metric((await self.http.get("/metrics")).text, step["mark"])

    async def _metric(self, step: Step) -> None:
        name = step["metric"]
        value = _metric((await self.http.get("/metrics")).text, name)
        rise = value - self._marks.get(name, 0.0)
        assert rise == step["rises"], f"{name} rose by {rise}, not {step['rises']}"

    # --- weights ----------------------------------------------------------------------------------------

    async def _join(self, step: Step) -> None:
        await self.target.transport.open(["engine-0"], self.target.model.plan().to_json())
        info = {**self.target.transport.init_info("engine-0"), **step.get("info", {})}
        fault = step.get("fault", "")
        if fault == "renamed":
            info["plan"] = _renamed(info["plan"])
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
        generation = Generation("completions", False)
        more: dict[str, Any] = {}
        body = generation_body("completions", list(PROMPT), 12, False, more)
        async with asyncio.timeout(WAIT_S):
            await generation.run(self.http, body, {})
        assert generation.status == 200, generation.text[:500]
        self._compare(generation, step["serves"], 0)

    async def _stays(self, step: Step) -> None:
        name = step["stays"]
        start = self._frozen_at[name] if step.get("from_frozen") else 0
        self._compare(self.generations[name], step["weights"], start)

    def _compare(self, generation: Generation, wanted: str, start: int) -> None:
        model = self.target.model
        ids = [*PROMPT, *generation.token_ids]
        gaps = {
            name: _gap(model.logprobs(name, ids), generation.logprobs, start) for name in ("w0", "w1", "w2")
        }
        fits = [name for name, gap in gaps.items() if gap <= TOLERANCE]
        expected = [] if wanted == "other" else [wanted]
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
        """As ``join``, in vLLM's own form; ``info`` changes the init info, ``without`` leaves a field out."""
        trainer = self.target.trainer
        info = await trainer.prepare(**step.get("info", {}))
        info.pop(step.get("without", ""), None)
        call = self._background("/init_weight_transfer_engine", {"init_info": info})
        if step.get("status", 200) == 200:
            await trainer.join()
        check(step, await call)

    async def _stock(self, step: Step) -> None:
        change = step.get("change", "whole")
        wire = stock_wire(self.target.model, step["stock"], change)
        call = self._background("/update_weights", {"update_info": stock_update(wire, change)})
        if change not in UNSENT and not step.get("unsent"):
            await self.target.trainer.send(wire)
        check(step, await call)

    def _background(self, path: str, body: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.get_running_loop().create_task(self.http.post(path, json=body))

    # --- deaths -----------------------------------------------------------------------------------------

    async def _dead(self, step: Step) -> None:
        status: object = None
        for _ in range(int(WAIT_S / POLL_S)):
            try:
                status = (await self.http.get("/health")).status_code
            except httpx.TransportError as error:
                status = error
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


def check(step: Step, response: httpx.Response) -> None:
    """The answer is what the step expects."""
    text = response.text
    assert response.status_code == step.get("status", 200), f"{response.status_code}: {text[:600]}"
    if "body" in step:
        found = response.json() if text else ""
        assert found == _nulls(step["body"]), f"{text[:800]}\nis not\n{json.dumps(step['body'])}"
    if "has" in step:
        problem = lacks(response.json(), step["has"])
        assert not problem, f"{problem}\nin {text[:800]}"
    if "message" in step:
        error = response.json().get("error", {})
        words = error if isinstance(error, str) else error.get("message", "")
        assert re.search(step["message"], words), f"{words!r} does not match {step['message']!r}"
    if "text" in step:
        assert re.search(step["text"], text, re.MULTILINE), f"{text[:1500]!r} has no {step['text']!r}"
    if "absent" in step:
        assert not re.search(step["absent"], text), f"{text[:800]!r} has {step['absent']!r}"


def _nulls(wanted: Any) -> Any:
    """TOML has no null: a table says "null" for it."""
    if isinstance(wanted, dict):
        return {key: _nulls(value) for key, value in wanted.items()}
    return None if wanted == "null" else wanted


def lacks(found: Any, wanted: Any, where: str = "body") -> str:
    """What of ``wanted`` is not in ``found``; objects may have more fields. A string "~x" is a pattern, "*" anything."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return f"{where} is {found!r}, not an object"
        for key, value in wanted.items():
            if key not in found:
                return f"{where}.{key} is missing"
            if problem := lacks(found[key], value, f"{where}.{key}"):
                return problem
        return ""
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return f"{where} is {found!r}, not a list of {len(wanted)}"
        problems = (lacks(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(found, wanted, strict=True)))
        return next(filter(None, problems), "")
    if wanted == "*":
        return ""
    if wanted == "null":
        return "" if found is None else f"{where} is {found!r}, not null"
    if isinstance(wanted, str) and wanted.startswith("~"):
        return "" if re.search(wanted[1:], str(found)) else f"{where} is {found!r}, not like {wanted[1:]!r}"
    same = type(found) is type(wanted) and found == wanted
    return "" if same else f"{where} is {found!r}, not {wanted!r}"


def _check_end(step: Step, generation: Generation, sync: str) -> None:
    count = len(generation.token_ids)
    assert generation.status == step.get("status", 200), f"{generation.status}: {generation.text[:500]}"
    if "finish_reason" in step:
        wanted = None if step["finish_reason"] == "none" else step["finish_reason"]
        assert generation.finish_reason == wanted, f"finish_reason {generation.finish_reason}, {count} tokens"
    if "count" in step:
        assert count == step["count"], f"{count} tokens"
    if "below" in step:
        assert step.get("at_least", 0) <= count < step["below"], f"{count} tokens"
    if generation.route != "chat" and not step.get("error_event") and generation.status == 200:
        assert len(generation.logprobs) in (count, 0), f"{len(generation.logprobs)} logprobs, {count} tokens"
    if step.get("usage"):
        assert generation.usage is not None, "no usage"
        assert generation.usage["completion_tokens"] == count, f"{generation.usage} for {count} tokens"
    if "done" in step:
        assert generation.done_seen == step["done"], f"[DONE] seen: {generation.done_seen}"
    if "has" in step:
        problem = lacks(generation.body, step["has"])
        assert not problem, f"{problem} in {generation.text[:800]}"
    for key, index in (("first_chunk", 0), ("last_chunk", -1)):
        if key in step:
            problem = lacks(generation.chunks[index], step[key])
            assert not problem, f"{problem} in {generation.chunks[index]}"
    if "chunks" in step:
        assert len(generation.chunks) == step["chunks"], (
            f"{len(generation.chunks)} data events: {generation.chunks[:3]}"
        )
    if "message" in step:
        assert re.search(step["message"], generation.text), generation.text[:500]
    if "error_event" in step:
        assert generation.errors, f"no error event among {len(generation.chunks)}"
        assert re.search(step["error_event"], str(generation.errors)), generation.errors
    if "weight_versions" in step:
        found = [span["version"] for span in generation.weight_versions]
        wanted = [name.replace("$sync", sync) for name in step["weight_versions"]]
        assert not lacks(found, wanted), f"{generation.weight_versions}"
        edges = [(span["start"], span["end"]) for span in generation.weight_versions]
        assert edges[0][0] == 0, edges
        assert edges[-1][1] == count, edges
        assert all(left[1] == right[0] for left, right in zip(edges, edges[1:], strict=False)), edges


async def _until(call: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Yields when the call has returned: a sender that hangs for as long as the engine waits for it."""
    await asyncio.wait({call})
    yield


def _gap(ours: list[float], theirs: list[float], start: int) -> float:
    assert len(ours) == len(theirs), f"{len(theirs)} logprobs for {len(ours)} tokens"
    pairs = list(zip(ours, theirs, strict=True))[start:]
    assert pairs, f"no token from {start} on"
    return max(abs(left - right) if right is not None else 1e9 for left, right in pairs)


def _renamed(plan: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(plan).replace("model.norm.weight", "model.bogus.weight"))


def _metric(text: str, name: str) -> float:
    values = re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    assert values, f"/metrics has no vllm:{name}"
    return sum(map(float, values))
