"""Calibrations and predictions for people: tables, and the JSON file of ``grpo-lab validate``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from grpo_lab.harness.calibration import Calibration
from grpo_lab.harness.validation import Comparison, Row

_UNITS = {"tokens_per_s": ("", 1.0), "staleness_mean": (" versions", 1.0)}
_WORDS = {
    "tokens_per_s": "throughput (tokens/s)",
    "step_s": "time per optimizer step",
    "sync_s": "weight sync",
    "staleness_mean": "mean staleness",
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
}


def comparison_table(comparison: Comparison, title: str) -> Table:
    """Predicted against measured, a row a quantity."""
    table = Table(title=title, title_justify="left")
    for column in ("quantity", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if column == "quantity" else "right")
    for row in comparison.rows:
        table.add_row(
            _WORDS[row.quantity],
            _value(row.quantity, row.predicted, row.predicted_sd),
            _value(row.quantity, row.measured, row.measured_sd),
            _error(row),
        )
    table.add_row(
        "staleness distribution",
        _distribution(comparison.staleness_predicted),
        _distribution(comparison.staleness_measured),
        f"{comparison.wasserstein_versions:.3f} versions (Wasserstein)",
    )
    return table


def _value(quantity: str, value: float | None, deviation: float) -> str:
    if value is None:
        return "-"
    unit, factor = _UNITS.get(quantity, (" ms", 1e3))
    digits = 0 if quantity == "tokens_per_s" else 2
    spread = f" ± {deviation * factor:,.{digits}f}" if deviation else ""
    return f"{value * factor:,.{digits}f}{spread}{unit}"


def _error(row: Row) -> str:
    if row.error is None:
        return "-"
    if row.quantity == "staleness_mean" or row.relative is None:
        return f"{row.error:+.3f}"
    return f"{row.relative:+.1%}"


def _distribution(shares: Mapping[int, float]) -> str:
    return ", ".join(f"{age}: {share:.0%}" for age, share in shares.items())


def error_words(calibration: Calibration) -> str:
    """How far predictions with these latencies were off, to be shown beside every number that they give."""
    found = calibration.held_out
    if not found:
        return "not validated: no validation found, run grpo-lab validate RUN"
    parts = []
    for name, words in (*_WORDS.items(), ("staleness_distance", "staleness distribution")):
        values = [errors[name] for errors in found.values() if name in errors]
        if values:
            worst = max(values, key=abs)
            shown = f"{worst:+.2f} versions" if name.startswith("staleness") else f"{worst:+.1%}"
            parts.append(f"{words.partition(' (')[0]} {shown}")
    runs = f"{len(found)} held-out run{'s' if len(found) > 1 else ''}"
    return f"prediction error, the worst of {runs}: {', '.join(parts)}"


def calibration_lines(calibration: Calibration) -> Iterable[str]:
    """What was fitted, to how much, and how well."""
    engine, trainer = calibration.engine_step, calibration.trainer_step
    sharing, sync, lengths, requests = (
        calibration.sharing,
        calibration.sync,
        calibration.lengths,
        calibration.requests,
    )
    yield (
        f"engine step: {engine.base_s * 1e3:.3f} ms + {engine.prefill_token_s * 1e6:.2f} us/prompt token"
        f" + {engine.sequence_s * 1e6:.2f} us/sequence + {engine.context_token_s * 1e6:.3f} us/context token"
    )
    yield (
        f"  + {engine.admitted_s * 1e6:.0f} us/request admitted"
        f" + {engine.finished_s * 1e6:.0f} us/request ended"
        f"  (n = {engine.n}, residual {engine.relative_rms:.0%} of the mean)"
    )
    yield (
        f"optimizer step: {trainer.base_s * 1e3:.1f} ms + {trainer.token_s * 1e6:.1f} us/token"
        f" (± {trainer.token_error_s * 1e6:.1f});"
        f" {trainer.computed_share:.0%} of tokens computed"
        f"  (n = {trainer.n}, residual {trainer.relative_rms:.0%})"
    )
    yield (
        f"{sharing.cores} cores, all busy, do {sharing.capacity:.2f} times what one does alone; the trainer's"
        f" weight is {sharing.trainer_weight:g}, it takes {sharing.trainer_disturbs:.0%} of the others' speed"
        " (times of steps and requests are core-seconds)"
    )
    yield (
        f"worker: {requests.dispatch_s * 1e3:.2f} ms a request + {requests.request_latency_s * 1e3:.2f} on"
        f" its way, {requests.reply_s * 1e3:.2f} an answer + {requests.reply_latency_s * 1e3:.2f}"
        f"  (n = {requests.n})"
    )
    yield (
        f"reward: {calibration.reward.mean_s * 1e3:.1f} ms ± {calibration.reward.sd_s * 1e3:.1f}"
        f"  (n = {calibration.reward.n})"
    )
    phases = ", ".join(
        f"{name} {spread.mean_s * 1e3:.1f} ± {spread.sd_s * 1e3:.1f}"
        for name, spread in (
            ("look", sync.other),
            ("pause", sync.pause),
            ("transfer", sync.transfer),
            ("resume", sync.resume),
        )
    )
    wire = f"{sync.bucket_s * 1e3:.2f} ms a bucket"
    if sync.two_term:
        rate = f"{1e-9 / sync.byte_s:.2f} GB/s" if sync.byte_s > 0 else "no measurable time a byte"
        wire += f" + {rate} (two terms)"
    total = f"n = {sync.total.n}, total {sync.total.mean_s * 1e3:.1f} ms"
    yield f"weight sync (ms): {phases}, and {wire}  ({total})"
    tail = (
        f"Pareto tail from {lengths.threshold:.0f} tokens, scale {lengths.tail_scale:.2f},"
        f" shape {lengths.tail_shape:+.2f}"
        if lengths.tail_scale > 0
        else "too few long ones for a tail of its own"
    )
    yield (
        f"completions: {lengths.mean:.1f} tokens on average, {tail}, {lengths.censored_share:.1%} cut at the"
        f" longest; within-group correlation {lengths.within_group_correlation:.2f}  (n = {lengths.n})"
    )
