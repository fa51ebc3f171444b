"""A calibration: how long things take on one machine, as measured there, and a TOML file of it.

The step of an engine takes

    base_s + prefill_token_s * prefill tokens + sequence_s * sequences + context_token_s * context tokens
           + admitted_s * requests admitted meanwhile + finished_s * requests that the step before ended

and an optimizer step ``base_s + token_s * tokens``. These, and what the worker needs for a request, are
core-seconds, which take longer while others compute on the same cores (``Sharing``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_type_hints

from grpo_lab.errors import DataError
from grpo_lab.files import write_whole

SCHEMA = 2
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation over ``n`` observations."""

    mean_s: float
    sd_s: float
    n: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where the figures come from. ``machine`` and ``settings`` are what they hold for."""

    runs: tuple[str, ...]
    machine: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How trainer, worker and engines, which compute on one core each, share a machine's ``cores``.

    All cores together do ``capacity`` times what one does alone: they share caches and memory, and other
    things use them too (the kernel, the process that checks the trace). What there is goes by weight, 1 for
    worker and engines: a scheduler prefers those that often wait, so the trainer weighs less. While it
    computes it takes ``trainer_disturbs`` of what the others get: its passes fill the caches.
    """

    cores: int
    capacity: float
    trainer_weight: float
    trainer_disturbs: float = 0.0

    def speeds(self, training: bool, others: int) -> tuple[float, float]:
        """Of the trainer and of each of ``others`` that compute (max-min fair); 1: alone on the machine.
        What one of them does that does not compute is of no meaning.

        >>> Sharing(2, 1.8, 0.25).speeds(True, 1)
        (0.9, 0.9)
        >>> Sharing(2, 1.8, 0.25).speeds(True, 2)
        (0.2, 0.8)
        """
        busy = max(1, min(self.cores, others + training))
        whole = 1.0 + (self.capacity - 1.0) * (busy - 1) / max(1, self.cores - 1)
        most = whole / busy
        if not training or not others:
            return most, min(most, whole / max(1, others))
        other = min(most, whole / (others + self.trainer_weight))
        trainer = min(most, whole - others * other)
        other = min(most, (whole - trainer) / others) * (1.0 - self.trainer_disturbs)
        return round(trainer, 9), round(other, 9)


@dataclass(frozen=True, slots=True)
class EngineStepFit:
    """Core-seconds. ``jitter``: a step takes up to this part more or less. ``relative_rms``: residuals over
    the mean.
    """

    base_s: float
    prefill_token_s: float
    sequence_s: float
    context_token_s: float
    admitted_s: float
    finished_s: float
    jitter: float
    n: int
    relative_rms: float


@dataclass(frozen=True, slots=True)
class TrainerStepFit:
    """Core-seconds. ``computed_share`` of the consumed tokens, prompts included, are in the passes (groups
    without signal are not). ``overhead_s`` passes between steps besides syncs and waiting. ``token_error_s``
    is the standard error of ``token_s``: steps that are all alike do not tell it from ``base_s``.
    """

    base_s: float
    token_s: float
    computed_share: float
    overhead_s: float
    cv: float
    token_error_s: float
    n: int
    relative_rms: float


@dataclass(frozen=True, slots=True)
class RequestFit:
    """The worker takes one thing after the other: ``dispatch_s`` core-seconds to send a request, which
    arrives ``request_latency_s`` later, ``reply_s`` for an answer, which was ``reply_latency_s`` on its way.
    """

    dispatch_s: float
    request_latency_s: float
    reply_s: float
    reply_latency_s: float
    n: int


@dataclass(frozen=True, slots=True)
class SyncFit:
    """A sync takes ``other + pause + transfer + resume``, and what its calls wait for at busy engines.

    ``other``, ``pause``, ``transfer`` and ``resume`` are medians, with the deviation of a normal distribution
    that has their quartiles: single syncs that wait for something else do not move them.

    ``transfer`` is without ``bucket_s + byte_s * bytes`` for each bucket. Where all buckets are of one size
    only their mean time is known: ``byte_s`` is 0 then, and ``two_term`` false.
    """

    other: Spread
    pause: Spread
    transfer: Spread
    resume: Spread
    total: Spread
    bucket_s: float
    byte_s: float
    two_term: bool
    nbytes: int
    buckets: int

    def buckets_of(self, bucket_bytes: int) -> int:
        """How many buckets of this size the calibrated model's weights take, about."""
        return max(1, math.ceil(self.nbytes / bucket_bytes))

    def carry_s(self, bucket_bytes: int) -> float:
        """All buckets of a sync on one link. Without two terms, as many buckets of the size that was seen."""
        return self.bucket_s * self.buckets_of(bucket_bytes) + self.byte_s * self.nbytes


