"""``report.html``: one page that needs nothing but itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from grpo_lab.report.digest import Digest
from grpo_lab.report.figures import charts
from grpo_lab.report.style import Chart
from grpo_lab.report.summary import UNCALIBRATED

SECTIONS = (
    ("learning", "Learning", ("learning",)),
    ("time", "Time", ("gantt", "utilisation")),
    ("staleness", "Staleness", ("staleness", "version_lag")),
    ("sync", "Weight sync", ("sync_cost", "step_time")),
    ("samples", "Samples", ("drops", "logprob_gap")),
)
CAPABILITIES = {
    "staged": "a failed update leaves the old weights serving",
    "hashes": "bucket hashes checked where the bytes land",
    "token_versions": "weight version of every token",
    "term_fencing": "refuses an older trainer",
    "score_while_paused": "scores tokens while paused",
    "events": "writes its own events",
}
MAX_LISTED = 50
MISSING = "\u2013"  # an en dash


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure. ``tone`` is good, bad or plain; it repeats what ``words`` say."""

    title: str
    value: str
    words: str = ""
    tone: str = "plain"


def page(
    *,
    name: str,
    digest: Digest,
    summary: Mapping[str, Any],
    checked: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> str:
    """The whole report. Every string that comes from the run is escaped.

    Args:
        summary: the figures of ``summary.json``.
        checked: ``{"violations": n, "rules": [{"id", "words", "status", "evaluations",
            "violations": [{"message", "event_ids", "t"}], "note"}]}``, or None if nothing was checked.
    """
    drawn = charts(digest)
    return str(
        _template().render(
            name=name,
            summary=summary,
            measured="simulated" if digest.simulated else "measured",
            ended=_ending(digest, summary),
            tiles=tiles(digest, summary, checked),
            sections=[
                (anchor, title, [_inline(drawn[key]) for key in keys]) for anchor, title, keys in SECTIONS
            ],
            checked=checked is not None,
            rules=[_rule_row(rule) for rule in _sorted_rules(checked)],
            engines=_capability_rows(digest),
            incidents=[(seconds(t), words) for t, words in digest.incidents[:MAX_LISTED]],
            incidents_left=max(0, len(digest.incidents) - MAX_LISTED),
            capabilities=CAPABILITIES,
            parameters=list(flat(digest.declared.parameters)) if digest.declared else [],
            config=list(flat(config)),
            environment=list(flat(environment)),
            figures=list(flat(summary)),
            events=f"{digest.records:,}",
            max_listed=MAX_LISTED,
        )
    )


def tiles(digest: Digest, summary: Mapping[str, Any], checked: Mapping[str, Any] | None) -> list[Tile]:
    """The headline figures, in reading order."""
    return [
        _violations(summary, checked),
        _accuracy(digest, summary),
        Tile(
            "Reward, first to last step",
            f"{number(summary['reward_first'])} → {number(summary['reward_last'])}",
            f"means of five: {number(summary['reward_first_5_mean'])} → "
            f"{number(summary['reward_last_5_mean'])}",
        ),
        Tile(
            "Weight versions",
            number(summary["weight_versions"]),
            f"committed in {plural(summary['optimizer_steps'], 'optimizer step')}",
        ),
        _staleness(digest, summary),
        _sync(digest, summary),
        Tile(
            "Generation",
            f"{number(summary['tokens_per_s'])} tokens/s",
            f"{number(summary['tokens_generated'])} generated, "
            f"{number(summary['tokens_trained'])} in gradients",
        ),
        Tile(
            "Trainer and engine both busy",
            percent(summary["overlap_fraction"]),
            f"of the time; trainer {percent(summary['trainer_busy_fraction'])}, "
            f"engine {percent(summary['engine_busy_fraction'])}",
        ),
        _conservation(summary),
        _gap(digest, summary),
        _proofs(summary),
        _duration(digest, summary),
    ]


def _violations(summary: Mapping[str, Any], checked: Mapping[str, Any] | None) -> Tile:
    count = summary["violations"]
    if count is None:
        return Tile("Rule violations", "not checked", "grpo-lab check evaluates the rules")
    evaluated = summary.get("rules_evaluated") or {}
    words = f"{plural(len(evaluated), 'rule')} evaluated {number(sum(evaluated.values()))} times"
    if checked is not None and (broken := [rule["id"] for rule in checked["rules"] if rule["violations"]]):
        words = f"{', '.join(broken)}; {words}"
    return Tile("Rule violations", number(count), words, "bad" if count else "good")


def _accuracy(digest: Digest, summary: Mapping[str, Any]) -> Tile:
    before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
    words = "greedy"
    if before is not None and after is not None:
        words = f"{after - before:+.3f}, {words}"
    prompts = [item.prompts for item in digest.training.evaluations if item.split == "heldout"]
    if prompts:
        words += f", on {plural(prompts[-1], 'prompt')}"
    return Tile("Held-out accuracy", f"{number(before)} → {number(after)}", words)


def _staleness(digest: Digest, summary: Mapping[str, Any]) -> Tile:
    parameters = digest.declared.parameters if digest.declared else {}
    most, steps = summary["staleness_max_versions"], summary["staleness_max_steps"]
    bound, bound_steps = parameters.get("max_staleness"), parameters.get("max_staleness_steps")
    limits = [
        (value, limit)
        for value, limit in ((most, bound), (steps, bound_steps))
        if value is not None and limit is not None
    ]
    tone = "plain" if not limits else "bad" if any(value > limit for value, limit in limits) else "good"
    words = f"bound {number(bound)}; " if bound is not None else "no bound in versions; "
    words += f"at most {number(steps)} optimizer steps"
    words += f" (bound {number(bound_steps)})" if bound_steps is not None else ""
    return Tile("Staleness, largest", MISSING if most is None else plural(most, "version"), words, tone)


def _sync(digest: Digest, summary: Mapping[str, Any]) -> Tile:
    total = summary["sync_s"]["total"]
    sizes = [sync.nbytes for sync in digest.syncs.syncs if sync.nbytes]
    words = plural(summary["syncs"], "sync")
    if sizes:
        words += f" of {max(sizes) / 1e6:,.1f} MB"
    if summary["syncs_aborted"]:
        words += f", {summary['syncs_aborted']} aborted"
    return Tile("Weight sync, mean", seconds(total), words)


def _conservation(summary: Mapping[str, Any]) -> Tile:
    parts = [("consumed", summary["consumed"]), ("dropped", summary["dropped"])]
    parts += [(key.replace("_", " "), summary[key]) for key in ("in_flight", "queued") if summary[key]]
    whole = summary["dispatched"] == sum(value for _, value in parts)
    sign = "=" if whole else "≠"
    value = f"{number(summary['dispatched'])} {sign} {' + '.join(number(part) for _, part in parts)}"
    words = f"samples dispatched {sign} {' + '.join(part for part, _ in parts)}"
    return Tile("Conservation", value, words, "good" if whole else "bad")


def _gap(digest: Digest, summary: Mapping[str, Any]) -> Tile:
    gap = summary["logprob_gap_max"]
    tolerance = digest.declared.parameters.get("logprob_tolerance") if digest.declared else None
    if gap is None or tolerance is None:
        words = "engine against trainer, equal weights"
        return Tile("Logprob gap, largest", number(gap), words)
    return Tile(
        "Logprob gap, largest",
        number(gap),
        f"tolerance {number(tolerance)}",
        "bad" if gap > tolerance else "good",
    )


def _proofs(summary: Mapping[str, Any]) -> Tile:
    proofs = summary["proofs"]
    failed = sum(count for name, count in proofs.items() if name.endswith("fails"))
    words = (
        f"canary: {number(proofs['canary_holds'])} held, "
        f"{number(proofs['canary_inconclusive'])} inconclusive, {number(proofs['canary_fails'])} failed"
    )
    if proofs["hash"]:
        value, words = (
            f"{number(proofs['hash'])} by hash",
            f"{number(proofs['structure'])} by structure; {words}",
        )
    else:
        value = f"{number(proofs['structure'])} by structure"
    return Tile("Proofs of loaded weights", value, words, "bad" if failed else "plain")


def _duration(digest: Digest, summary: Mapping[str, Any]) -> Tile:
    if digest.simulated:
        real = summary.get("wall_s")
        words = f"simulated in {seconds(real)}" if real is not None else "simulated"
        return Tile("Virtual time", seconds(summary["virtual_s"]), f"{words}; {UNCALIBRATED}")
    return Tile("Wall time", seconds(summary["wall_s"]), "from the first event to the last")


def _ending(digest: Digest, summary: Mapping[str, Any]) -> dict[str, str]:
    if digest.ended is None:
        return {"word": "cut off", "detail": "The trace stops without a last event.", "tone": "bad"}
    tone = {"clean": "good", "interrupted": "plain"}.get(digest.ended.outcome, "bad")
    return {"word": str(summary["ended"]), "detail": digest.ended.detail, "tone": tone}


def _sorted_rules(checked: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Violated rules first, then those that were evaluated, each in the checker's order."""
    rules = list(checked["rules"]) if checked is not None else []
    return sorted(rules, key=lambda rule: (not rule["violations"], not rule["evaluations"]))


def _rule_row(rule: Mapping[str, Any]) -> dict[str, Any]:
    tone = "bad" if rule["violations"] else "good" if rule["evaluations"] else "plain"
    shown = [
        {
            **violation,
            "when": seconds(violation.get("t")),
            "events": ", ".join(violation.get("event_ids", ())),
        }
        for violation in rule["violations"][:MAX_LISTED]
    ]
    return {
        **rule,
        "tone": tone,
        "shown": shown,
        "count": number(rule["evaluations"]),
        "note": rule.get("note") or "",
    }


def _capability_rows(digest: Digest) -> list[dict[str, Any]]:
    declared = digest.declared.capabilities if digest.declared else {}
    return [
        {
            "name": name,
            "has": [bool(abilities.get(key)) for key in CAPABILITIES],
            "words": "weights verified by hash"
            if abilities.get("hashes")
            else "structure and canary only, never verified by hash",
        }
        for name, abilities in sorted(declared.items())
    ]


def _inline(chart: Chart) -> dict[str, Any]:
    return {"chart": chart, "svg": Markup(chart.svg)}  # noqa: S704 (matplotlib has escaped its text)


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("grpo_lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def number(value: float | None) -> str:
    r"""A figure as people read it: thousands with commas, fractions with three digits.

    >>> number(12345), number(0.25), number(2.5e-7), number(None)
    ('12,345', '0.250', '2.5e-07', '\u2013')
    """
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not finite"
    if isinstance(value, int) or (value == round(value) and abs(value) >= 100):
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.2g}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"


def plural(count: int, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def seconds(value: float | None) -> str:
    """``0.0123`` -> ``12.3 ms``, ``75`` -> ``1 min 15 s``."""
    if value is None:
        return MISSING
    if abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    if abs(value) < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted name, JSON) rows.

    >>> list(flat({"a": {"b": 1}, "c": [True]}))
    [('a.b', '1'), ('c', '[true]')]
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield f"{prefix}{key}", text
