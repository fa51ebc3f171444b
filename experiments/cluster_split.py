"""How many devices should train, and how many generate?

Eight devices are split into trainers and engines; the time of an optimizer step is inversely proportional to
the trainers. With each split, two limits on samples in flight and two capacities of the sample queue.

**The closed form.** A step consumes G groups of n samples each, and is followed by a sync of s seconds
during which nobody works; T is the time of the step itself. At most M groups are under way, and at most Q
are finished and wait in the queue. Prompts are admitted freely, so that nothing but M and Q holds generation
back.

*Generation.* A model step of an engine with b sequences takes t(b) = tau (1 + alpha b). A group is under way
for W = Lmax t(b) + r: the longest of its n samples has Lmax tokens in the mean, and r is scoring and
network. Little's law, twice: the groups under way are M = lambda W, and the sequences in E engines are E b =
lambda n L t(b), with the mean length L. With c = n L tau / E the second says t(b) = tau / (1 - alpha c
lambda), and the first becomes

    r alpha c lambda^2 - (Lmax tau + r + M alpha c) lambda + M = 0;

its smaller root is lambda, the groups per second that the engines would make if they never stopped.

*Cycle.* Trainer and engines work at the same time, and stop for a sync together. The slower sets the pace: a
cycle takes C = s + max(T, G / lambda). The trainer's utilisation is T / C, and n G / C samples are consumed
per second.

*Staleness.* A group's staleness is the number of commits that it sits through, from its first token until it
is consumed. Summed over groups, that is the number of groups in the system summed over commits: Little's law
with commits for a clock. As G groups leave for each commit, the mean staleness is N / G, where N are the
groups in the system when a version is committed. M of them are under way. Where generation is slower (rho =
T lambda / G < 1), the queue was empty when the step began and has got rho G groups since; where the trainer
is slower, it is full:

    mean staleness = M / G + rho    (rho < 1),        (M + Q) / G    (rho > 1).

**Range of validity.** Everybody's slots suffice for M n samples, Q >= G (else finished groups block places
under way), and one side is clearly slower: rho <= 0.75 or rho >= 1.33. In between, the queue is now full and
now empty, as lengths fluctuate, and both sides wait: the form is an upper limit there. Recomputing KV
entries after a sync is not in it, so that runs here keep them, and neither are prompts, which cost 0.2 % of
a step a token.

    grpo-lab sweep experiments/cluster_split.py
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_lab.engine.drawn import lognormal_quantile
from grpo_lab.harness.cluster_runs import ABLATION_CLUSTER, cluster_figures, records_of, scenario_of
from grpo_lab.harness.experiment import Claim, Experiment, Point, Scale, Setting, grid, points_of
from grpo_lab.harness.plots import COLOURS, MARKERS, interval, new_figure
from grpo_lab.sim.scenario import SEQUENCE_SHARE, Scenario

NAME = "cluster_split"
DEVICES = 8
STEP_DEVICE_S = 6.0  # of one optimizer step on one device
SMALL: Mapping[str, Sequence[Setting]] = {
    "trainers": [1, 2, 4, 6],
    "max_inflight": [16, 48, 128],
    "queue_capacity": [8, 32],
}
FULL: Mapping[str, Sequence[Setting]] = {
    "trainers": [1, 2, 3, 4, 5, 6, 7],
    "max_inflight": [16, 32, 48, 64, 128, 256],
    "queue_capacity": [8, 16, 32, 64],
}
CLUSTER = dataclasses.replace(
    ABLATION_CLUSTER,
    staleness_policy="drop",
    max_staleness=64,
    slots=256,
    clear_cache=False,
    steps=50,
)
WARM_STEPS = 14  # until queues are full
CLEAR = 0.75  # rho, or its inverse, up to which one side is clearly slower
TOLERANCE = 0.10
PANELS = {
    "trainer_busy_share": ("utilisation", "share of time the trainer trains"),
    "samples_per_s": ("samples_per_s_predicted", "samples trained on per second"),
    "staleness_versions_mean": ("staleness", "mean staleness (versions)"),
}
READING = """
**Utilisation and throughput.** Points are simulated runs, lines the closed form (derivation in the module's
docstring). More trainers shorten the step until generation is the slower side: throughput is best where the
two meet, and falls on both sides of it; more samples in flight move the best split towards trainers.

**Staleness.** It is set by what is allowed to wait, not by speed: M/G for the groups in flight, plus a full
queue where the trainer is the slower side, plus at most one version where it is not. A queue beyond one
step's groups buys staleness and nothing else. Open points are outside of the form's range (both sides about
as fast): there it predicts more samples, and older ones.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """``load`` is rho, training over generation time; ``within`` says whether the form claims to hold."""

    load: float
    utilisation: float
    samples_per_s: float
    staleness: float
    within: bool


def predict(scenario: Scenario, sync_s: float) -> Prediction:
    """The closed form of the module's docstring."""
    groups, places = scenario.prompts_per_step, scenario.max_inflight // scenario.generations
    load = scenario.step_s * generation_rate(scenario, places) / groups
    cycle_s = sync_s + scenario.step_s / min(load, 1.0)
    waiting = load if load < 1 else scenario.queue_capacity / groups
    fits = scenario.queue_capacity >= groups and scenario.max_inflight <= scenario.engines * scenario.slots
    return Prediction(
        load,
        scenario.step_s / cycle_s,
        groups * scenario.generations / cycle_s,
        places / groups + waiting,
        fits and not CLEAR < load < 1 / CLEAR,
    )


