"""JSON in and out as vLLM has it: error bodies, validation messages, headers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from grpo_lab.errors import EngineError
from grpo_lab.types import SyncId

CAUSE_HEADER = "x-grpo-lab-cause"
PLAN_HEADER = "x-grpo-lab-plan"
TERM_HEADER = "x-grpo-lab-term"
SYNC_HEADER = "x-grpo-lab-sync"
KIND_HEADER = "x-grpo-lab-kind"
REQUEST_ID_HEADER = "x-request-id"

# Text becomes tokens at some 300 bytes of memory per character: without a limit one request can use up the
# machine. Weights never come in a body.
MAX_BODY_BYTES = 4 << 20
MAX_TERM_DIGITS = 18

_TYPES = {
    400: "Bad Request",
    401: "Unauthorized",
    404: "NotFoundError",
    409: "ConflictError",
    413: "Request Entity Too Large",
}
_MISSING = object()
_INTEGER = re.compile(r"[+-]?\d{1,4300}")
_FLAGS = dict.fromkeys(("true", "1", "on", "yes", "t", "y"), True)
_FLAGS |= dict.fromkeys(("false", "0", "off", "no", "f", "n"), False)


class ApiError(EngineError):
    """An error answer in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``.

    ``kind`` is the type; the status's own by default. vLLM's 400s are of two types: "Bad Request" where a
    body or query has another form, "BadRequestError" where a value cannot be served.
    """

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.kind = kind or _TYPES.get(status, "InternalServerError")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}

    def response(self) -> Response:
        return answer(self.body, self.status)


def refused(message: str, parameter: str | None = None, value: Any = None) -> ApiError:
    """A 400 for a value that cannot be served, with vLLM's way to name the parameter and the value."""
    named = [f"parameter={parameter}"] * (parameter is not None) + [f"value={value}"] * (value is not None)
    text = f"{message} ({', '.join(named)})" if named else message
    return ApiError(400, text, parameter, "BadRequestError")


def dumps(data: Any) -> str:
    """Compact JSON. Raises ``ValueError`` for a NaN or infinity, which JSON has no word for."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def answer(data: Any, status: int = 200) -> Response:
    """A JSON response. A NaN or infinity among the numbers is a 400, as in vLLM."""
    try:
        body = dumps(data)
    except ValueError as error:
        raise refused("Out of range float values are not JSON compliant") from error
    return Response(body.encode("utf-8", "replace"), status, media_type="application/json")


def flat_error(message: str, status: int = 500) -> Response:
    """vLLM's other error form: ``{"error": "..."}``."""
    return answer({"error": message}, status)


def worker_error(message: str) -> ApiError:
    """A 500 in the words in which vLLM passes a worker's exception on."""
    return ApiError(
        500,
        f"Call to collective_rpc method failed: Worker failed with error '{message}', "
        "please check the stack trace above for the root cause",
    )


def invalid(kind: str, loc: str, message: str, value: Any, context: str = "") -> ApiError:
    """A 400 with one validation error in pydantic's words, as vLLM prints them."""
    extra = f", 'ctx': {{{context}}}" if context else ""
    text = (
        f"1 validation error:\n  {{'type': {kind!r}, 'loc': {loc!r}, 'msg': {message!r}, "
        f"'input': {_shown(value)!r}{extra}}}"
    )
    return ApiError(400, text, loc)


def invalid_union(loc: str, problems: Sequence[tuple[str, str]], value: Any) -> ApiError:
    """A 400 where a value fits none of several forms: one validation error for each."""
    rows = [
        f"  {{'type': {kind!r}, 'loc': {loc!r}, 'msg': {message!r}, 'input': {_shown(value)!r}}}"
        for kind, message in problems
    ]
    return ApiError(400, "\n".join([f"{len(rows)} validation errors:", *rows]), loc)


def require_json(http: HttpRequest) -> None:
    """A 400 for a body that does not say it is JSON, as on vLLM's generation routes."""
    if http.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        reason = "Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, f"1 validation error:\n  {reason}")


