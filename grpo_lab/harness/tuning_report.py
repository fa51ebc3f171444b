"""What ``grpo-lab tune`` prints: the front, the recommended recipe as TOML, and how well it came true."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from grpo_lab.harness.calibration import to_toml
from grpo_lab.harness.tuning import STALENESS, Candidate, Tuned
from grpo_lab.harness.validation import compare
from grpo_lab.harness.validation_figures import Figures
from grpo_lab.report.summary import mean

SHOWN = ("staleness_p99", "staleness_steps_mean", "sync_s", "dropped_share")


def front_table(tuned: Tuned) -> Table:
    """A row for each candidate of the front and for the recipe as it is."""
    objective = tuned.objective
    columns = [objective.quantity, STALENESS, *(name for name in SHOWN if name != objective.quantity)]
    goal = "most" if objective.goal == "max" else "least"
    table = Table(title=f"{goal} {objective.quantity} for each staleness (simulated)", title_justify="left")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")  # so that it can be broken
    table.add_column("recipe", min_width=24, overflow="fold")
    rows = [*tuned.front, *([] if tuned.default in tuned.front else [tuned.default])]
    for row in rows:
        marks = ["recommended"] if row == tuned.recommended else []
        marks += [] if row.feasible else ["breaks a constraint"]
        table.add_row(*(_number(row.figures, name) for name in columns), "\n".join([_words(row), *marks]))
    return table


def _number(figures: Figures, name: str) -> str:
    value = getattr(figures, name)
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def _words(row: Candidate) -> str:
    return escape(", ".join(f"{name}={value}" for name, value in row.settings.items()) or "as it is")


def recipe_toml(tuned: Tuned, error: str) -> str:
    """The recommended recipe, for ``grpo-lab run FILE.toml``; what was predicted is in its comments, with
    the ``error`` of predictions in words.
    """
    best = tuned.recommended
    assert best is not None
    recipe = tuned.recipe_of(best)
    default = type(recipe)()
    changed = {
        item.name: getattr(recipe, item.name)
        for item in dataclasses.fields(recipe)
        if item.name not in ("out", "name") and getattr(recipe, item.name) != getattr(default, item.name)
    }
    predicted = ", ".join(
        f"{name} {_number(best.figures, name)}"
        for name in dict.fromkeys((tuned.objective.quantity, STALENESS, *SHOWN))
    )
    head = [
        f"# {tuned.recipe.name}, tuned for {tuned.objective.quantity}"
        + "".join(f", {constraint}" for constraint in tuned.constraints),
        f"# predicted (simulated, {best.steps} steps): {predicted}",
        f"# {error}",
    ]
    return "\n".join(head) + "\n" + to_toml({"name": f"{tuned.recipe.name}-tuned", **changed})


def verdict(
    tuned: Tuned, predicted: Sequence[Figures], default: Sequence[Figures], recommended: Sequence[Figures]
) -> Iterator[str]:
    """Predicted against measured, and the ratio. ``predicted``: the recipe as it is, the recommended."""
    name = tuned.objective.quantity
    for title, forecast, runs in (
        ("recipe as it is", predicted[0], default),
        ("recommended", predicted[1], recommended),
    ):
        row = compare([forecast], runs).rows
        error = next((one.relative for one in row if one.quantity == name), None)
        values = [getattr(one, name) for one in runs]
        words = f"{min(values):,.4g} to {max(values):,.4g} over {len(values)} runs"
        yield (
            f"{title}: {name} predicted {getattr(forecast, name):,.4g}, measured {mean(values):,.4g}"
            f" ({words})" + (f", error {error:+.1%}" if error is not None else "")
        )
        yield (
            f"  mean staleness predicted {forecast.staleness_mean:.2f}, measured"
            f" {mean(one.staleness_mean for one in runs):.2f}; largest measured"
            f" {max(one.staleness_max for one in runs)} versions"
        )
    ratios = [
        getattr(new, name) / getattr(old, name)
        for new, old in zip(recommended, default, strict=True)
        if getattr(old, name)
    ]
    before, after = getattr(predicted[0], name), getattr(predicted[1], name)
    if ratios and before:
        yield (
            f"ratio recommended / as it is: predicted {after / before:.3f}, measured {mean(ratios):.3f}"
            f" ({min(ratios):.3f} to {max(ratios):.3f}, pairs of neighbouring runs)"
        )