def generation_rate(scenario: Scenario, places: int) -> float:
    """Groups per second of engines that never stop, ``places`` of them under way."""
    mean, longest = lengths(scenario)
    engines, samples, step_s = scenario.engines, scenario.generations, scenario.token_s
    rest_s = scenario.reward_s + 2 * scenario.network_s * (1 + scenario.jitter / 2)
    slowing = SEQUENCE_SHARE * samples * mean * step_s / engines  # alpha c
    square, linear = rest_s * slowing, longest * step_s + rest_s + places * slowing
    return 2 * places / (linear + math.sqrt(linear**2 - 4 * square * places))


def lengths(scenario: Scenario, cells: int = 20_000) -> tuple[float, float]:
    """Mean of a sample's tokens, and of the longest of a group's: over the quantiles of the distribution."""
    median = scenario.mean_tokens * math.exp(-(scenario.length_sigma**2) / 2)
    quantile = lognormal_quantile(median, scenario.length_sigma)
    count = scenario.generations

    def tokens(u: float) -> int:
        return min(max(1, math.ceil(quantile(u))), scenario.max_tokens)

    middles = [(cell + 0.5) / cells for cell in range(cells)]
    # The largest of n uniform numbers is distributed as the n-th root of one.
    return statistics.fmean(map(tokens, middles)), statistics.fmean(tokens(u ** (1 / count)) for u in middles)


def points(scale: Scale) -> list[Point]:
    return points_of(NAME, grid(FULL if scale.full else SMALL), scale)


def scenario_at(settings: Mapping[str, Setting], seed: int = 0) -> Scenario:
    rest = {**settings, "seed": seed}
    trainers = rest.pop("trainers")
    assert isinstance(trainers, int)
    split: dict[str, Setting] = {"engines": DEVICES - trainers, "step_s": STEP_DEVICE_S / trainers}
    return scenario_of(CLUSTER, {**rest, **split})


def run(point: Point, folder: Path) -> Mapping[str, Setting]:
    scenario = scenario_at(point.settings, point.seed)
    figures = cluster_figures(records_of(scenario), warm_steps=WARM_STEPS)
    sync_s = figures["sync_s_mean"]
    assert isinstance(sync_s, float)
    form = predict(scenario, sync_s)
    return {
        **figures,
        "load": form.load,
        "utilisation": form.utilisation,
        "samples_per_s_predicted": form.samples_per_s,
        "staleness": form.staleness,
        "within": form.within,
    }


def figures(table: pd.DataFrame) -> dict[str, Figure]:
    found = {}
    for capacity, rows in table.groupby("queue_capacity"):
        figure = new_figure(3)
        for axes, (column, (form, words)) in zip(figure.axes, PANELS.items(), strict=True):
            for index, (inflight, chosen) in enumerate(rows.groupby("max_inflight")):
                _points_and_line(axes, chosen, column, form, index, f"{inflight}")
            axes.set_ylabel(words)
            axes.set_xlabel(f"trainers of {DEVICES} devices (queue of {capacity} groups)")
            axes.set_ylim(bottom=0)
        figure.axes[0].legend(frameon=False, fontsize=8, title="samples in flight", title_fontsize=8)
        found[f"cluster_split_queue_{capacity}"] = figure
    return found


def _points_and_line(axes: Axes, rows: pd.DataFrame, column: str, form: str, index: int, label: str) -> None:
    """Simulated means with 95 % intervals, open where the closed form does not claim to hold."""
    colour, marker = COLOURS[index], MARKERS[index]
    line = rows.groupby("trainers")[form].mean()
    axes.plot(line.index, line.to_numpy(), color=colour, linewidth=1.0, linestyle="--")
    for trainers, cell in rows.groupby("trainers"):
        mean, half = interval(cell[column])
        axes.errorbar(
            [trainers],
            [mean],
            yerr=[half],
            color=colour,
            marker=marker,
            markersize=5,
            markerfacecolor=colour if cell["within"].all() else "none",
            linestyle="none",
            capsize=2.5,
            label=label,
        )
        label = "_nolegend_"


def claims(table: pd.DataFrame) -> Sequence[Claim]:
    keys = ["trainers", "max_inflight", "queue_capacity"]
    means = table.groupby(keys).mean(numeric_only=True)
    means = means[table.groupby(keys)["within"].all()]
    found = [
        Claim(
            "nothing was dropped as too old",
            bool((table["samples_dropped"] == 0).all()),
            f"{len(table)} runs",
        )
    ]
    for column, (form, words) in PANELS.items():
        error = (means[column] - means[form]).abs() / means[form]
        worst = float(error.max()) if len(error) else float("nan")
        found.append(
            Claim(
                f"{words}: the closed form is within {TOLERANCE:.0%} in its range",
                bool(worst <= TOLERANCE),
                f"{len(means)} of {len(table.groupby(keys))} settings are in it, largest error {worst:.1%}",
            )
        )
    return found


EXPERIMENT = Experiment(
    NAME,
    "How should devices be split between training and generation, and what do limits and queues cost in "
    "staleness? Does Little's law tell?",
    points,
    run,
    figures,
    claims,
    READING,
    defaults={"devices": DEVICES, "steps": CLUSTER.steps, "staleness_policy": CLUSTER.staleness_policy},
)
