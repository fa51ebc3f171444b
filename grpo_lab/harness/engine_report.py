"""What a run on a real engine proves, for the terminal: which rules apply to it, and its logprobs' gaps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_lab.events import EngineProved, Record, SampleCompleted
from grpo_lab.harness.run_dir import RunDir
from grpo_lab.report.files import read_trace

GAPS_A_LINE = 8


def tell_about_engines(directory: RunDir, console: Console) -> None:
    """Prints both, as far as the run got; quiet about what it did not leave behind."""
    checked = directory.path / "check.json"
    if checked.is_file():
        console.print(rules_by_capability(json.loads(checked.read_text(encoding="utf-8"))["capabilities"]))
    if directory.trace.is_file():
        for line in logprob_gaps(read_trace(directory.trace)):
            console.print(escape(line), soft_wrap=True)


def rules_by_capability(strengths: Mapping[str, Mapping[str, str]]) -> Table:
    """How far each rule goes, from the ``capabilities`` of a check: {rule: {engine: strength}}."""
    rules: dict[str, list[str]] = defaultdict(list)
    for rule, engines in strengths.items():
        words = {
            strength: [name for name in engines if engines[name] == strength] for strength in engines.values()
        }
        for strength, names in words.items():
            everybody = len(names) == len(engines)
            rules[strength if everybody else f"{strength} ({', '.join(names)})"].append(rule)
    table = Table(title="rules by what the engine can do")
    table.add_column("applies", overflow="fold")
    table.add_column("rules", overflow="fold")
    for strength in sorted(rules, key=lambda words: (words != "full", words)):
        table.add_row(escape(strength), " ".join(rules[strength]))
    return table


def logprob_gaps(records: Iterable[Record]) -> Iterator[str]:
    """The canary's gap at each version (engine against trainer), and where token versions came from."""
    gaps: dict[str, list[tuple[int, float]]] = defaultdict(list)
    sources: dict[str, int] = defaultdict(int)
    for record in records:
        match record.event:
            case EngineProved(proof="canary", gap=float(gap), engine=engine, version=version):
                gaps[engine].append((version, gap))
            case SampleCompleted(version_source=source):
                sources[source] += 1
    for engine, found in gaps.items():
        largest = max(gap for _, gap in found)
        yield f"{engine}: canary and trainer differ by {largest:.1e} at most, over {len(found)} versions"
        for start in range(0, len(found), GAPS_A_LINE):
            line = found[start : start + GAPS_A_LINE]
            yield "  " + "  ".join(f"v{version} {gap:.1e}" for version, gap in line)
    if sources:
        parts = ", ".join(f"{source}: {count:,}" for source, count in sorted(sources.items()))
        yield f"token versions by source: {parts} samples"
