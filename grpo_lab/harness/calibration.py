"""A calibration: how long things take on one machine, as measured there, and a TOML file of it.

The step of an engine takes

    base_s + prefill_token_s * prefill tokens + sequence_s * sequences + context_token_s * context tokens
           + admitted_s * requests admitted meanwhile + finished_s * requests that the step before ended,

times ``1 + trainer_slowdown`` while the trainer computes; an optimizer step ``base_s + token_s * tokens``,
times ``1 + engine_slowdown`` for each engine that computes meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_type_hints

from grpo_lab.errors import DataError
from grpo_lab.files import write_whole
from grpo_lab.sim.speeds import Speeds

SCHEMA = 1


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
class EngineStepFit:
    """``jitter``: a step takes up to this part more or less. ``relative_rms``: residuals over the mean."""

    base_s: float
    prefill_token_s: float
    sequence_s: float
    context_token_s: float
    admitted_s: float
    finished_s: float
    trainer_slowdown: float
    jitter: float
    n: int
    relative_rms: float


@dataclass(frozen=True, slots=True)
class TrainerStepFit:
    """``computed_share`` of the consumed tokens, prompts included, are in the passes (groups without signal
    are not). ``overhead_s`` passes between steps besides syncs and waiting. ``token_error_s`` is the
    standard error of ``token_s``: steps that are all alike do not tell it from ``base_s``.
    """

    base_s: float
    token_s: float
    engine_slowdown: float
    computed_share: float
    overhead_s: float
    cv: float
    token_error_s: float
    n: int
    relative_rms: float


@dataclass(frozen=True, slots=True)
class RequestFit:
    """The worker takes one thing after the other: ``dispatch_s`` to send a request, which arrives
    ``request_latency_s`` later, ``reply_s`` for an answer, which was ``reply_latency_s`` on its way.
    """

    dispatch_s: float
    request_latency_s: float
    reply_s: float
    reply_latency_s: float
    n: int


@dataclass(frozen=True, slots=True)
class SyncFit:
    """A sync takes ``other + pause + transfer + resume``, and the model step that the pause waits for.

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
    engine_step: EngineStepFit
    trainer_step: TrainerStepFit
    requests: RequestFit
    reward: Spread
    sync: SyncFit
    lengths: LengthFit
    prompt_quantiles: tuple[float, ...]

    def speeds(self) -> Speeds:
        """For ``grpo-lab run --world sim``, where engines and trainer have devices of their own."""
        return Speeds(
            engine_step_s=max(self.engine_step.base_s, 1e-6),
            engine_sequence_s=self.engine_step.sequence_s,
            engine_prefill_token_s=self.engine_step.prefill_token_s,
            trainer_step_s=max(self.trainer_step.base_s, 1e-6),
            trainer_token_s=self.trainer_step.token_s * self.trainer_step.computed_share,
            link_s=self.sync.bucket_s,
            link_bytes_per_s=1.0 / self.sync.byte_s if self.sync.byte_s > 0 else 1e12,
        )

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
                f"{path}: no calibration can be read ({error}). Make one: calibrate RUN"
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
            parts.append(to_toml(value, f"{name}.{key}" if name else key))
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
