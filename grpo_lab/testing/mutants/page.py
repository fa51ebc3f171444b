"""The kill table as a page and as Markdown."""

from __future__ import annotations

import statistics
from html import escape

from grpo_lab.testing.mutants.campaign import Kill, Result
from grpo_lab.testing.mutants.figure import svg
from grpo_lab.testing.mutants.matrix import Proof, proofs

_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td, th { padding: .3rem .6rem; text-align: left }
tr { border-bottom: 1px solid #ddd } td.n { text-align: right; font-variant-numeric: tabular-nums }
.killed { color: #00674f } .survived { color: #b3261e; font-weight: bold }
small { color: #666 }
"""


def summary(result: Result) -> str:
    """One line for people."""
    killed = [kill.seconds for kill in result.mutants if kill.killed]
    median = f", median {statistics.median(killed):.1f} s, longest {max(killed):.1f} s" if killed else ""
    examples = sum(item.examples for item in result.clean)
    return (
        f"{len(killed)} of {len(result.mutants)} mutants killed{median}; "
        f"{result.alarms} alarms on the correct protocol in {examples:,} runs"
    )


def markdown(result: Result) -> str:
    """A table, with the numbers as they are."""
    head = "| mutant | what is planted | rules | fired first | all that fire | seconds | runs | events |\n"
    head += "|---|---|---|---|---|---:|---:|---:|"
    rows = [
        f"| {kill.id} | {kill.title} | {', '.join(kill.expected)} | {kill.rule or '**survived**'} "
        f"| {', '.join(kill.fired)} | {kill.seconds:.1f} | {kill.examples} | {kill.events} |"
        for kill in result.mutants
    ]
    needed = ["| rule | mutants that it alone catches | that its group alone catches |", "|---|---|---|"]
    needed += [
        f"| {proof.rule} | {', '.join(proof.alone)} | {_grouped(proof)} |"
        for proof in proofs(result.mutants)
        if proof.holds
    ]
    return "\n".join([summary(result) + ".", "", head, *rows, "", *needed]) + "\n"


def _grouped(proof: Proof) -> str:
    if not proof.grouped:
        return ""
    return f"{', '.join(proof.grouped)} (with {', '.join(_others(proof))}: {proof.reason})"


def _others(proof: Proof) -> list[str]:
    return [rule for rule in proof.group if rule != proof.rule]


def html(result: Result) -> str:
    """A page of its own, without scripts: the figure, the table, and the correct protocol's runs."""
    figure = svg(result, summary(result))
    rows = "\n".join(_row(kill) for kill in result.mutants)
    clean = "\n".join(
        f"<tr><td>{escape(item.fixture)}</td><td class=n>{item.examples}</td>"
        f"<td class=n>{item.seconds:.1f}</td><td>{escape(item.message or 'clean')}</td></tr>"
        for item in result.clean
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Mutants</title><style>{_STYLE}</style>
<h1>Mutants</h1><p>{escape(summary(result))}</p>
{figure}
<table><tr><th>mutant<th>what is planted<th>rules<th>fired first<th>all that fire<th>seconds<th>runs
<th>events</tr>
{rows}
</table>
<h2>The correct protocol, in the same searches</h2>
<table><tr><th>fixture<th>runs<th>seconds<th>alarms</tr>
{clean}
</table></html>
"""


def _row(kill: Kill) -> str:
    state = "killed" if kill.killed else "survived"
    return (
        f"<tr><td>{escape(kill.id)}</td><td>{escape(kill.title)}<br><small>{escape(kill.message)}</small></td>"
        f"<td>{escape(', '.join(kill.expected))}</td><td class={state}>{escape(kill.rule or 'survived')}</td>"
        f"<td>{escape(', '.join(kill.fired))}</td>"
        f"<td class=n>{kill.seconds:.1f}</td><td class=n>{kill.examples}</td>"
        f"<td class=n>{kill.events}</td></tr>"
    )
