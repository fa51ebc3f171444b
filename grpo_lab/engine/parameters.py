"""A generation request's parameters, under vLLM's names, with its defaults, limits and complaints.

Unknown fields are ignored, as by vLLM. Known ones that this engine cannot honour are refused: they are never
accepted and then left out (``REFUSED``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_lab.engine.policy import Policy
from grpo_lab.engine.request import LogitRules
from grpo_lab.engine.wire import Fields, invalid, refused
from grpo_lab.types import SamplingParams

MAX_TOP_LOGPROBS = 20  # vLLM's --max-logprobs
MAX_CHOICES = 16_384  # VLLM_MAX_N_SEQUENCES
MAX_SALT_CHARACTERS = 128
MAX_TEMPERATURE = 2.0
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
GREEDY_BELOW = 1e-5

REFUSED: Mapping[str, str] = {
    "use_beam_search": "beam search",
    "bad_words": "bad words",
    "structured_outputs": "structured outputs",
    "logprob_token_ids": "logprobs of chosen tokens (logprob_token_ids)",
    "repetition_detection": "repetition detection",
    "prompt_embeds": "prompt embeddings",
    "thinking_token_budget": "a budget of thinking tokens",
    "priority": "priorities; it serves first come, first served",
    "suffix": "a suffix",
    "trace_decode_token_ids": "predetermined tokens",
    "prompt_logprob_token_ids": "prompt logprobs of chosen tokens",
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a request wants of each sequence, and how it wants to hear of it.

    ``top`` counts the likeliest tokens to report (-1: all; None: no logprobs at all); ``prompt_top`` likewise
    for the prompt.
    """

    sampling: SamplingParams
    rules: LogitRules | None = None
    n: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    top: int | None = None
    prompt_top: int | None = None
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Streaming:
    """How a stream is told: ``usage`` at its end, ``running_usage`` in every chunk, ``interval`` (tokens)."""

    usage: bool = False
    running_usage: bool = False
    interval: int = 1

    @classmethod
    def of(cls, body: Fields) -> Streaming | None:
        """None for a request that wants one answer."""
        options = body.object("stream_options", {})
        stream = body.flag("stream")
        if options and not stream:
            raise refused("Stream options can only be defined when `stream=True`.", "stream_options")
        if not stream:
            return None
        fields = Fields(options, "body.stream_options")
        usage = fields.flag("include_usage")
        interval = body.integer("stream_interval", 1)
        if interval < 1:
            message, context = "Input should be greater than or equal to 1", "'ge': 1"
            raise invalid("greater_than_equal", "body.stream_interval", message, interval, context)
        return cls(usage, usage and fields.flag("continuous_usage_stats"), interval)


def refuse_unknown(body: Fields) -> None:
    """Raises for a field that this engine knows of and cannot honour."""
    for name, what in REFUSED.items():
        if body.data.get(name) not in (None, False, 0, "", [], {}, -1):
            raise refused(f"This engine does not offer {what}; leave {name!r} out", name)
    form = body.data.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        raise refused("This engine does not offer structured outputs", "response_format")


def parameters_of(
    body: Fields, max_tokens: int, *, vocab_size: int, top: int | None, prompt_top: int | None
) -> Parameters:
    """``body`` has the sampling fields; what was asked for as ``top`` differs by route.

    Raises ``ApiError`` (400) for anything out of range.
    """
    refuse_unknown(body)
    n = body.integer("n", 1)
    seed = body.integer("seed", None)
    if seed is not None and not MIN_SEED <= seed <= MAX_SEED:
        kind, word, bound = ("less_than_equal", "less", MAX_SEED) if seed > 0 else (
            "greater_than_equal", "greater", MIN_SEED
        )  # fmt: skip
        message = f"Input should be {word} than or equal to {bound}"
        raise invalid(kind, f"{body.where}.seed", message, seed, f"{kind[0]}e: {bound}")
    top_k = body.integer("top_k", 0)
    temperature = body.number("temperature", 1.0)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if 0 <= temperature < GREEDY_BELOW else temperature,
        top_p=body.number("top_p", 1.0),
        top_k=0 if top_k == -1 else top_k,
        min_tokens=body.integer("min_tokens", 0),
        stop_token_ids=body.token_ids("stop_token_ids", ()),
        ignore_eos=body.flag("ignore_eos"),
        seed=None if seed == -1 else seed,
    )
    parameters = Parameters(
        sampling=sampling,
        rules=_rules(body),
        n=n,
        stops=body.texts("stop"),
        include_stop=body.flag("include_stop_str_in_output"),
        skip_special=body.flag("skip_special_tokens", True),
        top=top,
        prompt_top=prompt_top,
        salt=salt_of(body),
    )
    _check_ranges(parameters)
    _check_vocabulary(parameters, vocab_size)
    return parameters


def count(body: Fields, name: str, raw: bool = True) -> int | None:
    """``logprobs``-like fields: None, -1 (all), or a count."""
    value = body.data.get(name)
    if value is None:
        return None
    if raw and not isinstance(value, int | float):
        raise refused(f"`{name}` must be an integer.", name, value)
    number: int = body.integer(name)
    if number < -1:
        raise refused(f"`{name}` must be a positive value or -1.", name, number)
    return number