async def read_body(http: HttpRequest, required: bool = True) -> Fields:
    """The request's JSON object; an empty body counts as ``{}`` and fails at its first required field.

    More than ``MAX_BODY_BYTES`` are a 413, whatever the length header says.
    """
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes; send several requests")
    if not raw:
        return Fields({})
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of thousands of digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        place = error.pos if isinstance(error, json.JSONDecodeError) else 0
        raise invalid(
            "json_invalid", f"body.{place}", "JSON decode error", {}, f"'error': {reason!r}"
        ) from error
    if data is None and not required:
        return Fields({})
    if not isinstance(data, dict):
        raise invalid("model_attributes_type", "body", "Input should be a valid dictionary", data)
    return Fields(data)


class Fields:
    """Typed access to a JSON object. A field that is missing or of another type is a 400 that names it."""

    def __init__(self, data: Mapping[str, Any], where: str = "body") -> None:
        self.data, self.where = data, where

    def _get(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is None:
            if default is _MISSING:
                raise invalid("missing", f"{self.where}.{name}", "Field required", None)
            return default
        return value

    def text(self, name: str, default: Any = _MISSING) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) and value is not default:
            raise invalid("string_type", f"{self.where}.{name}", "Input should be a valid string", value)
        return value

    def integer(self, name: str, default: Any = _MISSING) -> Any:
        value = self._get(name, default)
        if value is default or type(value) is int:
            return value
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, float):
            if value.is_integer():
                return int(value)
            message = "Input should be a valid integer, got a number with a fractional part"
            raise invalid("int_from_float", f"{self.where}.{name}", message, value)
        if isinstance(value, str):
            if _INTEGER.fullmatch(value.strip()):
                return int(value)
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise invalid("int_parsing", f"{self.where}.{name}", message, value)
        raise invalid("int_type", f"{self.where}.{name}", "Input should be a valid integer", value)

    def number(self, name: str, default: float) -> float:
        value = self._get(name, default)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                message = "Input should be a valid number, unable to parse string as a number"
                raise invalid("float_parsing", f"{self.where}.{name}", message, value) from None
        raise invalid("float_type", f"{self.where}.{name}", "Input should be a valid number", value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if isinstance(value, bool):
            return value
        if isinstance(value, int | float | str):
            word = value.lower() if isinstance(value, str) else str(int(value))
            if word in _FLAGS:
                return _FLAGS[word]
            message = "Input should be a valid boolean, unable to interpret input"
            raise invalid("bool_parsing", f"{self.where}.{name}", message, value)
        raise invalid("bool_type", f"{self.where}.{name}", "Input should be a valid boolean", value)

    def object(self, name: str, default: Any = _MISSING) -> dict[str, Any]:
        value = self._get(name, default)
        if not isinstance(value, dict):
            raise invalid("dict_type", f"{self.where}.{name}", "Input should be a valid dictionary", value)
        return value

    def token_ids(self, name: str, default: Any = _MISSING) -> tuple[int, ...]:
        value = self._get(name, default)
        if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
            raise invalid("list_type", f"{self.where}.{name}", "Input should be a list of token ids", value)
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._get(name, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise invalid("list_type", f"{self.where}.{name}", "Input should be a list of strings", value)
        return tuple(value)


def choice(value: str, loc: str, allowed: tuple[str, ...]) -> str:
    """``value`` if it is allowed, else the 400 of a pydantic literal."""
    if value in allowed:
        return value
    listed = ", ".join(repr(name) for name in allowed[:-1]) + f" or {allowed[-1]!r}"
    raise invalid("literal_error", loc, f"Input should be {listed}", value, f"'expected': {listed!r}")


def query_flag(http: HttpRequest, name: str, default: bool) -> bool:
    text = http.query_params.get(name)
    if text is None:
        return default
    if text.lower() not in _FLAGS:
        message = "Input should be a valid boolean, unable to interpret input"
        raise invalid("bool_parsing", f"query.{name}", message, text)
    return _FLAGS[text.lower()]


def term_of(http: HttpRequest) -> int:
    text = http.headers.get(TERM_HEADER, "0")
    if not text.isdecimal() or len(text) > MAX_TERM_DIGITS:
        raise ApiError(400, f"header {TERM_HEADER}: {text[:40]!r} is not a term", TERM_HEADER)
    return int(text)


def sync_of(http: HttpRequest) -> SyncId | None:
    text = http.headers.get(SYNC_HEADER)
    if text is None:
        return None
    try:
        return SyncId.parse(text)
    except ValueError as error:
        raise ApiError(400, f"header {SYNC_HEADER}: {error}", SYNC_HEADER) from error


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)[:200]
