"""What happens to samples that are half-way when the weights change?

``abort`` cuts them off and takes them up again elsewhere, ``wait`` lets them end first, ``keep`` freezes them
and goes on under the new weights: with their KV entries computed again (``keep``), or with the old ones
(``keep, old KV``). Each with short, middling and long tails of the lengths (log-normal, one mean), and with
each policy of the prefix cache (``versioned``: nothing of another version is found; ``shared``: all is). Only
``keep`` clears the caches at the pause, which is how its KV entries are computed again.

    grpo-lab sweep experiments/pause_mode.py
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from grpo_lab.events import (
    CacheHit,
    EnginePaused,
    Event,
    ModelStep,
    OptimizerStepApplied,
    Record,
    RequestAdmitted,
    RequestFinished,
    SampleCompleted,
)
from grpo_lab.harness.cluster_runs import ABLATION_CLUSTER, cluster_figures, records_of, scenario_at
from grpo_lab.harness.experiment import Claim, Experiment, Point, Scale, Setting, grid, points_of
from grpo_lab.harness.plots import bars, curves, new_figure

NAME = "pause_mode"
WAYS: Mapping[str, Mapping[str, Setting]] = {
    "abort": {"pause_mode": "abort", "clear_cache": False},
    "wait": {"pause_mode": "wait", "clear_cache": False},
    "keep": {"pause_mode": "keep", "clear_cache": True},
    "keep, old KV": {"pause_mode": "keep", "clear_cache": False},
}
SMALL: Mapping[str, Sequence[Setting]] = {
    "way": list(WAYS),
    "prefix_policy": ["versioned", "shared"],
    "length_sigma": [0.4, 0.8, 1.2],
}
FULL: Mapping[str, Sequence[Setting]] = {
    "way": list(WAYS),
    "prefix_policy": ["versioned", "flush", "shared"],
    "length_sigma": [0.2, 0.4, 0.6, 0.8, 1.0, 1.2],
}
CLUSTER = dataclasses.replace(
    ABLATION_CLUSTER, max_staleness=4, queue_capacity=8, steps=25, max_tokens=1200, cache_outputs=True
)
READING = """
**Sync cost.** `wait` makes every sync as long as the longest sample that is in flight, and the longer the
tail, the longer all other places of the batch stand empty; the other ways stop between two model steps.

**Prefill again.** `abort` and `keep` pay with prefill: what a sample had said is read again under the new
weights, and long samples, which meet more syncs, pay more. No decoded token is lost in any way here, as an
aborted sample goes on from its partial tokens.