@dataclass(frozen=True, slots=True)
class LengthFit:
    """Completion lengths in tokens: quantiles at equal steps up to ``tail_from``, beyond it a generalised
    Pareto tail over ``threshold`` (completions that were cut at their longest count as censored).

    ``within_group_correlation`` is between normal scores of two samples of one prompt.
    """

    quantiles: tuple[float, ...]
    tail_from: float
    threshold: float
    tail_scale: float
    tail_shape: float
    censored_share: float
    within_group_correlation: float
    mean: float
    n: int

    def tokens(self, u: float) -> int:
        """The length whose share of shorter ones is u, 0 <= u < 1."""
        value = self.quantile(u)
        in_tail = u > self.tail_from and self.tail_scale > 0
        return max(1, math.ceil(value) if in_tail else round(value))

    def quantile(self, u: float) -> float:
        """Inverse distribution function before it is made a whole number."""
        if u <= self.tail_from or self.tail_scale <= 0:
            place = min(u / self.tail_from, 1.0) * (len(self.quantiles) - 1)
            low = int(place)
            if low == len(self.quantiles) - 1:
                return self.quantiles[-1]
            return self.quantiles[low] + (place - low) * (self.quantiles[low + 1] - self.quantiles[low])
        beyond = (1.0 - u) / (1.0 - self.tail_from)
        if abs(self.tail_shape) < 1e-6:
            return self.threshold - self.tail_scale * math.log(beyond)
        excess = (math.pow(beyond, -self.tail_shape) - 1.0) / self.tail_shape
        return self.threshold + self.tail_scale * excess


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything that a prediction needs of a machine, a model and a task."""

    source: Source
    sharing: Sharing
    engine_step: EngineStepFit
    trainer_step: TrainerStepFit
    requests: RequestFit
    reward: Spread
    sync: SyncFit
    lengths: LengthFit
    prompt_quantiles: tuple[float, ...]
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)
    """What ``grpo-lab validate`` found: by run that the fit has not seen, by quantity, the error of the
    prediction, relative, or in versions for staleness.
    """

    def save(self, path: Path) -> None:
        """Whole or not at all. Raises ``DataError`` when the place cannot be written to."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, to_toml({"schema": SCHEMA, **dataclasses.asdict(self)}))
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ``DataError`` for a file that is missing, no calibration, or of another schema."""
        try:
            row = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: no calibration can be read ({error}). Make one: grpo-lab calibrate RUN"
            ) from error
        if row.pop("schema", None) != SCHEMA:
            raise DataError(f"{path}: no calibration of schema {SCHEMA}. Make one: grpo-lab calibrate RUN")
        try:
            made: Self = _made(cls, row)
        except (TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path}: damaged calibration: {error}") from error
        return made


def _made(kind: Any, row: Any) -> Any:
    """The dataclass ``kind`` of a table."""
    if not dataclasses.is_dataclass(kind):
        return tuple(row) if isinstance(row, list) else row
    hints = get_type_hints(kind)
    unknown = sorted(row.keys() - hints.keys())
    if unknown:
        raise KeyError(f"unknown {', '.join(unknown)}")
    return kind(**{name: _made(hints[name], value) for name, value in row.items()})  # type: ignore[operator]


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """Nested tables of numbers, texts, booleans and flat lists; None is left out.

    >>> print(to_toml({"a": 1, "t": {"b": [1.5, 2.0], "c": "x"}}), end="")
    a = 1
    <BLANKLINE>
    [t]
    b = [1.5, 2.0]
    c = "x"
    """
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"[{name}]"] if name and (plain or not table) else []
    lines += [f"{key} = {_toml_value(value)}" for key, value in plain.items() if value is not None]
    parts = ["\n".join(lines) + "\n"] if lines else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            quoted = key if _BARE_KEY.fullmatch(key) else _toml_value(key)
            parts.append(to_toml(value, f"{name}.{quoted}" if name else quoted))
    return "\n".join(parts)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))  # what was measured has no more digits
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Sequence):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    raise TypeError(f"{value!r} cannot be written as TOML")
