"""Is it the product of lag and learning rate that decides what stale samples cost?

Song et al. 2026, "Staleness-learning rate scaling laws for asynchronous RLHF" (arXiv 2607.01083), bound the
bias of a stale GRPO step by a constant times S eta: the largest lag times the learning rate. Real learning in
virtual time, without a correction, at every pair of a lag and a rate.

    grpo-lab sweep experiments/learning_rate_vs_lag.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from scipy import stats

from grpo_lab.harness.experiment import Claim, Experiment, Point, Scale, Setting, grid, points_of
from grpo_lab.harness.learning_runs import LEARNING, long_table, run_point
from grpo_lab.harness.plots import COLOURS, MARKERS, curves, interval, new_figure
from grpo_lab.harness.recipe import Recipe

NAME = "learning_rate_vs_lag"
SMALL = {"lag": (0, 4, 8), "learning_rate": (2.5e-5, 5e-5, 1e-4), "steps": (28,)}
FULL = {"lag": (0, 1, 2, 4, 8, 16), "learning_rate": (1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4), "steps": (64,)}
EVALUATE_EVERY = 4
EXPONENT_TOLERANCE = 0.25
EQUAL_WITHIN = 2.0
RANK_AT_LEAST = 0.8


def points(scale: Scale) -> list[Point]:
    return points_of(NAME, grid(FULL if scale.full else SMALL), scale, "hybrid")


def run(point: Point, folder: Path) -> Mapping[str, Setting]:
    return run_with(point, folder, LEARNING)


def run_with(point: Point, folder: Path, base: Recipe) -> Mapping[str, Setting]:
    """The run of a point, in all that the point leaves open as ``base`` says."""
    chosen = point.settings
    fields = {"correction": "none", **{name: chosen[name] for name in ("learning_rate", "steps")}}
    lag = int(chosen["lag"] or 0)
    return run_point(point, folder, base, bound=lag, fields=fields, evaluate_every=EVALUATE_EVERY)


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """The stale runs, with three columns more.

    product: lag times learning rate. drift: the coefficient of variation of the token ratios
    pi / mu, ``sqrt(1 / ESS - 1)``, median over the steps whose samples are as old as the lag says. loss:
    held-out accuracy below that of the same seed and rate at lag 0.
    """
    stale = table[table["lag"] > 0].copy()
    fresh = table[table["lag"] == 0].set_index(["seed", "learning_rate"])["accuracy_after"]
    stale["product"] = stale["lag"] * stale["learning_rate"]
    stale["loss"] = [
        fresh.get((row.seed, row.learning_rate), math.nan) - row.accuracy_after for row in stale.itertuples()
    ]
    steps = long_table(stale, {"staleness_series": "staleness", "ess_series": "ess"}, ["config", "lag"])
    settled = steps[(steps["staleness"].round() == steps["lag"]) & steps["ess"].notna()]
    ess = settled.groupby("config")["ess"].median()
    stale["drift"] = np.sqrt((1 / stale["config"].map(ess) - 1).clip(lower=0.0))
    return stale


def figures(table: pd.DataFrame) -> Mapping[str, Figure]:
    stale = measured(table)
    return {"drift": _drift_figure(stale), "accuracy": _accuracy_figure(table, stale)}


def _drift_figure(stale: pd.DataFrame) -> Figure:
    figure = new_figure()
    (axes,) = figure.axes
    _by_rate(axes, stale, "drift")
    products = np.array(sorted(stale["product"].unique()))
    middle = float(np.exp(np.log(stale.loc[stale["drift"] > 0, "drift"] / stale["product"]).mean()))
    axes.plot(products, middle * products, color="#555555", linewidth=0.8, linestyle=":", label="slope 1")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("coefficient of variation of pi / mu")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _accuracy_figure(table: pd.DataFrame, stale: pd.DataFrame) -> Figure:
    figure = new_figure(2)
    by_lag, by_product = figure.axes
    gained = table.assign(gained=table["accuracy_after"] - table["accuracy_before"])
    curves(by_lag, gained, x="lag", y="gained", by="learning_rate")
    by_lag.axhline(0.0, color="#555555", linewidth=0.8, linestyle=":")
    by_lag.set_xlabel("lag (versions)")
    by_lag.set_ylabel("held-out accuracy gained at the end")
    _by_rate(by_product, stale, "loss")
    by_product.axhline(0.0, color="#555555", linewidth=0.8, linestyle=":")
    by_product.set_ylabel("accuracy lost against lag 0 at the same rate")
    by_product.legend(frameon=False, fontsize=8)
    return figure


def _by_rate(axes: Axes, stale: pd.DataFrame, y: str) -> None:
    """Mean and interval over seeds against the product; a colour and a marker for each learning rate."""
    for index, (rate, rows) in enumerate(stale.groupby("learning_rate")):
        products = sorted(rows["product"].unique())
        bars = [interval(rows.loc[rows["product"] == product, y]) for product in products]
        axes.errorbar(
            [product * 1.03**index for product in products],  # equal products side by side
            [mean for mean, _ in bars],
            yerr=[half for _, half in bars],
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            linewidth=0.8,
            capsize=2.5,
            label=f"learning rate {rate:g}",
        )
    axes.set_xscale("log")
    shown = sorted(stale["product"].round(12).unique())
    axes.set_xticks(shown, [f"{product:g}" for product in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("lag x learning rate")


def claims(table: pd.DataFrame) -> list[Claim]:
    stale = measured(table)
    reached = _reaches_its_lag(table)
    if not (stale["drift"] > 0).any():  # no run was ever as stale as it says
        return [reached]
    return [reached, _drift_follows(stale), _equal_products(stale), _loss_follows(stale)]


def _reaches_its_lag(table: pd.DataFrame) -> Claim:
    reached = table.groupby("lag")["staleness_last"].mean()
    off = (table["staleness_last"] - table["lag"]).abs().max()
    over = int((table["staleness_max"] > table["lag"]).sum())
    evidence = ", ".join(f"lag {lag}: {value:.2f}" for lag, value in reached.items())
    return Claim(
        "samples are as old as the lag says in the last quarter of every run, and never older",
        bool(off <= 0.5 and over == 0),
        f"mean staleness there, {evidence}; {over} runs above",
    )


def exponents(stale: pd.DataFrame, *columns: str) -> tuple[float, ...]:
    """Those of ``drift = c * column**e * ...``, by least squares of logarithms."""
    known = stale[stale["drift"] > 0]
    terms = np.column_stack([np.ones(len(known)), *(np.log(known[name]) for name in columns)])
    return tuple(float(value) for value in np.linalg.lstsq(terms, np.log(known["drift"]), rcond=None)[0][1:])


def _drift_follows(stale: pd.DataFrame) -> Claim:
    (product,), (lag, rate) = exponents(stale, "product"), exponents(stale, "lag", "learning_rate")
    seeds = [exponents(rows, "product")[0] for _, rows in stale.groupby("seed")]
    known = stale[stale["drift"] > 0]
    factor = math.exp(np.log(known["drift"] / known["product"]).mean())
    return Claim(
        f"drift is proportional to lag x learning rate: the exponent is 1 within {EXPONENT_TOLERANCE}",
        abs(product - 1) <= EXPONENT_TOLERANCE,
        f"{product:.2f} (seeds {min(seeds):.2f} to {max(seeds):.2f}), about {factor:,.0f} times the product; "
        f"with exponents of their own: lag {lag:.2f}, learning rate {rate:.2f}",
    )


def _equal_products(stale: pd.DataFrame) -> Claim:
    """Arms are compared by their geometric mean over seeds."""
    known = stale[stale["drift"] > 0]
    drift = np.log(known["drift"]).groupby([known["product"].round(12), known["lag"]]).mean()
    pairs = [rows for _, rows in drift.groupby(level=0) if len(rows) > 1]
    factors = [math.exp(rows.max() - rows.min()) for rows in pairs]
    by_product = drift.groupby(level=0).mean()
    span = math.exp(by_product.iloc[-1] - by_product.iloc[0])
    words = ", ".join(
        f"{rows.index[0][0]:g}: {factor:.2f}" for rows, factor in zip(pairs, factors, strict=True)
    )
    return Claim(
        f"lags and rates of equal product drift equally, within a factor {EQUAL_WITHIN:g}",
        max(factors, default=math.inf) <= EQUAL_WITHIN < span,
        f"largest over smallest at product {words}; from the smallest product to the largest: {span:.1f}",
    )


def _loss_follows(stale: pd.DataFrame) -> Claim:
    arms = stale.groupby(["lag", "learning_rate"])[["product", "loss"]].mean()
    rank = float(stats.spearmanr(arms["product"], arms["loss"]).statistic)
    low, high = arms.sort_values("product").iloc[[0, -1]].itertuples(index=False)
    return Claim(
        f"what staleness costs rises with the product: rank correlation over arms at least {RANK_AT_LEAST}",
        rank >= RANK_AT_LEAST,
        f"{rank:.2f}; accuracy lost {low.loss:.2f} at {low.product:g}, {high.loss:.2f} at {high.product:g}",
    )


READING = """
**drift**: how far samples are off-policy when they are consumed, against lag x learning rate: the
coefficient of variation of the token ratios pi / mu, `sqrt(1 / ESS - 1)`, median over the steps in which
samples were as old as the lag says. The law holds where the colours fall on one line, and in its strict
form where that line is parallel to the dotted one.

**accuracy**: left, the held-out accuracy gained at the end against lag, a line a learning rate. Right, what
was lost against lag 0 at the same rate and seed, against the product: the law makes the colours fall on one
curve. A small rate can lose no more than what it gains at lag 0 in so few steps.

The paper bounds a bias of the gradient; what is measured here is the distance of the policies that causes
it, and the accuracy that it costs. AdamW's updates have the size of the learning rate whatever the
gradient's, so a lag of S steps moves parameters by about S x learning rate where gradients agree, and by
less where they are noise.
"""

EXPERIMENT = Experiment(
    name=NAME,
    question=(
        "Does the product of lag and learning rate decide how far off-policy samples are, and what they "
        "cost, as arXiv 2607.01083 predicts?"
    ),
    points=points,
    run=run,
    figures=figures,
    claims=claims,
    reading=READING,
    defaults={
        name: getattr(LEARNING, name)
        for name in ("task", "prompts_per_step", "num_generations", "heldout_prompts", "correction")
    },
)