def salt_of(body: Fields) -> bytes:
    salt = body.data.get("cache_salt")
    if salt is None:
        return b""
    if not isinstance(salt, str) or not salt:
        raise refused("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > MAX_SALT_CHARACTERS or any(character in "@/\\\x00" for character in salt):
        raise refused(
            "Parameter 'cache_salt' must be at most 128 characters and must "
            "not contain '@', '/', '\\\\', or NUL.",
            "cache_salt",
        )
    return salt.encode("utf-8", "replace")


def _rules(body: Fields) -> LogitRules | None:
    rules = LogitRules(
        min_p=body.number("min_p", 0.0),
        presence_penalty=body.number("presence_penalty", 0.0),
        frequency_penalty=body.number("frequency_penalty", 0.0),
        repetition_penalty=body.number("repetition_penalty", 1.0),
        bias=_bias(body.object("logit_bias", {})),
        allowed=body.token_ids("allowed_token_ids", ()),
    )
    return None if rules == LogitRules() else rules


def _bias(bias: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    wrong = [key for key in bias if not key.lstrip("-").isdecimal()]
    if wrong:
        message = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong!r}"
        raise refused(message, "logit_bias", wrong)
    values = Fields(bias, "body.logit_bias")
    # Clamped to [-100, 100], as OpenAI's and vLLM's are.
    return tuple((int(key), min(100.0, max(-100.0, values.number(key, 0.0)))) for key in bias)


def _check_ranges(parameters: Parameters) -> None:
    """The complaints of vLLM's SamplingParams, in its order."""
    sampling, n = parameters.sampling, parameters.n
    rules = parameters.rules or LogitRules()
    if n < 1:
        raise refused(f"n must be at least 1, got {n}.")
    if n > MAX_CHOICES:
        raise refused(f"n must be at most {MAX_CHOICES}, got {n}.")
    _check_penalties(rules)
    _check_temperature(sampling.temperature)
    if not 0 < sampling.top_p <= 1:
        raise refused(f"top_p must be in (0, 1], got {sampling.top_p}.", "top_p", sampling.top_p)
    if sampling.top_k < -1:
        raise refused(f"top_k must be 0 (disable), or at least 1, got {sampling.top_k}.")
    if not 0 <= rules.min_p <= 1:
        raise refused(f"min_p must be in [0, 1], got {rules.min_p}.")
    limit, least = sampling.max_tokens, sampling.min_tokens
    if limit < 1:
        raise refused(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if least < 0:
        raise refused(f"min_tokens must be greater than or equal to 0, got {least}.")
    if least > limit:
        raise refused(f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.")
    if "" in parameters.stops:
        raise refused("stop cannot contain an empty string.")
    if sampling.temperature == 0 and n > 1:
        raise refused(f"n must be 1 when using greedy sampling, got {n}.")


def _check_penalties(rules: LogitRules) -> None:
    for name, value in (
        ("presence_penalty", rules.presence_penalty),
        ("frequency_penalty", rules.frequency_penalty),
    ):
        if not -2 <= value <= 2:
            raise refused(f"{name} must be in [-2, 2], got {value}.")
    if not math.isfinite(rules.repetition_penalty):
        raise refused(f"repetition_penalty must be a finite number, got {rules.repetition_penalty}.")
    if rules.repetition_penalty <= 0:
        raise refused(f"repetition_penalty must be greater than zero, got {rules.repetition_penalty}.")


def _check_temperature(value: float) -> None:
    if not math.isfinite(value):
        message = f"temperature must be a finite number, got {value}."
    elif value < 0:
        message = f"temperature must be non-negative, got {value}."
    elif value > MAX_TEMPERATURE:
        message = f"temperature must be in [0, 2], got {value}."
    else:
        return
    raise refused(message, "temperature", value)


def _check_vocabulary(parameters: Parameters, size: int) -> None:
    for what, name, asked in (
        ("sample", "logprobs", parameters.top),
        ("prompt", "prompt_logprobs", parameters.prompt_top),
    ):
        wanted = size if asked == -1 else asked or 0
        if wanted > MAX_TOP_LOGPROBS:
            message = f"Requested {what} logprobs of {wanted}, which is greater than max allowed: "
            raise refused(f"{message}{MAX_TOP_LOGPROBS}", name, wanted)
    rules = parameters.rules or LogitRules()
    for name, ids in (
        ("stop_token_ids", parameters.sampling.stop_token_ids),
        ("logit_bias", tuple(token for token, _ in rules.bias)),
    ):
        wrong = [token for token in ids if not 0 <= token < size]
        if wrong:
            message = f"token_id(s) {wrong} in {name} contain out-of-vocab token ids. Vocabulary size: {size}"
            raise refused(message, name, wrong)
    if any(not 0 <= token < size for token in rules.allowed):
        raise refused("allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids")


def check_context(policy: Policy, max_tokens: int, name: str) -> None:
    """Raises a 400 for more output than any context holds. Less than that is clamped silently, as in vLLM."""
    limit = policy.max_model_len
    if max_tokens > limit:
        message = f"{name}={max_tokens} cannot be greater than max_model_len={limit}. "
        raise refused(f"{message}Please request fewer output tokens.", name, max_tokens)


def truncated(ids: tuple[int, ...], body: Fields, policy: Policy) -> tuple[int, ...]:
    """The prompt after ``truncate_prompt_tokens``: its last tokens, unless ``truncation_side`` is right."""
    wanted = body.integer("truncate_prompt_tokens", None)
    if wanted is None:
        return ids
    if wanted < -1:
        message, context = "Input should be greater than or equal to -1", "'ge': -1"
        raise invalid("greater_than_equal", "body.truncate_prompt_tokens", message, wanted, context)
    limit = policy.max_model_len
    if wanted > limit:
        message = f"truncate_prompt_tokens={wanted} cannot be greater than max_model_len = {limit}. "
        raise refused(f"{message}Please request a smaller truncation size.", "truncate_prompt_tokens", wanted)
    keep = limit - 1 if wanted == -1 else wanted
    if body.text("truncation_side", "left") == "right":
        return ids[:keep]
    return ids[-keep:] if keep else ()
