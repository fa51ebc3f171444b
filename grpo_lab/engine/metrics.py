"""``/metrics`` in Prometheus' text format, under the names that vLLM 0.32 prints."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from grpo_lab.engine.core import EngineCore
from grpo_lab.engine.request import Request

LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
OPERATION_S = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
REASONS = ("stop", "length", "abort", "error", "repetition")


@dataclass(slots=True)
class Histogram:
    """Counts of values by upper bound. ``add`` may count one value several times."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def rows(self, name: str, labels: str) -> list[str]:
        rows, seen = [], 0
        for bound, count in zip([*map(float, self.bounds), float("inf")], self.counts, strict=True):
            seen += count
            shown = "+Inf" if bound == float("inf") else repr(bound)
            rows.append(f'{name}_bucket{{{labels},le="{shown}"}} {float(seen)!r}')
        return [*rows, f"{name}_count{{{labels}}} {float(seen)!r}", f"{name}_sum{{{labels}}} {self.total!r}"]


class Metrics:
    """Gauges and counters of one engine, and histograms of its finished requests.

    Latencies come from a request's own times by the loop's clock. Time between tokens is each request's
    mean, counted once per token.
    """

    def __init__(self, core: EngineCore, model: str, sleeping: Callable[[], int] = lambda: -1) -> None:
        self._core = core
        self._sleeping = sleeping
        label = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._labels = f'engine="0",model_name="{label}"'
        tokens = tuple(_one_two_five(core.policy.max_model_len))
        self._histograms = {
            "request_prompt_tokens": ("Number of prefill tokens processed.", Histogram(tokens)),
            "request_generation_tokens": ("Number of generation tokens processed.", Histogram(tokens)),
            "request_params_n": ("Histogram of the n request parameter.", Histogram(COUNTS)),
            "request_params_max_tokens": (
                "Histogram of the max_tokens request parameter.",
                Histogram(tokens),
            ),
            "time_to_first_token_seconds": (
                "Histogram of time to first token in seconds.",
                Histogram(FIRST_TOKEN_S),
            ),
            "inter_token_latency_seconds": (
                "Histogram of inter-token latency in seconds.",
                Histogram(BETWEEN_TOKENS_S),
            ),
            "request_time_per_output_token_seconds": (
                "Histogram of time_per_output_token_seconds per request.",
                Histogram(BETWEEN_TOKENS_S),
            ),
            "e2e_request_latency_seconds": (
                "Histogram of e2e request latency in seconds.",
                Histogram(LATENCY_S),
            ),
            "request_decode_time_seconds": (
                "Histogram of time spent in DECODE phase for request.",
                Histogram(LATENCY_S),
            ),
        }
        self._operations: dict[str, Histogram] = {}
        self._in_flight: dict[str, int] = {}
        core.on_finish = self.observe

    def observe(self, request: Request) -> None:
        """Counts one finished request."""
        tables = {name: histogram for name, (_, histogram) in self._histograms.items()}
        tokens = request.num_output_tokens
        tables["request_prompt_tokens"].add(request.num_prompt_tokens)
        tables["request_generation_tokens"].add(tokens)
        tables["request_params_n"].add(1)
        tables["request_params_max_tokens"].add(request.sampling.max_tokens)
        first, last = request.first_token_s, request.last_token_s
        if first is None or last is None:
            return
        tables["time_to_first_token_seconds"].add(first - request.arrival_s)
        tables["e2e_request_latency_seconds"].add(last - request.arrival_s)
        tables["request_decode_time_seconds"].add(last - first)
        if tokens > 1:
            mean_s = (last - first) / (tokens - 1)
            tables["inter_token_latency_seconds"].add(mean_s, tokens - 1)
            tables["request_time_per_output_token_seconds"].add(mean_s)

    @contextmanager
    def operation(self, name: str, now_s: Callable[[], float]) -> Iterator[None]:
        """Times one weight operation, whether it succeeds or not."""
        began_s = now_s()
        self._in_flight[name] = self._in_flight.get(name, 0) + 1
        try:
            yield
        finally:
            self._in_flight[name] -= 1
            self._operations.setdefault(name, Histogram(OPERATION_S)).add(now_s() - began_s)

    def render(self) -> str:
        lines: list[str] = []
        for name, kind, text, value in self._values():
            lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]
            lines.append(f"vllm:{name}{{{self._labels}}} {float(value)!r}")
        lines += self._labelled()
        for name, (text, histogram) in self._histograms.items():
            lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} histogram"]
            lines += histogram.rows(f"vllm:{name}", self._labels)
        return "\n".join(lines + self._weight_rows()) + "\n"

    def _values(self) -> list[tuple[str, str, str, float]]:
        core, counters = self._core, self._core.counters
        scheduler, pool = core.scheduler, core.scheduler.pool
        return [
            ("num_requests_running", "gauge", "Number of requests in model execution batches.",
             len(scheduler.running)),
            ("num_requests_waiting", "gauge", "Number of requests waiting to be processed.",
             core.num_waiting),
            ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.",
             pool.num_used / len(pool)),
            ("prefix_cache_queries_total", "counter",
             "Prefix cache queries, in terms of number of queried tokens.", counters.prefix_queries),
            ("prefix_cache_hits_total", "counter",
             "Prefix cache hits, in terms of number of cached tokens.", counters.prefix_hits),
            ("num_preemptions_total", "counter", "Cumulative number of preemption from the engine.",
             scheduler.num_preemptions),
            ("prompt_tokens_total", "counter", "Number of prefill tokens processed.", counters.prompt_tokens),
            ("prompt_tokens_cached_total", "counter", "Number of cached prompt tokens (local + external).",
             counters.prefix_hits),
            ("generation_tokens_total", "counter", "Number of generation tokens processed.",
             counters.generation_tokens),
        ]  # fmt: skip

    def _labelled(self) -> list[str]:
        """Counters by reason and gauges by state."""
        lines = [
            "# HELP vllm:request_success_total Count of successfully processed requests.",
            "# TYPE vllm:request_success_total counter",
        ]
        for reason in REASONS:
            count = self._core.counters.finished.get(reason, 0)
            label = f'{self._labels},finished_reason="{reason}"'
            lines.append(f"vllm:request_success_total{{{label}}} {float(count)!r}")
        lines += [
            "# HELP vllm:engine_sleep_state Engine sleep state; awake = 0 means engine is sleeping.",
            "# TYPE vllm:engine_sleep_state gauge",
        ]
        level = self._sleeping()
        states = {"awake": level < 0, "weights_offloaded": level == 1, "discard_all": level == 2}
        for state, on in states.items():
            label = f'{self._labels},sleep_state="{state}"'
            lines.append(f"vllm:engine_sleep_state{{{label}}} {float(on)!r}")
        return lines

    def _weight_rows(self) -> list[str]:
        if not self._in_flight:
            return []
        name = "vllm:rl_weight_update_operation_duration_seconds"
        lines = [f"# HELP {name} Duration of one weight-transfer operation.", f"# TYPE {name} histogram"]
        for operation, histogram in self._operations.items():
            lines += histogram.rows(name, f'operation="{operation}"')
        name = "vllm:rl_weight_update_operations_in_flight"
        lines += [f"# HELP {name} Weight-transfer operations currently awaited.", f"# TYPE {name} gauge"]
        return lines + [
            f'{name}{{operation="{operation}"}} {float(count)!r}'
            for operation, count in self._in_flight.items()
        ]


def _one_two_five(limit: int) -> Iterator[float]:
    """1, 2, 5, 10, 20, ... up to ``limit``."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > limit:
                return
            yield float(digit * power)
        power *= 10
