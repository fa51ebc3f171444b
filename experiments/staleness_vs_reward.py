"""How stale may samples be, and what does a correction buy back?

The real trainer, real tokens, rewards and gradients, in virtual time: trainer and engine have a device each.
At bound 0 all samples are of the policy that is trained, so all corrections are the same: one run serves all.

    grpo-lab sweep experiments/staleness_vs_reward.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_lab.harness.experiment import Claim, Experiment, Point, Scale, Setting, grid, points_of
from grpo_lab.harness.learning_runs import LEARNING, long_table, run_point
from grpo_lab.harness.plots import COLOURS, MARKERS, curves, interval, new_figure
from grpo_lab.harness.recipe import Recipe

NAME = "staleness_vs_reward"
SMALL = {"bound": (2, 8), "correction": ("none", "tis", "clip"), "learning_rate": (5e-5,), "steps": (28,)}
FULL = {
    "bound": (1, 2, 4, 8, 16),
    "correction": ("none", "clip", "tis", "decoupled", "mis", "icepop"),
    "learning_rate": (5e-5,),
    "steps": (64,),
}
EVALUATE_EVERY = 4
STEPS_A_MARK = 4
NOT_STALE = "bound 0"
GAINED = "held-out accuracy gained"
SHARE_OF_GAIN = 0.75


def points(scale: Scale) -> list[Point]:
    axes = FULL if scale.full else SMALL
    fresh = {**axes, "bound": (0,), "correction": ("none",)}
    return points_of(NAME, [*grid(fresh), *grid(axes)], scale, "hybrid")


def run(point: Point, folder: Path) -> Mapping[str, Setting]:
    return run_with(point, folder, LEARNING)


def run_with(point: Point, folder: Path, base: Recipe) -> Mapping[str, Setting]:
    """The run of a point, in all that the point leaves open as ``base`` says."""
    chosen = point.settings
    fields = {name: chosen[name] for name in ("correction", "learning_rate", "steps")}
    bound = int(chosen["bound"] or 0)
    return run_point(point, folder, base, bound=bound, fields=fields, evaluate_every=EVALUATE_EVERY)


def figures(table: pd.DataFrame) -> Mapping[str, Figure]:
    return {
        "accuracy_by_bound": _by_bound(table),
        "learning_curves": _learning_curves(table),
        "ratios_by_staleness": _ratios(table),
    }


def _by_bound(table: pd.DataFrame) -> Figure:
    figure = new_figure(2)
    accuracy, rate = figure.axes
    shared = _with_shared_start(table)
    shared["gained"] = shared["accuracy_after"] - shared["accuracy_before"]
    corrections = _corrections(table)
    curves(accuracy, shared, x="bound", y="gained", by="correction", order=corrections)
    accuracy.axhline(0.0, color="#555555", linewidth=0.8, linestyle=":")
    accuracy.set_ylabel(f"{GAINED} at the end")
    curves(rate, shared, x="bound", y="step_s", by="correction", order=corrections)
    rate.set_ylabel("virtual s per optimizer step")
    rate.set_ylim(bottom=0)
    for axes in figure.axes:
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks(
            sorted(table["bound"].unique()), [f"{bound}" for bound in sorted(table["bound"].unique())]
        )
        axes.set_xlabel("staleness bound (versions)")
    return figure


def _learning_curves(table: pd.DataFrame) -> Figure:
    """Bound 0, and every correction at the largest bound."""
    figure = new_figure(2, 2)
    largest = table["bound"].max()
    shown = table[table["bound"].isin([0, largest])].copy()
    shown["arm"] = [
        NOT_STALE if row.bound == 0 else f"bound {largest}, {row.correction}" for row in shown.itertuples()
    ]
    arms = [NOT_STALE, *(f"bound {largest}, {correction}" for correction in _corrections(table))]
    steps = long_table(shown, {"at_s_series": "virtual seconds", "reward_series": "reward"}, ["arm", "seed"])
    steps["optimizer step"] = steps["place"] + 1
    steps["place"] //= STEPS_A_MARK
    steps = steps.groupby(["arm", "seed", "place"], as_index=False).mean()
    looks = long_table(
        shown,
        {
            "accuracy_step_series": "optimizer step",
            "accuracy_at_s_series": "virtual seconds",
            "accuracy_series": GAINED,
        },
        ["arm", "seed", "accuracy_before"],
    )
    looks[GAINED] -= looks["accuracy_before"]  # seeds start from different models
    for row, (entries, y) in enumerate(((steps, "reward"), (looks, GAINED))):
        for column, x in enumerate(("optimizer step", "virtual seconds")):
            _trace(figure.axes[2 * row + column], entries, x, y, arms)
    figure.axes[0].set_ylabel(f"reward of the samples, mean of {STEPS_A_MARK} steps")
    figure.axes[2].legend(frameon=False, fontsize=7)
    return figure


def _trace(axes: Axes, entries: pd.DataFrame, x: str, y: str, arms: Sequence[str]) -> None:
    """A line an arm over the places of its series: means, and 95 % intervals over seeds as bands."""
    for index, arm in enumerate(arms):
        places = [rows for _, rows in entries[entries["arm"] == arm].groupby("place")]
        bars = [interval(rows[y]) for rows in places]
        at = [rows[x].mean() for rows in places]
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(at, [mean for mean, _ in bars], color=colour, marker=marker, markersize=3.5, label=arm)
        low, high = [mean - half for mean, half in bars], [mean + half for mean, half in bars]
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(*((0, 0.8) if y == "reward" else (-0.5, 0.6)))


def _ratios(table: pd.DataFrame) -> Figure:
    figure = new_figure(2)
    shared = _with_shared_start(table)
    shared["staleness"] = shared["staleness_last"].round(1)
    for axes, column, words in (
        (figure.axes[0], "ess_last", "effective sample size / tokens"),
        (figure.axes[1], "ratio_last", "mean importance ratio"),
    ):
        curves(axes, shared, x="staleness", y=column, by="correction", order=_corrections(table))
        axes.set_xlabel("realised staleness (versions), last quarter of the steps")
        axes.set_ylabel(words)
        axes.axhline(1.0, color="#555555", linewidth=0.8, linestyle=":")
    return figure


def claims(table: pd.DataFrame) -> list[Claim]:
    return [
        _reaches_its_bound(table),
        _fresh_is_on_policy(table),
        _samples_lose_weight(table),
        _uncorrected_falls(table),
        _corrected_holds(table),
        _sooner_in_time(table),
    ]


def _reaches_its_bound(table: pd.DataFrame) -> Claim:
    off = (table["staleness_last"] - table["bound"]).abs().max()
    over = int((table["staleness_max"] > table["bound"]).sum())
    reached = table.groupby("bound")["staleness_last"].mean()
    evidence = ", ".join(f"bound {bound}: {value:.2f}" for bound, value in reached.items())
    return Claim(
        "samples are as stale as the bound lets them be in the last quarter of every run, and never staler",
        bool(off <= 0.5 and over == 0),
        f"mean staleness there, {evidence}; {over} runs above their bound",
    )


def _fresh_is_on_policy(table: pd.DataFrame) -> Claim:
    """The engine's own float32 kernels against the trainer's: equal up to rounding."""
    ess = table.loc[table["bound"] == 0, "ess_last"].min()
    return Claim("at bound 0 the importance ratio is 1", bool(ess > 0.9999), f"smallest ESS {ess:.6f}")


def _samples_lose_weight(table: pd.DataFrame) -> Claim:
    stale = table[(table["bound"] > 0) & (table["correction"] == "none")]
    low, high = stale["bound"].min(), stale["bound"].max()
    ess = stale.pivot_table(index="seed", columns="bound", values="ess_last").dropna()
    return Claim(
        f"the effective sample size is smaller at bound {high} than at bound {low} in every seed",
        len(ess) > 0 and bool((ess[high] < ess[low]).all()),
        f"mean ESS without correction {ess[low].mean():.2f} at bound {low}, {ess[high].mean():.2f} at {high}",
    )


def _uncorrected_falls(table: pd.DataFrame) -> Claim:
    bound = table["bound"].max()
    won, evidence = _wins(_accuracy(table, 0, "none"), _accuracy(table, bound, "none"))
    return Claim(f"without a correction bound {bound} ends below bound 0 in every seed", won, evidence)


def _corrected_holds(table: pd.DataFrame) -> Claim:
    bound = table["bound"].max()
    none = _accuracy(table, bound, "none")
    names = [name for name in _corrections(table) if name != "none"]
    found = {name: _wins(_accuracy(table, bound, name), none) for name in names}
    return Claim(
        f"at bound {bound} tis and clip end above no correction in every seed",
        all(name in found and found[name][0] for name in ("tis", "clip")),
        "; ".join(f"{name}: {evidence}" for name, (_, evidence) in found.items()),
    )


def _sooner_in_time(table: pd.DataFrame) -> Claim:
    """At the smallest stale bound, to the same accuracy as the fresh run of the same seed."""
    bound = table.loc[table["bound"] > 0, "bound"].min()
    ratios = []
    for _, runs in table.groupby("seed"):
        both = runs[(runs["bound"] == 0) | ((runs["bound"] == bound) & (runs["correction"] == "tis"))]
        if len(both) == 2:  # neither failed
            fresh, stale = (row for _, row in both.sort_values("bound").iterrows())
            gain = fresh["accuracy_after"] - fresh["accuracy_before"]
            wanted = fresh["accuracy_before"] + SHARE_OF_GAIN * gain
            ratios.append(_reached_s(stale, wanted) / _reached_s(fresh, wanted))
    words = ", ".join("never" if ratio == float("inf") else f"{ratio:.2f}" for ratio in ratios)
    return Claim(
        f"bound {bound} with tis has {SHARE_OF_GAIN:.0%} of the fresh gain in less virtual time, on average",
        len(ratios) > 0 and sum(ratios) / len(ratios) < 1,
        f"its virtual seconds over those of bound 0, seed by seed: {words}",
    )


def _reached_s(run_row: pd.Series, accuracy: float) -> float:
    looks = long_table(
        run_row.to_frame().T, {"accuracy_at_s_series": "at_s", "accuracy_series": "accuracy"}, []
    )
    good = looks.loc[looks["accuracy"] >= accuracy, "at_s"]
    return float(good.iloc[0]) if len(good) else float("inf")


def _accuracy(table: pd.DataFrame, bound: int, correction: str) -> pd.Series:
    chosen = table[(table["bound"] == bound) & (table["correction"] == correction)]
    return chosen.set_index("seed")["accuracy_after"]


def _wins(better: pd.Series, worse: pd.Series) -> tuple[bool, str]:
    """Whether it is better in every seed that has both, and by how much."""
    better, worse = better.align(worse, join="inner")
    mean, half = interval(better - worse)
    words = f"{better.mean():.2f} against {worse.mean():.2f}, difference {mean:.2f} ± {half:.2f}"
    return len(better) > 0 and bool((better > worse).all()), words


def _corrections(table: pd.DataFrame) -> list[str]:
    found = set(table["correction"])
    return [name for name in FULL["correction"] if name in found]


def _with_shared_start(table: pd.DataFrame) -> pd.DataFrame:
    """The runs at bound 0, once for every correction."""
    fresh = table[table["bound"] == 0]
    copies = [fresh.assign(correction=name) for name in _corrections(table)]
    return pd.concat([table[table["bound"] > 0], *copies])


READING = """
**accuracy_by_bound**: left, the held-out accuracy gained at the end (mean of the last three evaluations
less the first; below the dotted line it fell) against the staleness bound; all corrections share the runs
at bound 0. Right, what the bound buys: with 1 or more the trainer never waits for generation.

**learning_curves**: reward and held-out accuracy of bound 0 and of the largest bound, against optimizer
steps and against virtual seconds. The reward is that of the samples which a step consumed, so of an older
policy: a collapse shows in it a bound's number of steps later than in the accuracy.

**ratios_by_staleness**: in the last quarter of a run's steps, Kish's effective sample size of the token
ratios pi / mu, as a share of the tokens, and their mean. 1 is on-policy; every run passes through all
staleness values up to its bound while the pipeline fills.

The seconds are those of a device each for trainer and engine whose speeds were chosen (`FAST_ENGINES` in
`grpo_lab.harness.learning_runs`), not measured. The learning is real, but that of a tiny model at a
learning rate that was chosen to make staleness hurt within minutes: the order of the arms carries over, the
numbers do not.
"""

EXPERIMENT = Experiment(
    name=NAME,
    question=(
        "How much does learning lose when samples are up to so many versions old, how much of that do "
        "off-policy corrections win back, and what does staleness buy in time?"
    ),
    points=points,
    run=run,
    figures=figures,
    claims=claims,
    reading=READING,
    defaults={
        name: getattr(LEARNING, name)
        for name in ("task", "prompts_per_step", "num_generations", "heldout_prompts", "staleness_policy")
    },
)