**Age of the KV entries.** Old entries save that prefill (`keep, old KV`; a shared prefix cache for `abort`),
and are paid for with tokens whose context older weights have computed, whose logprobs belong to no version.
A shared cache hands out entries that grow older for as long as a prefix is in use.
"""


def points(scale: Scale) -> list[Point]:
    return points_of(NAME, grid(FULL if scale.full else SMALL), scale)


def run(point: Point, folder: Path) -> Mapping[str, Setting]:
    settings = {**point.settings, **WAYS[str(point.settings["way"])]}
    del settings["way"]
    records = records_of(scenario_at(dataclasses.replace(point, settings=settings), CLUSTER))
    return {**cluster_figures(records), **pause_figures(records)}


def pause_figures(records: Sequence[Record]) -> dict[str, Setting]:
    """What the pauses cost.

    ``lost_tokens``: decoded tokens that are in no answer, and tokens of answers that are in no sample that
    was completed of them. ``prefilled_again``: prompt tokens of continuations that no cache had, and
    tokens that were recomputed in place. ``kv_age_mean``: versions between a token and the oldest KV entry
    that it was decoded on.
    """
    events = [record.event for record in records]
    cleared = any(event.clear_cache for event in events if isinstance(event, EnginePaused))
    answers = [event for event in events if isinstance(event, RequestFinished)]
    again = sum(answer.recomputed_tokens for answer in answers)
    for event in events:
        if isinstance(event, RequestAdmitted) and ".c" in event.request:
            again += event.prompt_tokens
        elif isinstance(event, CacheHit) and ".c" in event.request:
            again -= event.tokens
    aged = sum(_age_of(answer, cleared=cleared) for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    return {
        "lost_tokens": _lost_in_engines(records, cleared=cleared) + _lost_between_answers(events),
        "prefilled_again": again,
        "prefilled_again_share": again / max(tokens, 1),
        "kv_age_mean": aged / max(tokens, 1),
    }


def _age_of(answer: RequestFinished, *, cleared: bool) -> int:
    """Versions times tokens. Entries that were computed again with the new weights are as old as these."""
    if cleared or answer.kv_version is None:
        return 0
    oldest = answer.kv_version
    return sum((end - start) * max(0, version - oldest) for _, version, start, end, *_ in answer.spans)


def _lost_in_engines(records: Sequence[Record], *, cleared: bool) -> int:
    """Tokens that model steps decoded and no answer has, or has in excess.

    A step that ends a prefill samples a token that its record does not count as decoded: one for each
    request, and for each version where caches are cleared. The end of the run may catch requests in a step.
    """
    ended_s = max(record.t for record in records if isinstance(record.event, OptimizerStepApplied))
    decoded = answered = caught = 0
    for record in records:
        match record.event:
            case ModelStep(shard=0, decode_tokens=tokens):
                decoded += tokens
            case RequestFinished(spans=spans, tokens=tokens, finish_reason=reason):
                decoded += len(spans) if cleared else bool(spans)
                answered += tokens
                caught += reason == "abort" and record.t >= ended_s
    surplus = decoded - answered
    return max(surplus - caught, 0) if surplus >= 0 else -surplus


def _lost_between_answers(events: Sequence[Event]) -> int:
    answered: Counter[str] = Counter()
    lost = 0
    for event in events:
        if isinstance(event, RequestFinished):
            answered[event.request.partition(".c")[0]] += event.tokens
        elif isinstance(event, SampleCompleted):
            lost += abs(answered[event.sample] - event.tokens)
    return lost


def figures(table: pd.DataFrame) -> dict[str, Figure]:
    figure = new_figure(2, 2)
    sync, speed, again, age = figure.axes
    own = table[table["prefix_policy"] == "versioned"]
    order = list(WAYS)
    curves(sync, own, x="length_sigma", y="sync_s_mean", by="way", order=order)
    curves(speed, own, x="length_sigma", y="tokens_per_s", by="way", order=order)
    curves(again, own, x="length_sigma", y="prefilled_again_share", by="way", order=order)
    middle = sorted(table["length_sigma"].unique())[len(table["length_sigma"].unique()) // 2]
    bars(
        age, table[table["length_sigma"] == middle], x="way", y="kv_age_mean", by="prefix_policy", order=order
    )
    for axes in (sync, speed, again):
        axes.set_xlabel("tail of the lengths (sigma of the log-normal)")
    sync.set_ylabel("seconds of a weight sync")
    speed.set_ylabel("tokens trained on per second")
    again.set_ylabel("tokens prefilled again per decoded token")
    age.set_ylabel("mean age of KV entries (versions)")
    age.set_xlabel(f"tail {middle:g}")
    return {"pause_mode": figure}


def claims(table: pd.DataFrame) -> Sequence[Claim]:
    keep = table[table["way"].isin(["keep", "keep, old KV"])]
    versioned = table[table["prefix_policy"] == "versioned"].groupby("way")
    again = versioned["prefilled_again"].mean()
    return [
        Claim(
            "keep loses no decoded token",
            bool((keep["lost_tokens"] == 0).all()),
            f"{keep['lost_tokens'].sum()} of {keep['decoded_tokens'].sum():,} in {len(keep)} runs",
        ),
        Claim(
            "abort and wait lose none either: a sample that is cut off goes on from its partial tokens",
            bool((table["lost_tokens"] == 0).all()),
            f"{table['lost_tokens'].sum()} of {table['decoded_tokens'].sum():,} in {len(table)} runs",
        ),
        Claim(
            "with a versioned cache keep and abort prefill again, wait and keep with old KV entries do not",
            bool(again["keep"] > 0 and again["abort"] > 0 and again["wait"] == again["keep, old KV"] == 0),
            ", ".join(f"{way}: {again[way]:,.0f} tokens a run" for way in WAYS),
        ),
        _wait_follows_the_tail(table),
        _age(table),
        _shared_cache_spares_abort(table),
    ]


def _wait_follows_the_tail(table: pd.DataFrame) -> Claim:
    means = table.groupby(["way", "length_sigma"])["sync_s_mean"].mean()
    wait, keep = means["wait"], means["keep"]
    ratios = ", ".join(f"sigma {sigma:g}: {wait[sigma] / keep[sigma]:.1f}x" for sigma in wait.index)
    words = "a sync by wait takes longer the longer the tail, and always longer than one by keep"
    return Claim(words, bool(wait.is_monotonic_increasing and (wait > keep).all()), ratios)


def _age(table: pd.DataFrame) -> Claim:
    age = table[table["prefix_policy"] == "versioned"].groupby("way")["kv_age_mean"].mean()
    fresh = age.drop("keep, old KV")
    return Claim(
        "with a versioned cache only keep with old KV entries decodes on old ones",
        bool(age["keep, old KV"] > 0 and (fresh == 0).all()),
        ", ".join(f"{way}: {age[way]:.2f} versions" for way in WAYS),
    )


def _shared_cache_spares_abort(table: pd.DataFrame) -> Claim:
    means = table[table["way"] == "abort"].groupby("prefix_policy")[["prefilled_again", "kv_age_mean"]].mean()
    versioned, shared = means.loc["versioned"], means.loc["shared"]
    return Claim(
        "a shared cache spares abort prefill, for old KV entries",
        bool(shared["prefilled_again"] < versioned["prefilled_again"] and shared["kv_age_mean"] > 0),
        f"{1 - shared['prefilled_again'] / versioned['prefilled_again']:.0%} of the tokens prefilled again, "
        f"{shared['kv_age_mean']:.2f} versions",
    )


EXPERIMENT = Experiment(
    NAME,
    "What do abort, wait and keep waste at a weight sync, how long is it, and how old are the KV entries?",
    points,
    run,
    figures,
    claims,
    READING,
    defaults={
        "max_staleness": CLUSTER.max_staleness,
        "mean_tokens": CLUSTER.mean_tokens,
        "steps": CLUSTER.steps,
    },
)
